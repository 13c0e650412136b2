"""The plan of a run when it started, earlier plans, and checks that the planned tests were carried out."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from calm_beam.errors import ManifestError
from calm_beam.inputs.losses import DIRECTIONS
from calm_beam.risk.rules import joint_levels
from calm_beam.storage.record_values import AtLeast, Count, Items, OneOf, Share, Text, Unit, UtcTime, shown
from calm_beam.storage.records import DigestedRecord, Record

from ._model import OBJECTIVES, Variant
from ._rounds import SequentialPlan, SettingSequentialPlan, WatchedPlan
from ._tests import CONSISTENCIES, EACH_VARIANT, OF_VARIANTS, PARETO, AskedTest, PlannedTest, SettingTest, TestedEntry

ON_ERROR = ("fail", "worst_case")
ON_LONG = ("truncate", "error")
CONFIRM_PATH = 3
"""Largest number of confirmed thresholds per entry: the chosen one, and two that are safer."""
HAND_ON = "hand_on"
"""The joint procedure: promises with nothing left to test pass their epsilon on to the others."""


def joint_procedure(joint_epsilon: float | None, *, is_sequential: bool) -> str | None:
    """Returns the joint procedure of promises; None if each keeps its own epsilon: alone, or in rounds."""
    return None if joint_epsilon is None or is_sequential else HAND_ON


NEAR_TIES = COUNT_NEAR_TIES, WORST_NEAR_TIES = ("count", "worst_case")


# Procedures in which every p-value of the grid affects the decision.
_WHOLE_GRID = ("fallback", "holm", "bonferroni")
# The sum of shares of epsilon may differ from the whole by rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class EarlierPlan(Record):
    """An earlier plan on the same outputs, from the list next to them.

    Attributes:
      plan: Digest of the plan.
      command: The command that asked it, such as `calibrate`.
      asked: When it was asked, ISO 8601 in UTC, ending in Z.
      answered: Whether a result of it was shown, or may have been.
    """

    plan: Text
    command: Text
    asked: UtcTime
    answered: bool


EarlierPlans = Annotated[tuple[EarlierPlan, ...], Items(1, "be left out where there are none")]
"""Earlier plans, the earliest first."""


@dataclass(frozen=True, kw_only=True)
class ParetoPlan(Record):
    """How several variants are tested: along a path that one part of the calibration set chooses, or each by itself.

    Attributes:
      variants: The variants, at least two, each of which is swept over the whole grid.
      choosing_share: Probability that an independent unit is in the part that chooses, in (0, 1). The plan's salt and
        the unit's name alone decide (`calm_beam.calibration.pareto.is_choosing`). None if no unit chooses, and all
        units test every variant, at an equal share of epsilon.
      objective: The cost that the cheapest variant minimises, one of `OBJECTIVES`; None if it is layers, as with early
        writers, or if a user has named the variants. The cost of a token was settled before any loss was seen.
    """

    variants: Annotated[tuple[Variant, ...], Items(2, "be two or more different ones", unique=True)]
    choosing_share: Share | None = None
    objective: Annotated[str, OneOf(OBJECTIVES)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({variant.tau is None for variant in self.variants}) > 1:
            raise ManifestError("variants must all have a tau, or none of them")
        for name in ("confidence", "exit_interval"):
            if len({getattr(variant, name) is None for variant in self.variants}) > 1:
                raise ManifestError(f"variants must all have a {name}, or none of them")

    @property
    def procedure(self) -> str:
        """The procedure of the tests."""
        return EACH_VARIANT if self.choosing_share is None else PARETO

    def share_of(self, epsilon: float) -> float:
        """Returns the level at which a variant is tested: epsilon, or its share if each is tested by itself."""
        return epsilon / len(self.variants) if self.choosing_share is None else epsilon

    def least_units(self, test: AskedTest) -> int:
        """Returns how many units a promise takes at least, as `AskedTest.least_units`; on average if a part chooses."""
        least = test.least_units(level=self.share_of(test.epsilon))
        return least if self.choosing_share is None else math.ceil(least / (1 - self.choosing_share))


_Test = TypeVar("_Test", bound=AskedTest)
_Rule = TypeVar("_Rule", bound=WatchedPlan)


@dataclass(frozen=True, kw_only=True)
class SettledPlan(DigestedRecord, Generic[_Test, _Rule]):
    """The plan, settled before any loss was seen, whether thresholds or settings are tested.

    Attributes:
      tests: The planned promises, one for each calibration, in the same order.
      joint_epsilon: Probability with which any of them may be broken, if they hold together; None: each alone.
      cluster_key: Field that names the cluster of an example, the independent unit; None: every example is one.
      group_key: Field that names the group of an example, if groups have promises of their own; None if none has.
      salt: Decides the order of examples, for p-values that need one.
      sequential: How the run is watched, if it stops when enough is proved; None if all examples count.
      joint_procedure: `hand_on` if promises that hold together pass on the epsilon of those that have nothing left to
        test (`calm_beam.risk.rules`). None if each keeps its own, as with early writers and in rounds, and if each
        holds alone.
    """

    # The noun for what is tested.
    _TESTED: ClassVar[str]

    tests: tuple[_Test, ...]
    joint_epsilon: Share | None
    cluster_key: Text | None
    group_key: Text | None
    salt: Text
    sequential: _Rule | None = None
    joint_procedure: Annotated[str, OneOf((HAND_ON,))] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.joint_procedure is not None and (self.joint_epsilon is None or self.sequential is not None):
            raise ManifestError("joint_procedure must be left out without joint_epsilon, and where there is sequential")
        total = sum(test.epsilon for test in self.tests)
        if self.joint_epsilon is not None and total > self.joint_epsilon * (1 + _ROUNDING):
            raise ManifestError(
                f"joint_epsilon must be at least the sum of the tests' epsilons, {shown(total)}, got "
                f"{shown(self.joint_epsilon)}"
            )

    def without_rule(self) -> Self:
        """Returns the plan without its stopping rule, which may be changed after losses were seen."""
        if self.sequential is None:
            return self
        return replace(self, sequential=self.sequential.without_rule())

    def check_calibrations(self, calibrations: Sequence[TestedEntry[Any, Any]]) -> None:
        """Refuses calibrations other than those that were planned.

        Raises:
          ManifestError: If their number, a value, or the tested thresholds or settings differ.
        """
        if len(calibrations) != len(self.tests):
            raise ManifestError(
                f"calibrations must be the {len(self.tests)} that were planned, got {len(calibrations)}"
            )
        for index, (planned, entry) in enumerate(zip(self.tests, calibrations, strict=True)):
            for name in planned.file_keys():
                value, found = getattr(planned, name), getattr(entry, name)
                if found != value:
                    raise ManifestError(
                        f"calibrations[{index}].{name} must be {shown(value)}, as was planned, got {shown(found)}"
                    )
            self._check_path(entry, at=f"calibrations[{index}].path")
        levels = self.tested_epsilons([[step.p_value for step in entry.path] for entry in calibrations])
        for index, (entry, level) in enumerate(zip(calibrations, levels, strict=True)):
            if entry.path_level != level:
                raise ManifestError(
                    f"calibrations[{index}].tested_epsilon must be {shown(level)}, which is what others have handed on "
                    f"and its own epsilon, or left out where that is all; its path was tested at "
                    f"{shown(entry.path_level)}"
                )

    @property
    def hands_on(self) -> bool:
        """Whether fully proved promises pass their epsilon on to the others."""
        return self.joint_procedure == HAND_ON

    def tested_epsilons(self, p_values: Sequence[Sequence[float]]) -> list[float]:
        """Returns the level at which each promise is tested: its own epsilon, plus what others pass on to it.

        A promise passes its level on once its fixed sequence of tests has reached the end of the grid and found all of
        it safe.

        Args:
          p_values: For each promise, the p-values of all its tests, in order.
        """

        def has_ended(place: int, level: float) -> bool:
            found = p_values[place]
            is_whole = self.tests[place].procedure == "fixed_sequence" and len(found) == len(self.grid)
            return is_whole and max(found) <= level

        epsilons = [test.epsilon for test in self.tests]
        return joint_levels(epsilons, has_ended=has_ended) if self.hands_on else epsilons

    @property
    def grid(self) -> Sequence[object]:
        """All thresholds or settings that may be tested, in the planned order."""
        raise NotImplementedError

    def _check_path(self, entry: TestedEntry[Any, Any], *, at: str) -> None:
        """Refuses a path that leaves the planned order."""
        tested = [step.tested for step in entry.path]
        expected = planned_path(self.grid, tested, procedure=entry.procedure)
        if tested != expected:
            raise ManifestError(
                f"{at} must test {self._TESTED} in the planned order, which begins {shown(expected)}, got "
                f"{shown(tested)}"
            )


@dataclass(frozen=True, kw_only=True)
class Plan(SettledPlan[PlannedTest, SequentialPlan]):
    """Everything that the result depends on, except the data and the code of metrics, as it was when the run started.

    Attributes:
      thresholds: The grid in testing order: descending.
      salt: Decides the order of examples, for p-values that need one; which units choose, with `pareto`; and which
        confirm, with `confirm_share`.
      on_error: Treatment of examples that could not be decoded or scored: the run failed, or they count with loss 1.
      on_long: Treatment of prompts that were too long: they were cut, or count as examples that could not be decoded.
      model: Fingerprint of the model.
      outputs: Fingerprint of everything that decides the outputs except the data; with variants those of all, separated
        by commas.
      pareto: How variants are tested, if there are several; None if the grid is the order.
      confirm_share: Probability that an independent unit is in the holdout: it does not choose, but confirms the choice
        of the others, in (0, 1). The salt and its name alone decide (`calm_beam.inputs.set_parts.part_of`). None if
        nothing is confirmed.
      confirm_path: Largest number of thresholds per entry that are confirmed, one after the other; None if only the
        chosen one is, as with early writers, or if nothing is confirmed.
      near_ties: `worst_case` if outputs that depended on a decision within rounding count with loss 1; None if they
        count as they are.
      serve: Index of the promise that will be served, counted from 0; None if it was left open.
    """

    _FIRST: ClassVar[tuple[str, ...]] = (
        *("thresholds", "tests", "joint_epsilon", "cluster_key", "group_key", "salt"),
        *("on_error", "on_long", "model", "outputs", "sequential"),
    )
    _TESTED: ClassVar[str] = "thresholds"

    thresholds: tuple[Unit, ...]
    group_key: Text | None = None
    on_error: Annotated[str, OneOf(ON_ERROR)]
    on_long: Annotated[str, OneOf(ON_LONG)]
    model: Text
    outputs: Text
    pareto: ParetoPlan | None = None
    confirm_share: Share | None = None
    confirm_path: Annotated[int, AtLeast(2)] | None = None
    near_ties: Annotated[str, OneOf((WORST_NEAR_TIES,))] | None = None
    serve: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(lower >= upper for upper, lower in pairwise(self.thresholds)):
            raise ManifestError(f"thresholds must be strictly descending, got {shown(self.thresholds)}")
        if self.confirm_path is not None and self.confirm_share is None:
            raise ManifestError(f"confirm_path must be left out without confirm_share, got {self.confirm_path}")
        if self.serve is not None and self.serve >= len(self.tests):
            raise ManifestError(f"serve must be the place of one of {len(self.tests)} tests, got {self.serve}")
        self._check_pareto()

    def _check_pareto(self) -> None:
        if self.pareto is not None:
            for name in ("group_key", "sequential"):
                if getattr(self, name) is not None:
                    raise ManifestError(f"pareto must be left out where there is {name}")
        for index, test in enumerate(self.tests):
            expected = None if self.pareto is None else self.pareto.procedure
            if expected != (test.procedure if test.procedure in OF_VARIANTS else None):
                raise ManifestError(
                    f"tests[{index}].procedure must be {expected or PARETO} exactly if pareto is there, got "
                    f"{test.procedure}"
                )

    @property
    def leaves_choice_open(self) -> bool:
        """Whether several promises hold each by itself, and it was not settled which one is served."""
        return len(self.tests) > 1 and self.serve is None and self.joint_epsilon is None

    def upper_part(self, thresholds: int) -> "Plan":
        """Returns the plan with only the first thresholds of the testing order.

        It is valid for fixed sequence testing, whose decisions do not depend on later tests.
        """
        return replace(self, thresholds=self.thresholds[:thresholds])

    @property
    def most_confirmed(self) -> int:
        """Largest number of thresholds per entry that are confirmed; 0 if nothing is."""
        return 0 if self.confirm_share is None else self.confirm_path or 1

    def confirming_epsilons(self, has_chosen: Sequence[bool]) -> list[float]:
        """Returns the initial level of each promise's confirmation: its epsilon, or more if all hold together.

        Promises that chose nothing have nothing to confirm, and leave their epsilon to the others in proportion. The
        set of promises that chose is settled before any confirming loss is seen, and the levels add up to the joint
        epsilon. So the chance of any wrong confirmation is at most that, given this set, and therefore overall.

        Args:
          has_chosen: For each promise, whether there is something to confirm.

        Source: Bonferroni (1936), given what one part of the set has chosen.
        """
        epsilons = [test.epsilon for test in self.tests]
        is_divided = self.joint_epsilon is not None and self.confirm_path is not None
        return joint_levels(epsilons, has_begun=has_chosen) if is_divided else epsilons

    def confirmed_epsilons(self, p_values: Sequence[Sequence[float]]) -> list[float]:
        """Returns the final level of each promise's confirmation, given the confirming p-values.

        A promise whose chosen threshold was confirmed has nothing left to test either, and passes its level on.

        Args:
          p_values: For each promise the p-values of its confirming tests, in order, all of them or up to the first that
            failed; empty if nothing was chosen.
        """
        has_chosen = [len(found) > 0 for found in p_values]
        if not self.hands_on:
            return self.confirming_epsilons(has_chosen)
        return joint_levels(
            [test.epsilon for test in self.tests],
            has_ended=lambda place, level: max(p_values[place]) <= level,
            has_begun=has_chosen,
        )

    def confirmed_by(self, share: float | None) -> "Plan":
        """Returns the plan with a holdout of this share; None for no holdout."""
        return replace(self, confirm_share=share, confirm_path=None if share is None else CONFIRM_PATH)

    def that_chooses(self) -> "Plan":
        """Returns the plan of the selection part: this plan without its holdout."""
        return self.confirmed_by(None)

    def that_confirms(self, thresholds: Sequence[float]) -> "Plan":
        """Returns the plan by which the losses that confirm chosen thresholds are counted.

        Args:
          thresholds: Thresholds of one variant, descending; each is tested by itself.
        """
        return replace(
            self.that_chooses(),
            tests=tuple(replace(test, procedure="fixed_sequence") for test in self.tests),
            thresholds=tuple(thresholds),
            sequential=None,
            pareto=None,
        )

    @property
    def grid(self) -> Sequence[object]:
        return self.thresholds

    def _check_path(self, entry: TestedEntry[Any, Any], *, at: str) -> None:
        """Refuses a path that leaves the order of the grid, or of variants and thresholds."""
        if self.pareto is None:
            super()._check_path(entry, at=at)
            return
        pareto = self.pareto
        for place, step in enumerate(entry.path):
            if step.variant not in pareto.variants:
                raise ManifestError(
                    f"{at}[{place}].variant must be one of plan.pareto.variants, which are "
                    f"{'; '.join(variant.in_words() for variant in pareto.variants)}, got "
                    f"{'none' if step.variant is None else step.variant.in_words()}"
                )
            if step.threshold not in self.thresholds:
                raise ManifestError(
                    f"{at}[{place}].threshold must be one of plan.thresholds, got {shown(step.threshold)}"
                )
        if pareto.choosing_share is None:
            self._check_each_variant(entry, pareto, at=at)

    def _check_each_variant(self, entry: TestedEntry[Any, Any], pareto: ParetoPlan, *, at: str) -> None:
        """Refuses a path that does not test every variant in the planned order, as far as it goes and no further."""
        level = pareto.share_of(entry.epsilon)
        blocks = [list(steps) for _, steps in itertools.groupby(entry.path, key=lambda step: step.variant)]
        if sorted(pareto.variants.index(steps[0].variant) for steps in blocks) != list(range(len(pareto.variants))):
            raise ManifestError(f"{at} must test every one of plan.pareto.variants, one after the other")
        for steps in blocks:
            name = f"{at}, {steps[0].variant.in_words()},"
            if [step.threshold for step in steps] != list(self.thresholds[: len(steps)]):
                raise ManifestError(f"{name} must test thresholds in the planned order")
            if any(step.rejected != (step.p_value <= level) for step in steps):
                raise ManifestError(
                    f"{name} must reject exactly where p_value is at most {shown(level)}, an equal share of epsilon"
                )
            held = [step.rejected for step in steps]
            if not all(held[:-1]) or (held[-1] and len(steps) < len(self.thresholds)):
                raise ManifestError(f"{name} must end at the first test that failed, or at the last threshold")


@dataclass(frozen=True, kw_only=True)
class SettingPlan(SettledPlan[SettingTest, SettingSequentialPlan]):
    """The plan, settled before any loss was summed.

    Attributes:
      order: All settings in testing order, the safest first.
      baseline: Run whose scores the others are compared with; None if losses were given.
      task: Task of the scores; None if none was named.
      metric: Metric of the scores; None if losses were given.
      direction: Which scores of the metric are better; None if losses were given, and in manifests of earlier writers,
        which assumed that higher scores are better.
      consistency: What outputs are compared with: those under the first setting, which is the `baseline`, or
        references; None if losses or scores were given.
    """

    _FIRST: ClassVar[tuple[str, ...]] = (
        *("order", "tests", "joint_epsilon", "group_key", "cluster_key", "salt"),
        *("baseline", "task", "metric", "direction", "consistency"),
    )
    _TESTED: ClassVar[str] = "settings"

    order: Annotated[tuple[Text, ...], Items(1, "name one or more settings, each once", unique=True)]
    baseline: Text | None
    task: Text | None
    metric: Text | None
    direction: Annotated[str, OneOf(DIRECTIONS)] | None = None
    consistency: Annotated[str, OneOf(CONSISTENCIES)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.consistency is not None and None in (self.metric, self.baseline):
            raise ManifestError(f"consistency must be null without metric and baseline, got {shown(self.consistency)}")
        if self.direction is not None and self.metric is None:
            raise ManifestError(f"direction must be null without metric, got {shown(self.direction)}")
        if self.sequential is not None:
            try:
                self.sequential.check_order(self.order)
            except ManifestError as error:
                raise ManifestError(f"sequential.{error}") from None

    @property
    def grid(self) -> Sequence[object]:
        return self.order


_T = TypeVar("_T")


def planned_path(grid: Sequence[_T], tested: Sequence[_T], *, procedure: str) -> list[_T]:
    """Returns the order in which a path must test the tested part of a planned grid.

    Args:
      grid: All that may be tested, in the planned order.
      tested: What was tested.
      procedure: The procedure: some go down from the first, some have to test all.
    """
    if procedure == "fixed_sequence":
        return list(grid[: len(tested)])
    if procedure in _WHOLE_GRID:
        return list(grid)
    return [item for item in grid if item in tested]
