"""Checks of a data set before work starts: its first examples, an estimate of their number, or all of them.

The estimate is quick: only the beginning of each file is read. The same files give the same number on every machine.
All examples are read at once only from a data set that is small enough for memory.
"""

import collections
import contextlib
import dataclasses
import gzip
import io
import itertools
import zlib
from collections.abc import Sequence

from calm_beam.errors import UsageError
from calm_beam.storage import open_input, size
from calm_beam.text import counted

from .examples import DataError, Example, mixed_prompts
from .files import DataFiles
from .formats import FORMATS, format_of, place_of, read_examples
from .reading import Reading, SeqIOShard, is_seqio, seqio_name
from .set_parts import CALIBRATING, Split

# Per file, and in one shard of a SeqIO task; workers check the rest.
_PREVIEWED_EXAMPLES = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataPreview:
    """The kinds of values in the first examples of every file.

    Attributes:
      text_prompt: Place of the first prompt that is text; None if all are token ids.
      text_reference: Place of the first references that are texts; None if there are none.
    """

    text_prompt: str | None
    text_reference: str | None
    several_turns: str | None = None


def preview_data(paths: Sequence[str], reading: Reading) -> DataPreview:
    """Returns the kinds of values in the data, after checking the first examples of every file.

    Only one shard of a SeqIO task is read: all shards come from the same preprocessors, there may be a thousand, and
    each takes a second to open. Preprocessors may drop all examples of a shard; then the next one is tried.

    Raises:
      DataError: If one of them is malformed, a file has none, or some prompts are texts and others token ids.
    """
    first: dict[str, str] = {}
    has_examples: dict[str, bool] = {}
    for path in paths:
        name = _task_name(path) if is_seqio(path) else path
        if has_examples.get(name):
            continue
        examples = list(itertools.islice(read_examples(path, reading), _PREVIEWED_EXAMPLES))
        has_examples[name] = bool(examples)
        if not examples and not is_seqio(path):
            break
        for example in examples:
            place = place_of(path, example.line, reading=reading)
            first.setdefault("ids" if example.input is None else "text", place)
            if example.references:
                first.setdefault("reference", place)
            if example.earlier is not None:
                first.setdefault("turns", place)
    empty = next((name for name, found in has_examples.items() if not found), None)
    if empty is not None:
        raise DataError(f"--data {empty}: holds no examples.")
    if "text" in first and "ids" in first:
        raise DataError(mixed_prompts(first["text"], first["ids"]))
    return DataPreview(
        text_prompt=first.get("text"), text_reference=first.get("reference"), several_turns=first.get("turns")
    )


def count_examples(data: DataFiles, *, at_most: int) -> int | None:
    """Returns the number of examples; None once there are more than `at_most`, and then it stops reading.

    In a file with a malformed row, the rows before it count: the later full read reports that row.

    Args:
      data: The files.
      at_most: The largest number of interest.

    Raises:
      OSError: If a file cannot be read.
    """
    count = 0
    for path in data.files:
        with contextlib.suppress(DataError):
            for _ in read_examples(path, data.reading):
                count += 1
                if count > at_most:
                    return None
    return count


def _task_name(shard: str) -> str:
    """Returns the name of the split that a shard belongs to."""
    found = SeqIOShard.named(shard)
    return seqio_name(found.task, found.split)


def check_parts_of_data(data: DataFiles, part: Split) -> None:
    """Refuses data that leave one of the parts empty; reads until each part has an example.

    Raises:
      UsageError: If a part is empty.
      DataError: If a row is malformed.
    """
    seen: collections.Counter[str] = collections.Counter()
    names = set()
    for index, path in enumerate(data.files):
        for example in read_examples(path, data.reading, file_index=index):
            seen[example.id] += 1
            # Numbered like `sharding.with_unique_ids` numbers examples with equal ids.
            count = seen[example.id]
            named = dataclasses.replace(example, id=f"{example.id}-{count}") if count > 1 else example
            names.add(part.takes(named))
            if len(names) > 1:
                return
    chooses = names == {part.name == CALIBRATING}
    drawn = "choose a threshold, and none to confirm it" if chooses else "confirm what none of them chooses"
    raise UsageError(
        f"--holdout_share={part.confirm_share:g}: all of the {counted(sum(seen.values()), 'example')} were drawn to "
        f"{drawn}. Take more examples."
    )


