"""The test of one guarantee under every setting of a grid, and exact sums of losses by setting from any program.

A setting is anything that can be adjusted: an exit threshold, a level of quantisation, a budget. A test needs one loss
for each example under each setting, and an order of the settings that was fixed before the losses were seen.

An example that counts twice is less evidence than it seems: three losses in a hundred examples, read four times, look
like twelve in four hundred. So digests of the ids of one setting are kept, and have to differ. All settings must have
the same sum of digests, so that this check of one setting holds for all.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self, TypeVar

import numpy as np

from calm_beam.errors import CalmBeamError
from calm_beam.risk.evidence import MODULUS, Evidence, Loss, RiskTotals, Statistic, sum_of_digests
from calm_beam.risk.fwer import PROCEDURES, FwerResult
from calm_beam.risk.losses import to_signed_fixed_point
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.rules import joint_levels


class Asked(Protocol):
    """The parameters of a guarantee's test, for losses of any kind."""

    @property
    def delta(self) -> float:
        """Risk tolerance, in (0, 1)."""
        ...

    @property
    def epsilon(self) -> float:
        """Allowed probability that the chosen setting breaks the tolerance, in (0, 1)."""
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
    """Refuses invalid parameters of a test.

    Args:
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that the chosen setting breaks the tolerance, in (0, 1).
      p_value: Test of one setting, a key of `P_VALUES`.
      procedure: How several settings are tested, one of `procedures`.
      procedures: Names of the allowed procedures.

    Raises:
      ValueError: If a number is not in (0, 1), or a method is unknown.
    """
    for name, value in (("delta", delta), ("epsilon", epsilon)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be in (0, 1), got {value}. It is a fraction: for 5 % pass {name}=0.05.")
    for name, choice, known in (("p_value", p_value, tuple(P_VALUES)), ("procedure", procedure, procedures)):
        if choice not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; got {choice!r}.")


def statistics_for(guarantees: Iterable[Asked]) -> tuple[Statistic, ...]:
    """Returns the statistics to sum for guarantees about one loss: the loss itself, and those of their p-values."""
    needed: list[Statistic] = [Loss()]
    for asked in guarantees:
        needed.extend(P_VALUES[asked.p_value].statistics(asked.delta))
    return tuple(dict.fromkeys(needed))


def p_values_for(asked: Asked, evidence: Evidence) -> np.ndarray:
    """Returns the p-value of every setting under one guarantee, shape (settings,).

    Without units, for example in a group without examples, nothing is proved: p-values are 1.

    Raises:
      EvidenceError: If the losses do not allow the p-value.
    """
    if evidence.n == 0:
        return np.ones(len(evidence.loss_sums))
    return P_VALUES[asked.p_value].p_values(evidence, asked.delta, asked.epsilon)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestedSetting:
    """The result of a guarantee's test for one setting.

    Attributes:
      n: Number of independent units: examples, or clusters of them.
      loss_sum: Exact sum of losses in units of 2^-32.
      risk: Mean loss.
      p_value: p-value for "the risk exceeds delta".
      tested: Whether the procedure tested this setting.
      rejected: Whether the setting was found safe.
    """

    n: int
    loss_sum: int
    risk: float
    p_value: float
    tested: bool
    rejected: bool


TESTED_COLUMNS = tuple(field.name for field in dataclasses.fields(TestedSetting))
"""The columns of every risk table about a tested setting, in order."""


def outcomes_of(
    evidence: Evidence,
    *,
    p_values: np.ndarray,
    decided: FwerResult,
) -> tuple[TestedSetting, ...]:
    """Returns the results of a guarantee's test for every setting, in testing order.

    Args:
      evidence: Evidence about its loss under every setting.
      p_values: shape (settings,).
      decided: The decision of the procedure.

    Source: CALM Algorithm 1 (calibration with fixed sequence testing); Angelopoulos et al. (2021), "Learn then Test".
    """
    columns = (evidence.loss_sums, evidence.risks(), p_values, decided.tested, decided.rejected)
    return tuple(
        TestedSetting(n=evidence.n, loss_sum=loss_sum, risk=risk, p_value=p_value, tested=tested, rejected=rejected)
        for loss_sum, risk, p_value, tested, rejected in zip(*(column.tolist() for column in columns), strict=True)
    )


class MeasuredLosses(Protocol[_OfTest]):
    """Losses under every setting in testing order: from stored outputs, or from a user's table."""

    def evidence(self, asked: _OfTest, /) -> Evidence:
        """Returns the evidence about a guarantee."""
        ...


def grid_tests(
    rounds: Sequence[MeasuredLosses[_Test]], guarantees: Sequence[_Test], *, hands_on: bool = False
) -> "tuple[GridTest, ...]":
    """Returns the test of every guarantee; calibrations and certifications compute it once or round by round.

    Args:
      rounds: The losses of each round, from the first on without a gap; a single round if the tests are evaluated once.
      guarantees: The guarantees to test.
      hands_on: Whether guarantees that are fully proved pass their epsilon on to the others, as in `joint_levels`.

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
    """The state of a guarantee's test after a round.

    Attributes:
      n: Number of independent units counted by then.
      place: Index of the last setting that was accepted by then; -1 for none.
      risk: Mean loss under the followed setting; 0 if there were no units yet.
      log_capital: Natural logarithm of the capital won against "the risk of that setting exceeds delta".
    """

    n: int
    place: int
    risk: float
    log_capital: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GridTest:
    """The test of one guarantee, evaluated after every round of units; without rounds, after all units.

    After every round the p-values of all units up to then are computed, and the least of each setting up to then is its
    p-value. For p-values that are the inverse of a capital with no expected gain (`is_anytime`), Ville's
    inequality makes that valid at every round, whatever decides when to stop.

    Attributes:
      asked: The guarantee.
      evidence: Evidence after each round, about all units up to then.
      p_values: Running p-values, shape (rounds, settings).
      level: Level of the test: the guarantee's epsilon, plus what others have passed on.
    """

    asked: Asked
    evidence: tuple[Evidence, ...]
    p_values: np.ndarray
    level: float

    @classmethod
    def of(cls, asked: Asked, rounds: Iterable[Evidence]) -> Self:
        """Returns the test of a guarantee, given the evidence added by each round, from the first on without a gap.

        Raises:
          EvidenceError: If the losses do not allow the p-value.

        Source: Ville (1939).
        """
        p_values, sums = [], []
        for each in itertools.accumulate(rounds, Evidence.merge):
            p_values.append(p_values_for(asked, each))
            # Single losses are not needed any more, and those of many tests would fill the memory.
            sums.append(dataclasses.replace(each, table=None))
        running = np.minimum.accumulate(np.stack(p_values))
        return cls(asked=asked, evidence=tuple(sums), p_values=running, level=asked.epsilon)

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """Index of the last setting accepted after each round; -1 for none."""
        return tuple(self._decided(self.p_values).last_rejected().tolist())

    def _decided(self, p_values: np.ndarray) -> FwerResult:
        return PROCEDURES[self.asked.procedure](p_values, epsilon=self.level)

    def after(self, rounds: int) -> tuple[TestedSetting, ...]:
        """Returns the results for every setting after a number of rounds, at least one."""
        p_values = self.p_values[rounds - 1]
        return outcomes_of(self.evidence[rounds - 1], p_values=p_values, decided=self._decided(p_values))

    def looks(self, *, followed: int) -> tuple[LookedAt, ...]:
        """Returns the state of the test after every round, given the index of the setting to follow."""
        log_capital = P_VALUES[self.asked.p_value].log_capital
        assert log_capital is not None, "the plan has checked it"
        looks = []
        for evidence, place in zip(self.evidence, self.places, strict=True):
            # A group may have no example in the first rounds.
            capital = log_capital(evidence, self.asked.delta)[followed] if evidence.n else 0.0
            looks.append(
                LookedAt(n=evidence.n, place=place, risk=float(evidence.risks()[followed]), log_capital=float(capital))
            )
        return tuple(looks)


# Bytes of an id's digest: enough to identify an id, and few enough for 1 GiB over all examples.
_ID_BYTES = 16
MOST_EXAMPLES = 2**26
# Losses of one setting are summed in batches: one by one, numpy's overhead would take most of the time.
_WAITING = 1024


class LossesError(CalmBeamError, ValueError):
    """Losses that cannot be summed or tested."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RiskTest:
    """The claim to test for a setting: with probability at least 1 - epsilon, its expected loss is at most delta.

    Attributes:
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that a setting is accepted whose risk exceeds delta, in (0, 1).
      p_value: Test of one setting, a key of `P_VALUES` that needs sums only.
      procedure: How several settings are tested, a key of `PROCEDURES`.
    """

    delta: float
    epsilon: float
    p_value: str = "hoeffding_bentkus"
    procedure: str = "fixed_sequence"

    def __post_init__(self) -> None:
        check_asked(delta=self.delta, epsilon=self.epsilon, p_value=self.p_value, procedure=self.procedure)
        if P_VALUES[self.p_value].needs_table:
            summable = ", ".join(name for name, method in P_VALUES.items() if not method.needs_table)
            raise ValueError(
                f"p_value {self.p_value} needs every single loss in a fixed order, and there are only sums here. Take "
                f"one of {summable}."
            )


class LossSums:
    """Sums of losses by setting; adding and merging is exact, in any order and grouping.

    Keeps 16 bytes for each example, whatever the number of settings, to detect examples that count twice.
    """

    def __init__(self, tests: Sequence[RiskTest]) -> None:
        """Starts with no losses.

        Args:
          tests: The tests to be run on the sums: the sums hold the statistics that their p-values need.

        Raises:
          ValueError: If there is no test, or one is for losses in [0, 1] only and another takes signed ones.
        """
        methods = [P_VALUES[test.p_value] for test in tests]
        if not tests:
            raise ValueError("tests must name at least one RiskTest.")
        self.statistics = statistics_for(tests)
        # Signed losses are allowed where every test can take them.
        self._lowest = -1.0 if all(method.takes_signed for method in methods) else 0.0
        # Unsummed losses and the digests of their examples' ids, by setting.
        self._waiting: dict[str, tuple[list[float], list[bytes]]] = {}
        # All other losses: sums of every statistic, one row each, and sums of the digests modulo 2^256, which are equal
        # for the same examples in any order.
        self._settled: dict[str, RiskTotals] = {}
        self._ids: dict[str, int] = {}
        # The alphabetically first setting with losses, and digests of the ids of all its losses. Partial sums
        # without this setting have another first setting, whose digests are dropped when they are merged.
        self._first: str | None = None
        self._first_ids = bytearray()

    def add(self, example_id: str, setting: str, *, loss: float) -> None:
        """Adds the loss of one example under one setting.

        Raises:
          LossesError: If the loss is not a number in [0, 1], or in [-1, 1] where all tests take signed losses, or there
            are too many examples to compare their ids.
        """
        # Floats first: nearly all of ten million losses are floats.
        if not (type(loss) is float or _is_number(loss)) or not self._lowest <= loss <= 1:
            raise LossesError(
                f"example {example_id!r} under setting {setting!r}: the loss must be a number in "
                f"[{self._lowest:g}, 1], got {loss!r}."
            )
        waiting = self._waiting.get(setting)
        if waiting is None:
            waiting = self._waiting[setting] = ([], [])
        losses, digests = waiting
        losses.append(float(loss))
        digests.append(hashlib.sha256(example_id.encode("utf-8", "surrogatepass")).digest())
        if len(losses) == _WAITING:
            self._settle(setting)

    def merge(self, other: Self) -> Self:
        """Adds all losses of another instance, and returns itself.

        Raises:
          LossesError: If there are too many examples to compare their ids.
          ValueError: If the other was made for other tests.
        """
        if other.statistics != self.statistics:
            raise ValueError("only sums for the same tests can be added.")
        for setting, theirs in other.by_setting().items():
            self._settle(setting)
            self._add(setting, theirs, ids=other._ids[setting])
        if other._first is not None:
            self._compare(other._first, other._first_ids)
        return self

    def by_setting(self) -> Mapping[str, RiskTotals]:
        """Returns the sums of every setting, by its name: a row for each statistic, and one column."""
        for setting in list(self._waiting):
            self._settle(setting)
        return dict(sorted(self._settled.items()))

    def evidence(self, settings: Sequence[str]) -> Evidence:
        """Returns the sums as evidence for p-values.

        Args:
          settings: All settings with losses, in testing order.

        Raises:
          LossesError: If a setting has no losses, there are losses of other settings, settings have different examples,
            or an example has several losses under one.
        """
        found = self.by_setting()
        missing = [name for name in settings if name not in found]
        extra = [name for name in found if name not in settings]
        if missing or extra or len(set(settings)) < len(settings) or not settings:
            raise LossesError(
                f"the order must name every setting once: it has {len(settings)}, without losses are {missing}, not "
                f"named are {extra}."
            )
        first = found[settings[0]]
        for name in settings[1:]:
            other = found[name]
            if other.n != first.n:
                raise LossesError(
                    f"setting {settings[0]!r} has {first.n} losses, {name!r} has {other.n}. Every example needs one "
                    "loss under every setting: those that are left out may be the ones that fail."
                )
            if self._ids[name] != self._ids[settings[0]]:
                raise LossesError(
                    f"settings {settings[0]!r} and {name!r} have losses of different examples, or of one twice. Every "
                    "example needs one loss under every setting."
                )
        if repeated := self._repeated():
            raise LossesError(
                f"{repeated} of {first.n} losses under setting {self._first!r} are of examples that were counted "
                "before. Every example needs one loss under every setting: counted twice, it is less evidence than it "
                "seems. Are files read twice, as by two patterns that overlap? Where whole rows come twice, "
                "beam.Distinct() takes them out before they are summed."
            )
        # [statistics, settings]
        rows = np.concatenate([found[name].sums for name in settings], axis=1)
        return Evidence(n=first.n, sums=dict(zip(self.statistics, rows, strict=True)))

    def _compare(self, setting: str, ids: bytes | bytearray) -> None:
        """Keeps digests of a setting's ids for comparison, if no other setting comes first."""
        if self._first is None or setting < self._first:
            self._first, self._first_ids = setting, bytearray()
        if setting == self._first:
            self._first_ids += ids
            if len(self._first_ids) > MOST_EXAMPLES * _ID_BYTES:
                raise LossesError(
                    f"there are more than {MOST_EXAMPLES:,} losses under setting {setting!r}, too many to tell whether "
                    "an example comes twice. Take a sample of the examples, by a hash of their ids."
                )

    def _repeated(self) -> int:
        """Returns the number of losses of a setting whose example has another loss."""
        ids = np.frombuffer(self._first_ids, np.uint64).reshape(-1, 2)
        # If the first halves differ, as nearly always, so do the digests.
        halves = np.sort(ids[:, 0])
        if not (halves[1:] == halves[:-1]).any():
            return 0
        ordered = ids[np.lexsort((ids[:, 1], ids[:, 0]))]
        return int(np.count_nonzero((ordered[1:] == ordered[:-1]).all(axis=1)))

    def _settle(self, setting: str) -> None:
        waiting = self._waiting.pop(setting, None)
        if waiting is None:
            return
        losses, digests = waiting
        fixed = to_signed_fixed_point(losses)
        values = np.stack([statistic.values(fixed) for statistic in self.statistics], axis=1)
        self._compare(setting, b"".join(digest[:_ID_BYTES] for digest in digests))
        self._add(setting, RiskTotals.of(values[:, :, None]), ids=sum_of_digests(b"".join(digests)))

    def _add(self, setting: str, more: RiskTotals, *, ids: int) -> None:
        settled = self._settled.get(setting)
        self._settled[setting] = more if settled is None else settled.merge(more)
        self._ids[setting] = (self._ids.get(setting, 0) + ids) % MODULUS


def _is_number(value: object) -> bool:
    # In Python, True is an integer.
    return isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingResult(TestedSetting):
    """The result of a test for one setting.

    Attributes:
      test: The test.
      setting: The setting.
    """

    test: RiskTest
    setting: str

    @property
    def accepted(self) -> bool:
        """Whether the setting's risk was shown to be at most delta."""
        return self.rejected


def control_risk(sums: LossSums, tests: Sequence[RiskTest], *, order: Sequence[str]) -> tuple[SettingResult, ...]:
    """Returns the result of every test for every setting, in testing order.

    With probability at least 1 - epsilon, all settings that a test accepts have a risk of at most its delta, so any of
    them may be chosen, by any criterion.

    Args:
      sums: Sums over all losses; each example has exactly one under every setting, and examples are independent.
      tests: The tests that the sums were made for.
      order: Settings in testing order, fixed before the losses were seen; the safest first.

    Raises:
      LossesError: If the order does not name every setting once, settings have different examples, or an example has
        several losses under one.
      EvidenceError: If the losses do not allow a p-value, as fractions do not allow exact_binomial.

    Source: Angelopoulos et al. (2021), "Learn then Test"; CALM Algorithm 1 for thresholds.

    >>> test = RiskTest(delta=0.2, epsilon=0.05)
    >>> sums = LossSums([test])
    >>> for number in range(200):
    ...     sums.add(f"example-{number}", "8 bits", loss=0.0)
    ...     sums.add(f"example-{number}", "4 bits", loss=float(number % 2))
    >>> [(row.setting, row.accepted) for row in control_risk(sums, [test], order=["8 bits", "4 bits"])]
    [('8 bits', True), ('4 bits', False)]
    """
    evidence = sums.evidence(order)
    return tuple(
        SettingResult(**vars(found), test=test, setting=setting)
        for test in tests
        for setting, found in zip(order, GridTest.of(test, [evidence]).after(1), strict=True)
    )
