"""Tests in a manifest, of thresholds or of the settings of a sweep that was made elsewhere."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from calm_beam.errors import ManifestError
from calm_beam.risk.rules import TAILED, Proved, split_tail, tail_in_words
from calm_beam.storage.record_values import (
    Count,
    Finite,
    Items,
    Number,
    OneOf,
    Share,
    Signed,
    Text,
    Unit,
    in_words,
    shown,
)
from calm_beam.storage.records import Record

PROCEDURES = ("fixed_sequence", "multi_start", "fallback", "holm", "bonferroni")
PARETO = "pareto"
"""The procedure for several variants if a part of the calibration set has chosen the path."""
EACH_VARIANT = "each_variant"
"""The procedure for several variants if every variant's grid is tested by itself, at an equal share of epsilon."""
OF_VARIANTS = (PARETO, EACH_VARIANT)
"""The procedures of several variants."""


LOSSES_OF = {"textual": ("dissimilarity",), "risk": ("signed", "relu")}
"""The losses that each kind of consistency can be measured by, the default first."""


CONSISTENCIES = tuple(LOSSES_OF)
LOSSES = tuple(loss for losses in LOSSES_OF.values() for loss in losses)
SETTING_LOSSES = ("given", "signed", "relu")
"""Losses of settings: in [0, 1] as given; in [-1, 1]; the positive part of the latter."""


# Published p-values are at least 1e-300, e to the power of minus this, and rounded up.
_MOST_LOG_CAPITAL = 300 * math.log(10)
_LOG_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss: the kind of consistency, the metric it is measured by, and the loss computed from its scores.

    Attributes:
      consistency: `textual` (the early output against the full model's; CALM Definition 1) or `risk` (both against the
        references; CALM Definition 2).
      metric: Name of a metric.
      loss: One of `LOSSES_OF[consistency]`, or a tail of one (`calm_beam.risk.rules`); see `calm_beam.risk.losses`.
    """

    consistency: str
    metric: str
    _: dataclasses.KW_ONLY
    loss: str

    def __post_init__(self) -> None:
        if self.consistency not in CONSISTENCIES:
            raise ValueError(f"consistency must be one of {', '.join(CONSISTENCIES)}; got {self.consistency!r}.")
        allowed = LOSSES_OF[self.consistency]
        if split_tail(self.loss)[0] not in allowed:
            raise ValueError(
                f"loss must be one of {', '.join(allowed)} for {self.consistency} consistency; got {self.loss!r}."
            )

    @property
    def tail(self) -> float | None:
        """Bound that a loss must exceed to count as 1, else it counts as 0; None if losses count as they are."""
        return split_tail(self.loss)[1]

    def consistency_in_words(self) -> str:
        """Returns the kind of consistency and, for a tail, the bound that a loss must exceed.

        >>> Objective("textual", "rouge_l", loss="dissimilarity>0.3").consistency_in_words()
        'textual > 0.3'
        """
        return f"{self.consistency}{tail_in_words(self.loss)}"

    @property
    def is_signed(self) -> bool:
        """Whether losses lie in [-1, 1] and not in [0, 1]."""
        return self.loss == "signed"


class _LossOrTail:
    """A loss, or the tail of one, by its unique name."""

    def __call__(self, key: str, value: object, /) -> None:
        try:
            loss, _ = split_tail(value) if isinstance(value, str) else (value, None)
        except ValueError as error:
            raise ManifestError(f"{key}: {error}") from error
        OneOf(LOSSES)(key, loss)

    def schema(self) -> dict[str, Any]:
        """Returns the losses, and the two forms of a tail's number."""
        of = f"({'|'.join(TAILED)})"
        forms = (rf"^{of}>0\.[0-9]+$", rf"^{of}>[1-9](\.[0-9]+)?e-[0-9]+$")
        return {"anyOf": [OneOf(LOSSES).schema(), *({"type": "string", "pattern": form} for form in forms)]}


LossName = Annotated[str, _LossOrTail()]
"""One of `LOSSES`, or a tail of one (`calm_beam.risk.rules`)."""


