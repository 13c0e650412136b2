"""Arguments of the readers of data files: how to read, and which part.

`Reading` holds everything besides the files' bytes that decides which examples they give. A `FilePart` can be read
independently of the other parts. SeqIO data are listed with files, by name: `seqio:TASK/SPLIT`, and each shard of it.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from calm_beam.inputs.examples import RowKeys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read data files; sent to workers.

    Attributes:
      data_format: One of `FORMATS`; None takes each file's format from its suffix.
      inputs_field: Name of the field with the prompt; None takes the format's default.
      targets_field: Name of the field with the references; None takes the format's default.
      seqio_modules: Modules to import, in which SeqIO tasks are registered.
      cluster_key: Name of the field with the name of an example's cluster; None reads no clusters.
      group_key: Name of the field with the name of an example's group; None reads no groups.
      needs_references: Whether an example without references is an error.
      has_vocabulary: Whether outputs become texts; if not, references that are texts are an error.
    """

    data_format: str | None = None
    inputs_field: str | None = None
    targets_field: str | None = None
    seqio_modules: tuple[str, ...] = ()
    cluster_key: str | None = None
    group_key: str | None = None
    needs_references: bool = False
    has_vocabulary: bool = True

    def keys(self, *, inputs: str, targets: str) -> RowKeys:
        """Returns the keys of rows; `inputs` and `targets` are the format's defaults."""
        return RowKeys(
            inputs=self.inputs_field or inputs,
            targets=self.targets_field or targets,
            cluster=self.cluster_key,
            group=self.group_key,
            needs_references=self.needs_references,
            has_vocabulary=self.has_vocabulary,
        )

    def choices(self) -> dict[str, Any]:
        """Returns the choices that differ from the defaults, by name."""
        chosen = {
            "data_format": self.data_format,
            "inputs_field": self.inputs_field,
            "targets_field": self.targets_field,
            "seqio_modules": list(self.seqio_modules),
        }
        return {name: value for name, value in chosen.items() if value}


AS_USUAL = Reading()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilePart:
    """A data file, or a part of one.

    Attributes:
      path: The file.
      file_index: Index of the data file.
      row_group: Number of the Parquet row group; None for a whole file.
      first: Position of its first row in the file, from 1.
      version: The file's version when it was divided, to detect a replacement; empty for a whole file.
    """

    path: str
    file_index: int
    row_group: int | None = None
    first: int = 1
    version: str = ""


class WholeFiles:
    """Base of formats whose files have no index, so that a file is one part."""

    def check_installed(self) -> None:
        """Does nothing: by default a format needs no packages."""

    def parts(self, path: str, *, file_index: int) -> Sequence[FilePart]:
        """Returns the whole file."""
        return (FilePart(path=path, file_index=file_index),)


SEQIO_PREFIX = "seqio:"
_SEQIO_NAME = re.compile(rf"{SEQIO_PREFIX}([^/]+)/([^/]+)(?:/(\d+)-of-(\d+))?")


class SeqIOShard(NamedTuple):
    """One of `shards` parts of a task's split; `number` counts from 0."""

    task: str
    split: str
    number: int
    shards: int

    def name(self) -> str:
        """Returns the shard's name among data files.

        >>> SeqIOShard("wmt", "validation", 3, 16).name()
        'seqio:wmt/validation/00003-of-00016'
        """
        return f"{seqio_name(self.task, self.split)}/{self.number:05d}-of-{self.shards:05d}"

    @classmethod
    def named(cls, name: str) -> "SeqIOShard":
        """Returns the shard with that name."""
        match = _SEQIO_NAME.fullmatch(name)
        assert match is not None
        return cls(match[1], match[2], int(match[3]), int(match[4]))


def is_seqio(path: str) -> bool:
    """Returns whether a name in a list of data files is a SeqIO name."""
    return path.startswith(SEQIO_PREFIX)


def seqio_name(task: str, split: str) -> str:
    """Returns the name of a whole split."""
    return f"{SEQIO_PREFIX}{task}/{split}"


def task_and_split(name: str) -> tuple[str, str]:
    """Returns the task and split of a name that `seqio_name` has made.

    Raises:
      ValueError: If the name is not of that form.
    """
    match = _SEQIO_NAME.fullmatch(name)
    if match is None or match[3]:
        raise ValueError(f"{name}: expected {SEQIO_PREFIX}TASK/SPLIT, such as {seqio_name('wmt', 'validation')}.")
    return match[1], match[2]
