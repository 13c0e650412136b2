"""What a manifest says of tests, whatever was tested: thresholds, or settings of a sweep that was made elsewhere."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Generic, TypeVar

from calm_beam.risk.stopping import Proved

from ._checks import ManifestError, check_number, shown
from ._record import Record
from ._values import Count, Finite, Share, Signed, Text, Unit, one_of

PROCEDURES = ("fixed_sequence", "multi_start", "fallback", "holm", "bonferroni")
PARETO = "pareto"
"""The procedure where a part of the calibration set has chosen the path, of several variants."""
EACH_VARIANT = "each_variant"
"""The procedure where every variant's grid is a sequence of its own, tested at an equal share of epsilon."""
OF_VARIANTS = (PARETO, EACH_VARIANT)
"""The procedures of several variants."""
# p-values are not published below e to the power of minus this, 1e-300, and rounded up.
_MOST_LOG_CAPITAL = 300 * math.log(10)
_LOG_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class AskedTest(Record):
    """One promise: with probability at least 1 - epsilon, the expected loss is at most delta.

    Attributes:
      group: Which group it is about; None for all prompts or examples.
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that what was chosen breaks the tolerance, in (0, 1).
      p_value: Name of the p-value. Any name is read, so that later methods need no new schema.
      procedure: How all that was tested is tested together, one of `PROCEDURES`, or of `OF_VARIANTS`.
    """

    group: Text | None
    delta: Share
    epsilon: Share
    p_value: Text
    procedure: Annotated[str, one_of(PROCEDURES)]

    @property
    def is_signed(self) -> bool:
        """Whether losses lie in [-1, 1] and not in [0, 1]."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    """The test of one threshold or setting.

    Attributes:
      n: Number of independent units the test counted: examples, or clusters of them. 0 only in an entry of a group.
      risk: Empirical risk, in [0, 1]; in [-1, 1] where the loss is signed.
      p_value: For the null "the risk exceeds delta", in [0, 1].
      rejected: Whether the null was rejected, that is, the threshold or setting accepted.
    """

    n: Count
    risk: Signed
    p_value: Unit
    rejected: bool

    @property
    def tested(self) -> object:
        """The threshold or setting."""
        raise NotImplementedError

    def check_of(self, at: str, *, group: str | None, lowest: float) -> None:
        """Refuses what cannot be in an entry.

        Args:
          at: Where the test stands in the entry.
          group: Which group the entry is about.
          lowest: The least risk there can be.
        """
        check_number(f"{at}.risk", self.risk, low=lowest, high=1)
        _check_counted(at, self.n, group=group)
        if self.n == 0 and (self.p_value, self.risk) != (1, 0):
            raise ManifestError(
                f"{at} must have p_value 1 and risk 0 where n is 0, got {shown(self.p_value)} and {shown(self.risk)}"
            )


@dataclass(frozen=True, kw_only=True)
class LookRecord(Record):
    """What an entry had come to after a round of a calibration or certification that was watched.

    Attributes:
      n: Independent units that had been counted; 0 only in an entry of a group.
      risk: Empirical risk at what was chosen in the end, or at the first that was tested where nothing was.
      log_capital: Natural logarithm of the capital that had been won against "the risk there exceeds delta". Its
        largest value, with a minus sign, is the logarithm of the p-value.
    """

    n: Count
    risk: Signed
    log_capital: Finite

    def proved(self, grid: Sequence[object]) -> Proved:
        """Returns what a rule to stop takes, given all that may be tested, in testing order."""
        raise NotImplementedError


_Step = TypeVar("_Step", bound=StepRecord)
_Look = TypeVar("_Look", bound=LookRecord)


@dataclass(frozen=True, kw_only=True)
class TestedEntry(AskedTest, Generic[_Step, _Look]):
    """One promise, and the tests it rests on.

    Attributes:
      path: The test of all that was tested, in that order.
      looks: What was found after every round, where the tests were watched; None elsewhere.
      example_risk: Mean loss over the examples at what is promised, where clusters are the independent units and the
        risk is the mean over them. Nothing is promised of it. None elsewhere, and in manifests that do not say.
    """

    # What is tested, in words, and what is said where none of them is promised.
    _TESTED: ClassVar[str]
    _NOTHING: ClassVar[str]

    path: tuple[_Step, ...]
    looks: tuple[_Look, ...] | None = None
    example_risk: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ManifestError(f"path must have an entry for every {self._TESTED} tested, got []")
        for index, step in enumerate(self.path):
            step.check_of(f"path[{index}]", group=self.group, lowest=self._lowest)
        _check_decisions(self.path, procedure=self.procedure, epsilon=self.epsilon)
        if self.example_risk is not None:
            check_number("example_risk", self.example_risk, low=self._lowest, high=1)
            if not self._is_promised:
                raise ManifestError(f"example_risk must be left out {self._NOTHING}, got {shown(self.example_risk)}")
        if self.looks is not None:
            _check_counts(self.looks, group=self.group)

    @property
    def chosen(self) -> _Step | None:
        """What the tests of the path have chosen, confirmed or not; None where nothing was found safe."""
        return next((step for step in reversed(self.path) if step.rejected), None)

    @property
    def _lowest(self) -> float:
        """The least risk there can be."""
        return -1 if self.is_signed else 0

    @property
    def _is_promised(self) -> bool:
        """Whether something was found safe, and stands."""
        raise NotImplementedError

    def _check_end(self, looks: Sequence[_Look], expected: Mapping[str, object]) -> None:
        """Refuses a last look that is not what was chosen, and capitals that do not make its p-value.

        Args:
          looks: All.
          expected: What the last one has to say of what was chosen, but for counts and risks.
        """
        step = self.chosen or self.path[0]
        _check_last(looks, {"n": step.n, **expected, "risk": step.risk})
        _check_capital(looks, step.p_value, at=step.tested)


def check_looked_at(entries: Sequence[TestedEntry[_Step, _Look]], *, rounds: int | None, is_planned: bool) -> None:
    """Refuses looks that are not one for each round, or rounds that nobody planned.

    Args:
      entries: All of a manifest.
      rounds: How many were looked at; None where all examples count.
      is_planned: Whether the plan has a rule to stop.
    """
    if is_planned != (rounds is not None):
        raise ManifestError(
            "sequential must be there exactly if plan.sequential is, "
            f"got {'none' if rounds is None else 'one'} and {'one' if is_planned else 'none'}"
        )
    for index, entry in enumerate(entries):
        found = None if entry.looks is None else len(entry.looks)
        if found != rounds:
            raise ManifestError(
                f"calibrations[{index}].looks must have one entry for each of sequential.rounds, which is "
                f"{shown(rounds)}, got {shown(found)}"
            )


def _check_decisions(path: Sequence[StepRecord], *, procedure: str, epsilon: float) -> None:
    """Refuses decisions that the procedure does not make of these p-values.

    Raises:
      ManifestError: If a sequence went on after a failure, or a decision is at odds with its p-value.
    """
    # Pareto testing is one along a path that other examples have chosen.
    is_sequence = procedure in ("fixed_sequence", PARETO)
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


def _check_counted(at: str, n: int, *, group: str | None) -> None:
    """Refuses 0 counted units but for a group, of which the first rounds may have no example."""
    if n == 0 and group is None:
        raise ManifestError(f"{at}.n must be an integer of at least 1, got 0")


def _check_counts(looks: Sequence[LookRecord], *, group: str | None) -> None:
    """Refuses looks that are none, or whose counts do not grow from round to round."""
    if not looks:
        raise ManifestError("looks must have an entry for every round, got []")
    for index, look in enumerate(looks):
        _check_counted(f"looks[{index}]", look.n, group=group)
    for index, (before, look) in enumerate(pairwise(looks), start=1):
        # A round may have no example of a group.
        if look.n < before.n or (look.n == before.n and group is None):
            raise ManifestError(
                f"looks[{index}].n must be {'above' if group is None else 'at least'} that of the round "
                f"before, {before.n}, got {look.n}"
            )


def _check_last(looks: Sequence[LookRecord], expected: Mapping[str, object]) -> None:
    """Refuses a last look at which an attribute is not what it is at the end."""
    for name, value in expected.items():
        found = getattr(looks[-1], name)
        if found != value:
            raise ManifestError(
                f"looks[{len(looks) - 1}].{name} must be {shown(value)}, as at the end, got {shown(found)}"
            )


def _check_capital(looks: Sequence[LookRecord], p_value: float, *, at: object) -> None:
    """Refuses capitals of which a p-value, that of the threshold or setting which is named, is not the inverse."""
    largest = max(look.log_capital for look in looks)
    if abs(math.log(p_value) + min(max(largest, 0), _MOST_LOG_CAPITAL)) > _LOG_ROUNDING:
        raise ManifestError(
            f"looks must come to a capital of 1 / {shown(p_value)}, which the p-value at {shown(at)} is made of, got "
            f"e^{largest:.6g}"
        )