@dataclass(frozen=True, kw_only=True)
class AskedTest(Record):
    """One promise: with probability at least 1 - epsilon, the expected loss is at most delta.

    Attributes:
      group: Group that the promise is about; None for all prompts or examples.
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that the choice breaks the tolerance, in (0, 1).
      p_value: Name of the p-value. Any name is accepted, so that later methods need no new schema.
      procedure: How several thresholds or settings are tested; `fixed_sequence`: in the planned order until the first
        that is not rejected; `pareto`: the same, in an order that other examples have chosen; `each_variant`: the same
        down the grid of every variant by itself, each at an equal share of epsilon.
    """

    group: Text | None
    delta: Share
    epsilon: Share
    p_value: Text
    procedure: Annotated[str, OneOf(PROCEDURES)]

    @property
    def is_signed(self) -> bool:
        """Whether losses lie in [-1, 1] and not in [0, 1]."""
        raise NotImplementedError

    def least_units(self, *, level: float) -> int:
        """Returns the least number of units with which a test can be as sure as that, even if none loses anything.

        If a unit loses 1 with probability delta and otherwise nothing, n of them lose nothing with probability
        (1 - delta)^n. A test that rejected then would be wrong with that probability, which the level has to bound.

        Args:
          level: Allowed probability that the test is wrong: epsilon, or a share of it.
        """
        return math.ceil(math.log(level) / math.log1p(-self.delta) - _LOG_ROUNDING)


@dataclass(frozen=True, kw_only=True)
class ThresholdTest(AskedTest):
    """One promise about thresholds, without its loss.

    Attributes:
      consistency: What early outputs are compared with: the full model's output (`textual`), or the references,
        relative to the full model's score on them (`risk`).
      metric: Name of the metric behind the loss.
    """

    consistency: Annotated[str, OneOf(CONSISTENCIES)]
    metric: Text
    procedure: Annotated[str, OneOf((*PROCEDURES, *OF_VARIANTS))]
    group: Text | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedTest(ThresholdTest):
    """One planned promise about thresholds, with all defaults filled in.

    Attributes:
      loss: Loss computed from the metric's scores: 1 - score (`dissimilarity`), the full model's score minus the early
        output's (`signed`), or its positive part (`relu`); or, written as in `relu>0.3`, 1 where such a loss exceeds a
        number and else 0 (`calm_beam.risk.rules`).
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("consistency", "metric", "loss")

    loss: LossName

    @property
    def objective(self) -> Objective:
        """The loss of the promise."""
        return Objective(self.consistency, self.metric, loss=self.loss)

    @property
    def is_signed(self) -> bool:
        """Whether losses lie in [-1, 1] and not in [0, 1]."""
        return self.objective.is_signed


@dataclass(frozen=True, kw_only=True)
class SettingTest(AskedTest):
    """One planned promise about settings.

    Attributes:
      loss: Kind of loss: in [0, 1] as given; signed, in [-1, 1]; or the positive part of a signed one.
      tail: A loss that an example may have: delta is then the share of examples that may lose more. None if the mean
        loss is bounded.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("group", "loss", "tail")

    loss: Annotated[str, OneOf(SETTING_LOSSES)]
    tail: Annotated[float, Number(0, 1, below=True)] | None

    @property
    def is_signed(self) -> bool:
        """Whether losses lie in [-1, 1] and not in [0, 1]; those of a tail are 0 and 1."""
        return self.loss == "signed" and self.tail is None


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    """The test of one threshold or setting.

    Attributes:
      n: Number of independent units in the test: examples, or clusters of them. 0 only in an entry of a group.
      risk: Empirical risk, in [0, 1]; in [-1, 1] if the loss is signed.
      p_value: p-value for the null "the risk exceeds delta", in [0, 1].
      rejected: Whether the null was rejected, that is, the threshold or setting accepted.
    """

    n: Count
    risk: Signed
    p_value: Unit
    rejected: bool

    @classmethod
    def of(cls, row: object) -> Self:
        """Returns the test in a row of a risk table, whose columns have the same names."""
        return cls(**{name: getattr(row, name) for name in cls.file_keys()})

    @property
    def tested(self) -> object:
        """The threshold or setting."""
        raise NotImplementedError

    def check_of(self, at: str, *, group: str | None, lowest: float) -> None:
        """Refuses values that an entry cannot have.

        Args:
          at: Key path of the test in the entry.
          group: Group that the entry is about.
          lowest: The least possible risk.
        """
        Number(lowest, 1)(f"{at}.risk", self.risk)
        _check_counted(at, self.n, group=group)
        if self.n == 0 and (self.p_value, self.risk) != (1, 0):
            raise ManifestError(
                f"{at} must have p_value 1 and risk 0 where n is 0, got {shown(self.p_value)} and {shown(self.risk)}"
            )


