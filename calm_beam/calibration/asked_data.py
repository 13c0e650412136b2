"""The data that plans are asked of, with their groups: files to decode for a plan, or stored generations.

Groups are fixed by name before any loss is seen. Which groups there are, and how many examples each has, may
depend on the data: given the names, the losses of a group are still independent draws of its own distribution, and its
tests hold.
"""

import abc
import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

from calm_beam.errors import UsageError
from calm_beam.inputs import DataFiles, read_examples
from calm_beam.inputs.examples import DataError
from calm_beam.inputs.files import digest_of_files
from calm_beam.inputs.preview import count_examples
from calm_beam.manifest import GroupRecord, Plan
from calm_beam.manifest.plan_list import AskedPlan, PlanList
from calm_beam.outputs import FinishedSweep, OutputsError, StoredGenerations, stored_groups
from calm_beam.text import counted, printable_line

MOST_GROUPS = 100
"""A field with more values than this identifies examples rather than groups."""

_MOST_NAMED = 12


def groups_of_data(data: DataFiles) -> tuple[GroupRecord, ...]:
    """Returns the groups of data files, ascending by name.

    Args:
      data: The files, read with a key of groups.

    Raises:
      DataError: If a row is malformed or names no group, or there are too many groups.
    """
    key = data.reading.group_key
    assert key is not None, "groups have a field"
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
            "Decode again with it."
        )
    names = (name for shard in finished.shards for name in stored_groups(stored.shard_path(shard.shard)))
    return counted_groups(names, key=key)


def counted_groups(names: Iterable[str | None], *, key: str) -> tuple[GroupRecord, ...]:
    """Returns the number of examples per name, ascending by name.

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
    """Returns a one-line list of the groups.

    >>> groups_in_words([GroupRecord(name="de", examples=40), GroupRecord(name="en", examples=1)], key="language")
    '2 groups by language: de (40 examples), en (1 example)'
    """
    named = ", ".join(
        f"{printable_line(group.name)} ({counted(group.examples, 'example')})" for group in groups[:_MOST_NAMED]
    )
    others = f", and {len(groups) - _MOST_NAMED} more" if len(groups) > _MOST_NAMED else ""
    return f"{counted(len(groups), 'group')} by {printable_line(key)}: {named}{others}"


class AskedData(abc.ABC):
    """The examples that a plan is about.

    Attributes:
      ARE_DECODED: Whether outputs are decoded for the plan, replacing any earlier ones.
    """

    ARE_DECODED: ClassVar[bool]

    @abc.abstractmethod
    def identity(self, plans: PlanList) -> str:
        """Returns an identifier of the data; `plans` are the earlier plans on the same outputs."""

    @abc.abstractmethod
    def groups(self) -> tuple[GroupRecord, ...]:
        """Returns the groups of the examples; they have a group key."""

    @abc.abstractmethod
    def examples(self, *, at_most: int) -> int | None:
        """Returns the number of examples; None if it exceeds `at_most`."""

    def asked(self, plan: Plan, plans: PlanList, *, command: str) -> AskedPlan:
        """Returns the list entry for a plan on these data.

        Args:
          plan: The plan.
          plans: Earlier plans on the data.
          command: The command that asks.
        """
        return AskedPlan.of(plan, data=self.identity(plans), command=command, decodes=self.ARE_DECODED)


@dataclasses.dataclass(frozen=True)
class FilesToDecode(AskedData):
    """Data files that are decoded for the plan; every method reads them.

    Attributes:
      files: The files, and how they are read.
    """

    ARE_DECODED: ClassVar[bool] = True

    files: DataFiles

    def identity(self, plans: PlanList) -> str:
        """Returns a digest of the files."""
        return digest_of_files(self.files.files)

    def groups(self) -> tuple[GroupRecord, ...]:
        """Returns the groups of the examples."""
        return groups_of_data(self.files)

    def examples(self, *, at_most: int) -> int | None:
        """Returns the number of examples; None if it exceeds `at_most`."""
        return count_examples(self.files, at_most=at_most)


@dataclasses.dataclass(frozen=True)
class DecodedExamples(AskedData):
    """Examples whose generations are stored and complete.

    Attributes:
      stored: The generations.
      finished: The mark that they are complete.
    """

    ARE_DECODED: ClassVar[bool] = False

    stored: StoredGenerations
    finished: FinishedSweep

    def identity(self, plans: PlanList) -> str:
        """Returns the name of the source data in the list of plans, or else a digest of the generations."""
        return plans.data_of_outputs() or self.finished.digest()

    def groups(self) -> tuple[GroupRecord, ...]:
        """Returns the groups of the examples, as they are stored."""
        return groups_of_stored(self.stored, self.finished)

    def examples(self, *, at_most: int) -> int | None:
        """Returns the number of stored examples; None if it exceeds `at_most`."""
        return self.finished.examples if self.finished.examples <= at_most else None

    def check_failed(self, on_error: str) -> None:
        """Refuses generations with failed examples, unless `on_error` counts those.

        Raises:
          UsageError: If there are failed examples and they do not count.
        """
        if self.finished.failed and on_error == "fail":
            raise UsageError(
                f"{self.finished.failed} of the examples in {self.stored.directory} could not be decoded. Pass "
                "--on_error=worst_case to count them with loss 1 at every threshold."
            )
