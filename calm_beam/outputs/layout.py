"""What is gathered from the losses of a run, and where it stands in the totals."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from calm_beam.manifest import Objective, PlannedTest
from calm_beam.risk.evidence import Loss, Statistic
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.testing import statistics_for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The rows of the sums, and the objectives whose single losses are kept.

    Attributes:
      objectives: Distinct objectives, in the order in which losses come.
      rows: Objective and statistic of each row that is summed.
      tabled: Objectives with a spec whose p-value needs every single loss.
      thresholds: Size of the grid.
      groups: Names of the groups that have sums of their own, in order of appearance among the specs; or of the parts
        of the set, where one chooses what the other tests.
    """

    objectives: tuple[Objective, ...]
    rows: tuple[tuple[Objective, Statistic], ...]
    tabled: tuple[Objective, ...]
    thresholds: int
    groups: tuple[str, ...] = ()

    @classmethod
    def of(cls, specs: Sequence[PlannedTest], *, thresholds: int, parts: Sequence[str] = ()) -> Self:
        """Returns the layout that serves all specs: what their p-values need, and the losses for the risk table.

        Args:
          specs: The specs.
          thresholds: Size of the grid.
          parts: Names of the parts that have sums of their own, where no spec is about a group.
        """
        objectives = objectives_of(specs)
        needed: list[tuple[Objective, Statistic]] = [(objective, Loss()) for objective in objectives]
        for spec in specs:
            needed.extend((spec.objective, statistic) for statistic in statistics_for([spec]))
        return cls(
            objectives=objectives,
            rows=tuple(dict.fromkeys(needed)),
            tabled=objectives_of([spec for spec in specs if P_VALUES[spec.p_value].needs_table]),
            thresholds=thresholds,
            groups=tuple(dict.fromkeys(spec.group for spec in specs if spec.group is not None)) or tuple(parts),
        )

    def values(self, fixed_losses: np.ndarray) -> np.ndarray:
        """Returns what is to be summed.

        Args:
          fixed_losses: shape (units, objectives, thresholds), int64 in units of 2^-32.

        Returns:
          Shape (units, rows, thresholds), int64.
        """
        by_objective = dict(zip(self.objectives, np.moveaxis(fixed_losses, 1, 0), strict=True))
        return np.stack([statistic.values(by_objective[objective]) for objective, statistic in self.rows], axis=1)

    def sums_of(self, objective: Objective, sums: np.ndarray) -> dict[Statistic, np.ndarray]:
        """Returns the sums of one objective by statistic, each of shape (thresholds,).

        Args:
          objective: Which loss.
          sums: shape (rows, thresholds): sums of `values`.
        """
        rows = zip(self.rows, sums, strict=True)
        return {statistic: row for (each, statistic), row in rows if each == objective}

    def tabled_losses(self, fixed_losses: np.ndarray) -> np.ndarray:
        """Returns the losses that are kept one by one: those of `tabled`, in its order."""
        return fixed_losses[:, [self.objectives.index(objective) for objective in self.tabled]]


def objectives_of(specs: Sequence[PlannedTest]) -> tuple[Objective, ...]:
    """Returns the distinct objectives of specs, in order of appearance; each is scored once for all its specs."""
    return tuple(dict.fromkeys(spec.objective for spec in specs))