@dataclass(frozen=True, kw_only=True)
class LookRecord(Record):
    """The state of an entry after a round of a watched calibration or certification.

    Attributes:
      n: Number of independent units counted by then; 0 only in an entry of a group.
      risk: Empirical risk at the final choice, or at the first that was tested if nothing was chosen.
      log_capital: Natural logarithm of the capital won against "the risk there exceeds delta". Minus its largest value
        is the logarithm of the p-value.
    """

    n: Count
    risk: Signed
    log_capital: Finite

    def proved(self, grid: Sequence[object]) -> Proved:
        """Returns the state as stopping rules take it, given all that may be tested, in testing order."""
        raise NotImplementedError


_Step = TypeVar("_Step", bound=StepRecord)
_Look = TypeVar("_Look", bound=LookRecord)


@dataclass(frozen=True, kw_only=True)
class TestedEntry(AskedTest, Generic[_Step, _Look]):
    """One promise, and the tests it rests on.

    Attributes:
      path: The tests that were carried out, in order.
      looks: The state after every round, if the tests were watched; None elsewhere.
      example_risk: Mean loss over the examples at the promised threshold or setting, if clusters are the independent
        units and the risk is the mean over them. Nothing is promised about it. None elsewhere, and in manifests that do
        not record it.
      tested_epsilon: Level of the path's tests, if other promises that hold together with this one had nothing left to
        test and passed theirs on. None if it is `epsilon`.
    """

    # Field names of the tested threshold or setting and of its cost, in the entry, its steps and its looks.
    _TESTED: ClassVar[str]
    _COST: ClassVar[str]

    path: Annotated[tuple[_Step, ...], Items(1, "have an entry for everything that was tested")]
    looks: Annotated[tuple[_Look, ...], Items(1, "have an entry for every round")] | None = None
    example_risk: Signed | None = None
    tested_epsilon: Share | None = None

    @property
    def path_level(self) -> float:
        """Level of the tests of the path."""
        return self.epsilon if self.tested_epsilon is None else self.tested_epsilon

    @property
    def promised_epsilon(self) -> float:
        """Level of the tests that the promise rests on."""
        return self.path_level

    def __post_init__(self) -> None:
        super().__post_init__()
        for index, step in enumerate(self.path):
            step.check_of(f"path[{index}]", group=self.group, lowest=self._lowest)
        if self.tested_epsilon is not None and not self.tested_epsilon > self.epsilon:
            raise ManifestError(
                f"tested_epsilon must be above epsilon, or be left out, got {shown(self.tested_epsilon)}"
            )
        _check_decisions(self.path, procedure=self.procedure, epsilon=self.path_level)
        if self.example_risk is not None:
            Number(self._lowest, 1)("example_risk", self.example_risk)
            if getattr(self, self._TESTED) is None:
                raise ManifestError(
                    f"example_risk must be left out without a {self._TESTED}, got {shown(self.example_risk)}"
                )
        if self.looks is not None:
            _check_counts(self.looks, group=self.group)

    @classmethod
    def of_tests(cls, asked: AskedTest, path: Sequence[_Step], *, level: float, **of_none: object) -> Self:
        """Returns the entry that results from tests of a promise: every rejected one is safe, and the last is chosen.

        Args:
          asked: The promise.
          path: The tests, in order.
          level: Level of these tests.
          of_none: The fields about the choice, with their values if nothing was found safe.
        """
        chosen = last_rejected(path)
        told = of_none if chosen is None else {name: getattr(chosen, name) for name in of_none}
        values: dict[str, Any] = {**vars(asked), **told}
        return cls(path=tuple(path), tested_epsilon=None if level == asked.epsilon else level, **values)

    @property
    def chosen(self) -> _Step | None:
        """The choice of the path's tests, confirmed or not; None if nothing was found safe."""
        return last_rejected(self.path)

    @property
    def _lowest(self) -> float:
        """The least possible risk."""
        return -1 if self.is_signed else 0

    def _check_choice(self, said: _Step | None, *, by: str, values: Mapping[str, object]) -> None:
        """Refuses an entry whose values are not those of its tests.

        Args:
          said: The test that decides; None if nothing was found safe.
          by: Its key path.
          values: The fields about the choice, with their values if there is none.
        """
        for name, of_none in values.items():
            expected, found = of_none if said is None else getattr(said, name), getattr(self, name)
            if found != expected:
                why = f"since none in {by} was rejected" if said is None else f"as the last one rejected in {by} says"
                raise ManifestError(f"{name} must be {in_words(expected)}, {why}, got {in_words(found)}")

    def _check_looks(self) -> None:
        """Refuses looks that do not lead along the path to the choice, or whose capitals do not give its p-value."""
        looks, name = self.looks or (), self._TESTED
        # A setting accepted at one look stays accepted, so later looks have it or a later one.
        places: dict[object, int] = {None: -1}
        places |= {step.tested: place for place, step in enumerate(self.path) if step.rejected}
        for index, look in enumerate(looks):
            found = getattr(look, name)
            if found not in places:
                raise ManifestError(f"looks[{index}].{name} must be one that path rejects, or null, got {shown(found)}")
            before = getattr(looks[index - 1], name) if index else None
            if places[found] < places[before]:
                raise ManifestError(
                    f"looks[{index}].{name} must not come before {shown(before)}, which was accepted before, got "
                    f"{shown(found)}"
                )
        if not looks:
            return
        # The last look has the path's choice, whether or not it was confirmed later.
        step = self.chosen or self.path[0]
        said = (None, getattr(self, self._COST)) if self.chosen is None else (step.tested, getattr(step, self._COST))
        _check_last(looks, {"n": step.n, name: said[0], self._COST: said[1], "risk": step.risk})
        _check_capital(looks, step.p_value, at=step.tested)


