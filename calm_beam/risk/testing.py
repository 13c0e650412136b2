"""The test of one guarantee under every setting of a grid: thresholds, or whatever else was turned."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol, Self, TypeVar

import numpy as np

from calm_beam.risk.evidence import Evidence, Loss, Statistic
from calm_beam.risk.fwer import PROCEDURES, FwerResult
from calm_beam.risk.handing_on import joint_levels
from calm_beam.risk.pvalues import P_VALUES


class Asked(Protocol):
    """What a guarantee says of its test, whatever its losses are."""

    @property
    def delta(self) -> float:
        """Risk tolerance, in (0, 1)."""
        ...

    @property
    def epsilon(self) -> float:
        """Allowed probability that the chosen setting breaks it, in (0, 1)."""
        ...

    @property
    def p_value(self) -> str:
        """Test of one setting, a key of `P_VALUES`."""
        ...

    @property
    def procedure(self) -> str:
        """How several settings are tested, a key of `PROCEDURES`."""
        ...


_Test = TypeVar("_Test", bound=Asked)
_OfTest = TypeVar("_OfTest", bound=Asked, contravariant=True)


def check_asked(
    *, delta: float, epsilon: float, p_value: str, procedure: str, procedures: Sequence[str] = tuple(PROCEDURES)
) -> None:
    """Refuses what a guarantee may not say of its test.

    Args:
      delta: As in `Asked`.
      epsilon: As there.
      p_value: As there.
      procedure: As there.
      procedures: Those that there are.

    Raises:
      ValueError: If a number is no fraction, or there is no such method.
    """
    for name, value in (("delta", delta), ("epsilon", epsilon)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be in (0, 1), got {value}. It is a fraction: for 5 % pass {name}=0.05.")
    for name, choice, known in (("p_value", p_value, tuple(P_VALUES)), ("procedure", procedure, procedures)):
        if choice not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; got {choice!r}.")


def statistics_for(guarantees: Iterable[Asked]) -> tuple[Statistic, ...]:
    """Returns what is to be summed for guarantees about one loss: it itself, and what their p-values need."""
    needed: list[Statistic] = [Loss()]
    for asked in guarantees:
        needed.extend(P_VALUES[asked.p_value].statistics(asked.delta))
    return tuple(dict.fromkeys(needed))


def p_values_for(asked: Asked, evidence: Evidence) -> np.ndarray:
    """Returns the p-value of every setting under one guarantee, shape (settings,).

    No units, as of a group without examples, prove nothing: their p-values are 1.

    Raises:
      EvidenceError: If the losses do not allow the p-value.
    """
    if evidence.n == 0:
        return np.ones(len(evidence.loss_sums))
    return P_VALUES[asked.p_value].p_values(evidence, asked.delta, asked.epsilon)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestedSetting:
    """What the test of a guarantee says of one setting.

    Attributes:
      n: Number of independent units: examples, or clusters of them.
      loss_sum: Exact sum of losses in units of 2^-32.
      risk: Mean loss.
      p_value: Of "the risk exceeds delta".
      tested: Whether the procedure looked at this setting.
      rejected: Whether it was found safe.
    """

    n: int
    loss_sum: int
    risk: float
    p_value: float
    tested: bool
    rejected: bool


TESTED_COLUMNS = tuple(field.name for field in dataclasses.fields(TestedSetting))
"""What every risk table says of a tested setting, in its order."""


def outcomes_of(
    evidence: Evidence,
    *,
    p_values: np.ndarray,
    decided: FwerResult,
) -> tuple[TestedSetting, ...]:
    """Returns what the test of a guarantee says of every setting, in testing order.

    Args:
      evidence: About its loss under every setting.
      p_values: shape (settings,).
      decided: What was rejected.

    Source: CALM Algorithm 1 (calibration with fixed sequence testing); Angelopoulos et al. (2021), "Learn then Test".
    """
    columns = (evidence.loss_sums, evidence.risks(), p_values, decided.tested, decided.rejected)
    return tuple(
        TestedSetting(n=evidence.n, loss_sum=loss_sum, risk=risk, p_value=p_value, tested=tested, rejected=rejected)
        for loss_sum, risk, p_value, tested, rejected in zip(*(column.tolist() for column in columns), strict=True)
    )


class MeasuredLosses(Protocol[_OfTest]):
    """Losses under every setting in testing order: summed over stored outputs, or of anybody's table."""

    def evidence(self, asked: _OfTest, /) -> Evidence:
        """Returns what they say about a guarantee."""
        ...


