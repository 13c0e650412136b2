"""The groups of a calibration set, which are settled by their names before any loss is seen.

Which groups there are, and how many examples each has, may depend on the data: given the names, the losses of a group
are still independent draws of its own distribution, and its tests hold.
"""

import collections
from collections.abc import Iterable, Sequence

from calm_beam.inputs import DataFiles, read_examples
from calm_beam.inputs.examples import DataError
from calm_beam.manifest import GroupRecord
from calm_beam.outputs import FinishedSweep, OutputsError, StoredGenerations, stored_groups
from calm_beam.text import counted, printable_line

MOST_GROUPS = 100
"""A field with more values than this tells examples apart rather than groups."""

_MOST_NAMED = 12


def groups_of_data(data: DataFiles) -> tuple[GroupRecord, ...]:
    """Returns the groups of data files, ascending by name.

    Args:
      data: The files, read with a key of groups.

    Raises:
      DataError: If a row is malformed or names no group, or there are too many groups.
    """
    key = data.reading.group_key
    assert key is not None, "whoever asks for groups has named the field"
    examples = (
        example
        for index, path in enumerate(data.files)
        for example in read_examples(path, data.reading, file_index=index)
    )
    return counted_groups((example.group for example in examples), key=key)


def groups_of_stored(stored: StoredGenerations, finished: FinishedSweep) -> tuple[GroupRecord, ...]:
    """Returns the groups of stored generations, ascending by name.

    Args:
      stored: The generations.
      finished: Their shards.

    Raises:
      OutputsError: If they were decoded without groups, or a file is damaged.
      DataError: If there are too many groups.
    """
    key = stored.job.group_key
    if key is None:
        raise OutputsError(
            f"{stored.directory}: was decoded without --group_key, so nothing says which group an example belongs to. "
            "Decode anew with it."
        )
    names = (name for shard in finished.shards for name in stored_groups(stored.shard_path(shard.shard)))
    return counted_groups(names, key=key)


def counted_groups(names: Iterable[str | None], *, key: str) -> tuple[GroupRecord, ...]:
    """Returns how often each name is there, ascending by name.

    Args:
      names: The group of every example.
      key: Field that names them, for messages.

    Raises:
      DataError: If there are more than `MOST_GROUPS`, or an example has none.
    """
    counts: collections.Counter[str] = collections.Counter()
    for name in names:
        if name is None:
            raise DataError(f"an example names no {key}, and so belongs to no group.")
        counts[name] += 1
        if len(counts) > MOST_GROUPS:
            raise DataError(
                f"--group_key={key}: the data have more than {MOST_GROUPS} groups. Each of them needs hundreds of "
                "examples to prove anything: name a field with few values, such as a language or a domain."
            )
    return tuple(GroupRecord(name=name, examples=count) for name, count in sorted(counts.items()))


def groups_in_words(groups: Sequence[GroupRecord], *, key: str) -> str:
    """Returns which groups there are, in one line.

    >>> groups_in_words([GroupRecord(name="de", examples=40), GroupRecord(name="en", examples=1)], key="language")
    '2 groups by language: de (40 examples), en (1 example)'
    """
    named = ", ".join(
        f"{printable_line(group.name)} ({counted(group.examples, 'example')})" for group in groups[:_MOST_NAMED]
    )
    others = f", and {len(groups) - _MOST_NAMED} more" if len(groups) > _MOST_NAMED else ""
    return f"{counted(len(groups), 'group')} by {printable_line(key)}: {named}{others}"
