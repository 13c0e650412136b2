"""Looking at a data set before work starts: its first examples, about how many it has, or all of them.

The estimate of the number takes no time: no file is read beyond its beginning. The same files give the same number on
every machine. All examples are read at once only from a data set that is small enough to be held.
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
from calm_beam.inputs.examples import DataError, Example, mixed_prompts
from calm_beam.storage import open_input, size
from calm_beam.text import counted

from .files import DataFiles
from .formats import FORMATS, format_of, place_of, read_examples
from .reading import Reading, SeqIOShard, is_seqio, seqio_name
from .set_parts import CALIBRATING, Split

# In every file, and in one shard of a SeqIO task; the rest is checked by the workers.
_PREVIEWED_EXAMPLES = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataPreview:
    """What the first examples of every file hold.

    Attributes:
      text_prompt: Where the first prompt stands that is text; None if all are token ids.
      text_reference: Where the first references stand that are texts; None if there are none.
    """

    text_prompt: str | None
    text_reference: str | None


def preview_data(paths: Sequence[str], reading: Reading) -> DataPreview:
    """Returns what kinds of values the data hold, having checked the first examples of every file.

    Of a SeqIO task, one shard is looked at: a task makes all its examples alike, may have a thousand shards, and each
    takes a second to open. Preprocessors may leave nothing of a shard, so that the next one is tried then.

    Raises:
      DataError: If one of them is malformed, a file has none, or prompts are texts here and token ids there.
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
    empty = next((name for name, found in has_examples.items() if not found), None)
    if empty is not None:
        raise DataError(f"--data {empty}: holds no examples.")
    if "text" in first and "ids" in first:
        raise DataError(mixed_prompts(first["text"], first["ids"]))
    return DataPreview(text_prompt=first.get("text"), text_reference=first.get("reference"))


def count_examples(data: DataFiles, *, at_most: int) -> int | None:
    """Returns how many examples data hold; None if they are more than that many, and then it has stopped reading.

    Of a file with a malformed row, those before it count: whoever reads it to use it names the row.

    Args:
      data: The files.
      at_most: The most that matter.

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
    """Returns the name of the split that a shard is one of."""
    found = SeqIOShard.named(shard)
    return seqio_name(found.task, found.split)


def check_parts_of_data(data: DataFiles, part: Split) -> None:
    """Refuses data that leave one of the parts empty; reads them until there is an example of each.

    Raises:
      UsageError: If they do.
      DataError: If a row is malformed.
    """
    seen: collections.Counter[str] = collections.Counter()
    names = set()
    for index, path in enumerate(data.files):
        for example in read_examples(path, data.reading, file_index=index):
            seen[example.id] += 1
            # As examples with equal ids are told apart.
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
    estimates = [_examples_in_file(path, data.reading) for path in looked_at]
    return round(sum(estimates) * len(data.files) / len(looked_at))


def _spread(files: Sequence[str]) -> list[str]:
    count = min(len(files), _MOST_FILES)
    return [files[index * len(files) // count] for index in range(count)]


def _examples_in_file(path: str, reading: Reading) -> float:
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


def read_all_examples(paths: Sequence[str], reading: Reading) -> list[Example]:
    """Returns the examples of all files, each id of its own once, and with references either all or none.

    Raises:
      DataError: If they are otherwise; names two examples.
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