# Most unpacked bytes of a file.
_READ_BYTES = 2**20
# Files that are read; the others count as similar.
_MOST_FILES = 32
# A record has its length and a checksum of that before it (8 and 4 bytes), and its own checksum after it.
_HEAD_BYTES, _TAIL_BYTES = 12, 4


def estimated_examples(data: DataFiles) -> int | None:
    """Returns an estimate of the number of examples in files; None if there is no way to tell.

    It is None for no files, and for SeqIO tasks, whose sources and preprocessors do not give a number.

    Args:
      data: The files. Their errors are not reported here.

    Raises:
      OSError: If one cannot be read.
    """
    if not data.files or any(is_seqio(path) for path in data.files):
        return None
    looked_at = _spread(data.files)
    estimates = [_examples_in_file(path, data.reading) for path in looked_at]
    return round(sum(estimates) * len(data.files) / len(looked_at))


def _spread(files: Sequence[str]) -> list[str]:
    count = min(len(files), _MOST_FILES)
    return [files[index * len(files) // count] for index in range(count)]


def _examples_in_file(path: str, reading: Reading) -> float:
    """Returns the number of rows of a file, estimated from its beginning unless that is the whole file."""
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
        # The reader of the data reports what is wrong.
        return 0.0


def _unpacked(packed: bytes) -> tuple[bytes, int]:
    """Returns the first bytes of gzipped data unpacked, and how many packed bytes they take."""
    raw = io.BytesIO(packed)
    content = bytearray()
    try:
        with gzip.GzipFile(fileobj=raw) as file:
            while len(content) < _READ_BYTES and (block := file.read1(2**16)):
                content += block
    except (EOFError, zlib.error, gzip.BadGzipFile):
        # The stream is cut off where the beginning ends.
        taken = len(packed)
    else:
        taken = raw.tell()
    return bytes(content), max(1, taken)


def _lines(head: bytes) -> float:
    """Returns the number of lines that begin in some bytes; the last may be incomplete."""
    return head.count(b"\n") + (0 if head.endswith(b"\n") or not head else 1)


def _records(head: bytes) -> float:
    """Returns the number of records of a TFRecord file that begin in some bytes."""
    count, place = 0, 0
    while place + _HEAD_BYTES <= len(head):
        length = int.from_bytes(head[place : place + 8], "little")
        place += _HEAD_BYTES + length + _TAIL_BYTES
        count += 1
    return count


def read_all_examples(paths: Sequence[str], reading: Reading) -> list[Example]:
    """Returns the examples of all files, after checking that ids are unique and that all or none have references.

    Raises:
      DataError: If not; names two examples.
      OSError: If a file cannot be read.
    """
    examples = [
        example for index, path in enumerate(paths) for example in read_examples(path, reading, file_index=index)
    ]
    seen: dict[str, Example] = {}
    for example in examples:
        other = seen.setdefault(example.id, example)
        if other is not example and (example.has_own_id or other.has_own_id):
            places = " and ".join(
                place_of(paths[each.file_index], each.line, reading=reading) for each in (other, example)
            )
            raise DataError(f"id {example.id!r} occurs twice ({places}). Ids must be unique.")
        if (example.input is None) != (examples[0].input is None):
            both = sorted((example, examples[0]), key=lambda each: each.input is None)
            raise DataError(
                mixed_prompts(*(place_of(paths[each.file_index], each.line, reading=reading) for each in both))
            )
        if example.has_references != examples[0].has_references:
            raise DataError(
                f"example {example.id} has {'' if example.has_references else 'no '}references, example "
                f"{examples[0].id} differs: a mean over some of them would be of another sample. Give all examples "
                "references, or none."
            )
    return examples
