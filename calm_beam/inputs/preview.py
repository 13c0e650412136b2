"""Looking at the examples of a data set, or at the first of them, before work starts."""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Sequence

from calm_beam.errors import UsageError
from calm_beam.inputs.examples import DataError, mixed_prompts
from calm_beam.inputs.seqio_names import SeqIOShard, is_seqio, seqio_name
from calm_beam.text import counted

from .files import DataFiles
from .formats import place_of, read_examples
from .reading import Reading
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
