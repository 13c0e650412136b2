"""Whether the decisions along a path follow from its p-values."""

from collections.abc import Sequence
from typing import Protocol

from ._checks import ManifestError, shown


class Decided(Protocol):
    """The test of one threshold or setting."""

    @property
    def p_value(self) -> float:
        """For the null "the risk exceeds delta"."""
        ...

    @property
    def rejected(self) -> bool:
        """Whether the null was rejected."""
        ...


def check_decisions(path: Sequence[Decided], *, procedure: str, epsilon: float) -> None:
    """Refuses decisions that the procedure does not make of these p-values.

    Raises:
      ManifestError: If a sequence went on after a failure, or a decision is at odds with its p-value.
    """
    # Pareto testing is one along a path that other examples have chosen.
    is_sequence = procedure in ("fixed_sequence", "pareto")
    for index, entry in enumerate(path):
        if is_sequence and not entry.rejected and index + 1 < len(path):
            raise ManifestError(
                f"path[{index}].rejected is false, so the test stops there, but path[{index + 1}] follows"
            )
        is_small = entry.p_value <= epsilon
        # Other procedures may reject fewer, by thresholds of their own on the p-values, and never more.
        if entry.rejected != is_small and (entry.rejected or is_sequence):
            raise ManifestError(
                f"path[{index}].rejected must be {shown(not entry.rejected)}, got {shown(entry.rejected)}: "
                f"p_value is {shown(entry.p_value)} and epsilon {shown(epsilon)}"
            )
