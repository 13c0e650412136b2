"""How many examples a data set has, about, and at once: no file is read but for its beginning.

The same files give the same number, on every machine.
"""

import gzip
import io
import zlib
from collections.abc import Sequence

from calm_beam.inputs.seqio_names import is_seqio
from calm_beam.storage import open_input, size

from .files import DataFiles
from .formats import FORMATS, format_of
from .reading import Reading

# Of what is unpacked of a file.
_READ_BYTES = 2**20
# Files looked at; the others are taken to be as these.
_MOST_FILES = 32
# Length and its checksum, 8 and 4 bytes, come before a record, its checksum behind it.
_HEAD_BYTES, _TAIL_BYTES = 12, 4


def estimated_examples(data: DataFiles) -> int | None:
    """Returns about how many examples files hold; None where nothing tells.

    That is for no files, and for SeqIO tasks, of which sources and preprocessors do not say.

    Args:
      data: The files. What is wrong with them is not found here.

    Raises:
      OSError: If one cannot be read.
    """
    if not data.files or any(is_seqio(path) for path in data.files):
        return None
    looked_at = _spread(data.files)
    estimates = [_in_file(path, data.reading) for path in looked_at]
    return round(sum(estimates) * len(data.files) / len(looked_at))


def _spread(files: Sequence[str]) -> list[str]:
    count = min(len(files), _MOST_FILES)
    return [files[index * len(files) // count] for index in range(count)]


def _in_file(path: str, reading: Reading) -> float:
    """Returns the rows of a file, estimated from its beginning unless that is all of it."""
    form = format_of(path, reading)
    if form is FORMATS["parquet"]:
        return _parquet_rows(path)
    with open_input(path) as raw:
        head = raw.read(_READ_BYTES)
    taken = len(head)
    if path.endswith(".gz"):
        head, taken = _unpacked(head)
    rows = _records(head) if form is FORMATS["tfrecord"] else _lines(head)
    whole = size(path)
    if taken >= whole or not rows:
        return rows
    return max(1.0, rows * whole / taken)


def _parquet_rows(path: str) -> float:
    import pyarrow.parquet

    try:
        with open_input(path) as raw, pyarrow.parquet.ParquetFile(raw, pre_buffer=False) as file:
            return float(file.metadata.num_rows)
    except (pyarrow.ArrowException, OSError):
        # Whoever reads the data says what is wrong.
        return 0.0


def _unpacked(packed: bytes) -> tuple[bytes, int]:
    """Returns the first bytes of what was packed by gzip, and how many bytes of the file these take."""
    raw = io.BytesIO(packed)
    content = bytearray()
    try:
        with gzip.GzipFile(fileobj=raw) as file:
            while len(content) < _READ_BYTES and (block := file.read1(2**16)):
                content += block
    except (EOFError, zlib.error, gzip.BadGzipFile):
        # The beginning of a file ends somewhere.
        taken = len(packed)
    else:
        taken = raw.tell()
    return bytes(content), max(1, taken)


def _lines(head: bytes) -> float:
    """Returns the lines that begin in some bytes, of the last of which a part may be missing."""
    return head.count(b"\n") + (0 if head.endswith(b"\n") or not head else 1)


def _records(head: bytes) -> float:
    """Returns how many records of a TFRecord file begin in some bytes."""
    count, place = 0, 0
    while place + _HEAD_BYTES <= len(head):
        length = int.from_bytes(head[place : place + 8], "little")
        place += _HEAD_BYTES + length + _TAIL_BYTES
        count += 1
    return count