def grid_tests(
    rounds: Sequence[MeasuredLosses[_Test]], guarantees: Sequence[_Test], *, hands_on: bool = False
) -> "tuple[GridTest, ...]":
    """Returns the test of every guarantee: what calibrations and certifications compute, once or round by round.

    Args:
      rounds: What was measured in each round, from the first on without a gap; all of it in one, where the tests are
        looked at once.
      guarantees: What is to be shown.
      hands_on: Whether guarantees of which all is proved hand their epsilon on to the others, as in `joint_levels`.

    Raises:
      EvidenceError: If the losses do not allow a p-value.
    """
    tests = tuple(GridTest.of(asked, (losses.evidence(asked) for losses in rounds)) for asked in guarantees)
    if not hands_on:
        return tests
    assert len(rounds) == 1, "in rounds each keeps its epsilon"
    levels = joint_levels(
        [asked.epsilon for asked in guarantees],
        has_ended=lambda place, level: (
            guarantees[place].procedure == "fixed_sequence" and bool((tests[place].p_values <= level).all())
        ),
    )
    return tuple(dataclasses.replace(test, level=level) for test, level in zip(tests, levels, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookedAt:
    """What the test of a guarantee had come to after a round.

    Attributes:
      n: Independent units that had been counted.
      place: Index of the last setting that was accepted by then; -1 for none.
      risk: Mean loss under the setting that is followed; 0 where there were no units yet.
      log_capital: Natural logarithm of the capital that had been won against "the risk of that setting exceeds delta".
    """

    n: int
    place: int
    risk: float
    log_capital: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GridTest:
    """The test of one guarantee, looked at after every round of units; where all are there at once, after the only one.

    After every round the p-values of all units up to then are computed, and the least of each setting up to then is its
    p-value. For p-values that are the inverse of a capital which no bettor can expect to win (`is_anytime`), Ville's
    inequality makes that valid at every round, and whatever decides when to stop.

    Attributes:
      asked: The guarantee.
      evidence: After each round, about all units up to then.
      p_values: Running, shape (rounds, settings).
      level: Of the test: the guarantee's epsilon, and what others have handed on.
    """

    asked: Asked
    evidence: tuple[Evidence, ...]
    p_values: np.ndarray
    level: float

    @classmethod
    def of(cls, asked: Asked, rounds: Iterable[Evidence]) -> Self:
        """Returns the test of a guarantee, given what each round added from the first on without a gap.

        Raises:
          EvidenceError: If the losses do not allow the p-value.

        Source: Ville (1939).
        """
        p_values, sums = [], []
        for each in itertools.accumulate(rounds, Evidence.merge):
            p_values.append(p_values_for(asked, each))
            # Single losses have said all by then, and those of many tests would fill the memory.
            sums.append(dataclasses.replace(each, table=None))
        running = np.minimum.accumulate(np.stack(p_values))
        return cls(asked=asked, evidence=tuple(sums), p_values=running, level=asked.epsilon)

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """After each round, index of the last setting accepted; -1 for none."""
        return tuple(self._decided(self.p_values).last_rejected().tolist())

    def _decided(self, p_values: np.ndarray) -> FwerResult:
        return PROCEDURES[self.asked.procedure](p_values, epsilon=self.level)

    def after(self, rounds: int) -> tuple[TestedSetting, ...]:
        """Returns what the test says of every setting after some rounds, at least one."""
        p_values = self.p_values[rounds - 1]
        return outcomes_of(self.evidence[rounds - 1], p_values=p_values, decided=self._decided(p_values))

    def looks(self, *, followed: int) -> tuple[LookedAt, ...]:
        """Returns what the test had come to after every round, given the index of the setting to follow."""
        log_capital = P_VALUES[self.asked.p_value].log_capital
        assert log_capital is not None, "the plan has checked it"
        looks = []
        for evidence, place in zip(self.evidence, self.places, strict=True):
            # The first rounds may have no example of a group.
            capital = log_capital(evidence, self.asked.delta)[followed] if evidence.n else 0.0
            looks.append(
                LookedAt(n=evidence.n, place=place, risk=float(evidence.risks()[followed]), log_capital=float(capital))
            )
        return tuple(looks)
