"""What plans are asked of: data that are decoded for them, or generations that are stored."""

import abc
import dataclasses
from typing import ClassVar

from calm_beam.errors import UsageError
from calm_beam.inputs import DataFiles
from calm_beam.inputs.files import digest_of_files
from calm_beam.inputs.preview import count_examples
from calm_beam.manifest import GroupRecord, Plan
from calm_beam.manifest.plan_list import AskedPlan, PlanList
from calm_beam.outputs import FinishedSweep, StoredGenerations

from .groups import groups_of_data, groups_of_stored


class AskedData(abc.ABC):
    """Examples that a plan is asked of.

    Attributes:
      ARE_DECODED: Whether their outputs are made for the plan, in place of what was there before.
    """

    ARE_DECODED: ClassVar[bool]

    @abc.abstractmethod
    def identity(self, plans: PlanList) -> str:
        """Returns what identifies them; `plans` are those that were asked of their outputs before."""

    @abc.abstractmethod
    def groups(self) -> tuple[GroupRecord, ...]:
        """Returns the groups of the examples, which have a key of groups."""

    @abc.abstractmethod
    def examples(self, *, at_most: int) -> int | None:
        """Returns how many examples there are; None if they are more than that many."""

    def asked(self, plan: Plan, plans: PlanList, *, command: str) -> AskedPlan:
        """Returns a plan as it is asked of them, to be listed.

        Args:
          plan: The plan.
          plans: Those that were asked before.
          command: What asks.
        """
        return AskedPlan.of(plan, data=self.identity(plans), command=command, decodes=self.ARE_DECODED)


@dataclasses.dataclass(frozen=True)
class FilesToDecode(AskedData):
    """Data files that are decoded for the plan; each answer reads them.

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
        """Returns how many examples there are; None if they are more than that many."""
        return count_examples(self.files, at_most=at_most)


@dataclasses.dataclass(frozen=True)
class DecodedExamples(AskedData):
    """Examples whose generations are stored completely.

    Attributes:
      stored: The generations.
      finished: That they are complete.
    """

    ARE_DECODED: ClassVar[bool] = False

    stored: StoredGenerations
    finished: FinishedSweep

    def identity(self, plans: PlanList) -> str:
        """Returns what the list of plans calls the data that they were made of, or else a digest of what is stored."""
        return plans.data_of_outputs() or self.finished.digest()

    def groups(self) -> tuple[GroupRecord, ...]:
        """Returns the groups of the examples, as they are stored."""
        return groups_of_stored(self.stored, self.finished)

    def examples(self, *, at_most: int) -> int | None:
        """Returns how many examples are stored; None if they are more than that many."""
        return self.finished.examples if self.finished.examples <= at_most else None

    def check_failed(self, on_error: str) -> None:
        """Refuses generations of which some failed, unless `on_error` counts those.

        Raises:
          UsageError: If there are some.
        """
        if self.finished.failed and on_error == "fail":
            raise UsageError(
                f"{self.finished.failed} of the examples in {self.stored.directory} could not be decoded. Pass "
                "--on_error=worst_case to count them with loss 1 at every threshold."
            )
