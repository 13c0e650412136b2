"""Names of SeqIO data, as they stand among data files: `seqio:TASK/SPLIT`, and each shard of it."""

import re
from typing import NamedTuple

SEQIO_PREFIX = "seqio:"
_NAME = re.compile(rf"{SEQIO_PREFIX}([^/]+)/([^/]+)(?:/(\d+)-of-(\d+))?")


class SeqIOShard(NamedTuple):
    """One of `shards` parts of a task's split; `number` counts from 0."""

    task: str
    split: str
    number: int
    shards: int

    def name(self) -> str:
        """Returns the name by which it goes among data files.

        >>> SeqIOShard("wmt", "validation", 3, 16).name()
        'seqio:wmt/validation/00003-of-00016'
        """
        return f"{seqio_name(self.task, self.split)}/{self.number:05d}-of-{self.shards:05d}"

    @classmethod
    def named(cls, name: str) -> "SeqIOShard":
        """Returns the shard of that name."""
        match = _NAME.fullmatch(name)
        assert match is not None
        return cls(match[1], match[2], int(match[3]), int(match[4]))


def is_seqio(path: str) -> bool:
    """Returns whether a name among data files is one of SeqIO data."""
    return path.startswith(SEQIO_PREFIX)


def seqio_name(task: str, split: str) -> str:
    """Returns the name of all of a split."""
    return f"{SEQIO_PREFIX}{task}/{split}"


def task_and_split(name: str) -> tuple[str, str]:
    """Returns what `seqio_name` was made of.

    Raises:
      ValueError: If the name is not of that form.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[3]:
        raise ValueError(f"{name}: expected {SEQIO_PREFIX}TASK/SPLIT, such as {seqio_name('wmt', 'validation')}.")
    return match[1], match[2]