def last_rejected(path: Sequence[_Step]) -> _Step | None:
    """Returns the last test of a path that found something safe; None if none did."""
    return next((step for step in reversed(path) if step.rejected), None)


def check_looked_at(entries: Sequence[TestedEntry[_Step, _Look]], *, rounds: int | None, is_planned: bool) -> None:
    """Refuses looks that are not one for each round, or rounds that were not planned.

    Args:
      entries: All entries of a manifest.
      rounds: Number of rounds that were looked at; None if all examples count.
      is_planned: Whether the plan has a stopping rule.
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
    """Refuses decisions that do not follow from the procedure and these p-values.

    Raises:
      ManifestError: If a sequence went on after a failure, or a decision is at odds with its p-value.
    """
    # Pareto testing is a sequence along a path that other examples have chosen.
    is_sequence = procedure in ("fixed_sequence", PARETO)
    for index, entry in enumerate(path):
        if is_sequence and not entry.rejected and index + 1 < len(path):
            raise ManifestError(
                f"path[{index}].rejected is false, so the test stops there, but path[{index + 1}] follows"
            )
        is_small = entry.p_value <= epsilon
        # Other procedures use their own bounds on the p-values: they may reject fewer, and never more.
        if entry.rejected != is_small and (entry.rejected or is_sequence):
            raise ManifestError(
                f"path[{index}].rejected must be {shown(not entry.rejected)}, got {shown(entry.rejected)}: "
                f"p_value is {shown(entry.p_value)} and epsilon {shown(epsilon)}"
            )


def _check_counted(at: str, n: int, *, group: str | None) -> None:
    """Refuses 0 counted units except for a group, which may have no example in the first rounds."""
    if n == 0 and group is None:
        raise ManifestError(f"{at}.n must be an integer of at least 1, got 0")


def _check_counts(looks: Sequence[LookRecord], *, group: str | None) -> None:
    """Refuses looks whose counts do not grow from round to round."""
    for index, look in enumerate(looks):
        _check_counted(f"looks[{index}]", look.n, group=group)
    for index, (before, look) in enumerate(pairwise(looks), start=1):
        # A round may have no example of the group.
        if look.n < before.n or (look.n == before.n and group is None):
            raise ManifestError(
                f"looks[{index}].n must be {'above' if group is None else 'at least'} that of the round "
                f"before, {before.n}, got {look.n}"
            )


def _check_last(looks: Sequence[LookRecord], expected: Mapping[str, object]) -> None:
    """Refuses a last look with an attribute that differs from its final value."""
    for name, value in expected.items():
        found = getattr(looks[-1], name)
        if found != value:
            raise ManifestError(
                f"looks[{len(looks) - 1}].{name} must be {shown(value)}, as at the end, got {shown(found)}"
            )


def _check_capital(looks: Sequence[LookRecord], p_value: float, *, at: object) -> None:
    """Refuses capitals whose inverse is not the p-value, that of the named threshold or setting."""
    largest = max(look.log_capital for look in looks)
    if abs(math.log(p_value) + min(max(largest, 0), _MOST_LOG_CAPITAL)) > _LOG_ROUNDING:
        raise ManifestError(
            f"looks must come to a capital of 1 / {shown(p_value)}, which the p-value at {shown(at)} is made of, got "
            f"e^{largest:.6g}"
        )
