"""Exact sums of anybody's losses, by setting, and the test of which settings keep the risk low.

A setting is whatever was turned: an exit threshold, a level of quantisation, a budget. The losses may come from any
program; what is needed is one loss for each example under each setting, and an order of the settings that was fixed
before the losses were seen.

An example that counts twice is less evidence than it seems: three losses in a hundred examples, read four times, look
like twelve in four hundred. So digests of the ids of one setting are kept, and have to differ. Settings have to agree
on the sum of theirs, so that what holds for one holds for all.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from calm_beam.errors import CalmBeamError
from calm_beam.risk.evidence import Evidence
from calm_beam.risk.fixed_point import to_signed_fixed_point
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.testing import GridTest, TestedSetting, check_asked, statistics_for
from calm_beam.risk.totals import MODULUS, RiskTotals, sum_of_digests

# Of an id's digest: enough that ids with equal ones are the same id, and 1 GiB for all examples.
_ID_BYTES = 16
MOST_EXAMPLES = 2**26
# Losses of one setting that wait to be summed together: one by one, numpy would take most of the time.
_WAITING = 1024


class LossesError(CalmBeamError, ValueError):
    """Losses that cannot be summed or tested."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RiskTest:
    """What is to be shown of a setting: with probability at least 1 - epsilon, its expected loss is at most delta.

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

    Takes 16 bytes for each example, whatever the number of settings, so that none counts twice unnoticed.
    """

    def __init__(self, tests: Sequence[RiskTest]) -> None:
        """Begins with no losses.

        Args:
          tests: What will be asked of the sums: they hold what those p-values need.

        Raises:
          ValueError: If there is no test, or one is for losses in [0, 1] only and another takes signed ones.
        """
        methods = [P_VALUES[test.p_value] for test in tests]
        if not tests:
            raise ValueError("tests must name at least one RiskTest.")
        self.statistics = statistics_for(tests)
        # Signed losses are allowed where every test can take them.
        self._lowest = -1.0 if all(method.takes_signed for method in methods) else 0.0
        # By setting, losses and the digests of their examples' ids.
        self._waiting: dict[str, tuple[list[float], list[bytes]]] = {}
        # Of the others: sums of every statistic, one row each, and sums of the digests modulo 2^256, which are equal
        # for the same examples in any order.
        self._settled: dict[str, RiskTotals] = {}
        self._ids: dict[str, int] = {}
        # The first setting in alphabetical order that there are losses of, and digests of the ids of all of these. Sums
        # of parts that lack the setting know of another one, whose digests are dropped when they are merged.
        self._first: str | None = None
        self._first_ids = bytearray()

    def add(self, example_id: str, setting: str, *, loss: float) -> None:
        """Adds the loss of one example under one setting.

        Raises:
          LossesError: If the loss is not a number in [0, 1], or in [-1, 1] where all tests take signed losses, or there
            are too many examples to compare their ids.
        """
        # Floats first: of ten million losses nearly all are.
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
        """Adds all losses of another, and returns itself.

        Raises:
          LossesError: If there are too many examples to compare their ids.
          ValueError: If that was made for other tests.
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
        """Returns the sums as p-values take them.

        Args:
          settings: All settings there are losses of, in testing order.

        Raises:
          LossesError: If a setting has no losses, there are losses of others, settings are of different examples, or an
            example has several losses under one.
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
        """Returns how many losses of a setting are of an example that has another one."""
        ids = np.frombuffer(self._first_ids, np.uint64).reshape(-1, 2)
        # Where the first halves differ, as nearly always, so do the whole.
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
    # True is an integer to Python.
    return isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingResult(TestedSetting):
    """What a test says of one setting.

    Attributes:
      test: The test.
      setting: The setting.
    """

    test: RiskTest
    setting: str

    @property
    def accepted(self) -> bool:
        """Whether its risk was shown to be at most delta."""
        return self.rejected


def control_risk(sums: LossSums, tests: Sequence[RiskTest], *, order: Sequence[str]) -> tuple[SettingResult, ...]:
    """Returns what every test says of every setting, in testing order.

    With probability at least 1 - epsilon, all settings that a test accepts have a risk of at most its delta: whichever
    of them is chosen, by whatever criterion.

    Args:
      sums: Over all losses; each example has exactly one under every setting, and examples are independent.
      tests: Those that the sums were made for.
      order: Settings in testing order, fixed before the losses were seen; the safest first.

    Raises:
      LossesError: If the order does not name every setting once, settings are of different examples, or an example has
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
