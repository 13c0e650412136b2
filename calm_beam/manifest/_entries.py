"""The promises of a manifest, each with the tests it rests on: of thresholds, and of settings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from calm_beam.errors import ManifestError
from calm_beam.risk.stopping import Proved
from calm_beam.storage.record_values import Cost, Count, Items, Layers, Number, Share, Signed, Text, Unit, shown
from calm_beam.storage.records import ALONE_IF_ONE

from ._model import ExitRuleRecord, Variant, threshold_in_words
from ._tests import (
    OF_VARIANTS,
    LookRecord,
    LossName,
    Objective,
    SettingTest,
    StepRecord,
    TestedEntry,
    ThresholdTest,
    last_rejected,
)

# Only of a group may nothing have been counted.
_SOME = {"properties": {"n": {"minimum": 1}}}
_COUNTED = {
    "properties": {
        "path": {"items": _SOME},
        "confirmation": {**_SOME, "items": _SOME},
        "looks": {"items": _SOME},
    }
}


@dataclass(frozen=True, kw_only=True)
class PathEntry(StepRecord):
    """The test of one threshold.

    Attributes:
      threshold: The exit threshold, in [0, 1].
      layers: Mean decoder layers per token.
      variant: How it was decoded, where there are several ways; None elsewhere.
      near_ties: Examples whose output, or the full model's, hung on a decision within rounding; None where that is not
        known.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("threshold",)

    threshold: Unit
    layers: Layers
    variant: Variant | None = None
    near_ties: Count | None = None

    @property
    def tested(self) -> float:
        """The threshold."""
        return self.threshold

    @property
    def tested_as(self) -> tuple[float, Variant | None]:
        """The threshold, and how it was decoded."""
        return self.threshold, self.variant


@dataclass(frozen=True, kw_only=True)
class Look(LookRecord):
    """What an entry had come to after a round of a sequential calibration.

    Attributes:
      threshold: The lowest threshold accepted by then; None for none.
      layers: Mean decoder layers per token at it; all layers where it is None.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("n", "threshold", "layers")

    threshold: Unit | None
    layers: Layers

    def proved(self, grid: Sequence[object]) -> Proved:
        """Returns the threshold by its place, and the layers, all of them where there is none."""
        return Proved(-1 if self.threshold is None else grid.index(self.threshold), self.layers)


@dataclass(frozen=True, kw_only=True)
class Calibration(ThresholdTest, TestedEntry[PathEntry, Look]):
    """One promise of thresholds, and the tests it rests on.

    Attributes:
      loss: What is made of the metric's scores, as in `plan.tests`; None in manifests of early writers, who took
        `dissimilarity` and `relu`.
      threshold: The lowest accepted threshold, or None for "never exit"; where there are variants, the last accepted.
        Where something was to be confirmed, the last one confirmed, or None.
      variant: How it has to be decoded, where there are several ways: in place of what `decode` says. None
        elsewhere, and for "never exit".
      threshold_by_position: What the schedule makes of it, a float32 for each position of the output, the first
        generated token's first. A token exits at the first layer that may exit whose confidence, in float32, is at
        least its number. None without a threshold, and in manifests of early writers.
      rule: When a token exits, but for the threshold: that of `decode`, with what its variant says. None without a
        threshold, and in manifests of the first version.
      layers: Mean decoder layers per token at the threshold; all layers when it is None. Where the threshold was
        confirmed, those of the outputs that confirmed it.
      risk: Empirical risk at the threshold, likewise; 0 when it is None.
      path: Every threshold tested: descending; or of variants and thresholds in the order that was chosen; or variant
        by variant, each descending, the one that is chosen last.
      confirmation: The tests, by examples that chose nothing, of thresholds accepted in `path`, whose outputs came from
        the decoder that serves: from the safest on, each at epsilon, up to the last accepted or the first that fails.
        The last one rejected is promised; where none was, nothing is. None where nothing was to be confirmed.
        A single one stands in the file by itself, as early writers put it, and several in a list.
      pays: False where a threshold was accepted and nothing is promised, since the cheapest that was found safe costs
        no less than the full model, by `cost` of the manifest or as it was then measured; None elsewhere.
      confirming_epsilon: Level of the confirmations: of promises that hold together, those that have something to
        confirm divide the epsilon of those that have not, and what those hand on that are confirmed. None where it is
        `epsilon`, or nothing was to be confirmed.
    """

    _FIRST: ClassVar[tuple[str, ...]] = (
        *("consistency", "metric", "loss", "group", "delta", "epsilon", "p_value", "procedure"),
        *("threshold", "variant", "threshold_by_position", "rule", "layers", "risk", "path"),
        *("confirmation", "confirming_epsilon", "pays"),
    )
    _TESTED: ClassVar[str] = "threshold"
    _COST: ClassVar[str] = "layers"
    SCHEMA_RULES: ClassVar[Mapping[str, Any]] = {"if": {"not": {"required": ["group"]}}, "then": _COUNTED}

    loss: LossName | None = None
    threshold: Unit | None
    variant: Variant | None = None
    threshold_by_position: Annotated[tuple[Unit, ...], Items(1, "have a number for each position")] | None = None
    rule: ExitRuleRecord | None = None
    layers: Layers
    risk: Signed
    confirmation: Annotated[tuple[PathEntry, ...], ALONE_IF_ONE] | None = None
    confirming_epsilon: Share | None = None
    pays: bool | None = None

    @property
    def chosen(self) -> PathEntry | None:
        """What the tests of the path have chosen, confirmed or not; None where nothing safe was found, or pays."""
        return None if self.pays is False else super().chosen

    @property
    def promised_epsilon(self) -> float:
        """Level of the tests that the promise rests on: those that confirm it, where there are some, or of its path."""
        if self.confirmation is None:
            return self.path_level
        return self.epsilon if self.confirming_epsilon is None else self.confirming_epsilon

    @property
    def deciding(self) -> PathEntry | None:
        """The test that decides what is promised; None where nothing was chosen.

        Of the confirmations it is the last that held, or the first where none did.
        """
        if self.confirmation is None:
            return self.chosen
        return last_rejected(self.confirmation) or self.confirmation[0]

    @property
    def is_signed(self) -> bool:
        """Whether losses lie in [-1, 1] and not in [0, 1]."""
        return self.loss == "signed"

    @property
    def known_loss(self) -> str:
        """The loss; manifests that do not say mean the paper's."""
        return self.loss or {"textual": "dissimilarity", "risk": "relu"}[self.consistency]

    @property
    def objective(self) -> Objective:
        """The loss that it is about."""
        return Objective(self.consistency, self.metric, loss=self.known_loss)

    def named(self) -> str:
        """Returns the values that tell it from other entries about the same group, as callers write them."""
        return (
            f"consistency={self.consistency}, metric={self.metric}, loss={self.known_loss}, delta={shown(self.delta)}, "
            f"epsilon={shown(self.epsilon)}, p_value={self.p_value}"
        )

    def promise_in_words(self) -> str:
        """Returns what is promised, whatever group it is about: `textual > 0.3, rouge_l, delta 0.1, epsilon 0.05`."""
        return f"{self.objective.consistency_in_words()}, {self.metric}, delta {self.delta:g}, epsilon {self.epsilon:g}"

    def __post_init__(self) -> None:
        Number(self._lowest, 1)("risk", self.risk)
        super().__post_init__()
        if self.threshold is None and self.threshold_by_position is not None:
            raise ManifestError(
                "threshold_by_position must be left out when threshold is null, "
                f"got {shown(self.threshold_by_position)}"
            )
        if self.threshold is None and self.rule is not None:
            raise ManifestError("rule must be left out when threshold is null")
        self._check_testing_order()
        if self.pays or (self.pays is False and super().chosen is None):
            raise ManifestError("pays must be false where path has accepted a threshold that does not, or be left out")
        if self.confirming_epsilon is not None:
            self._check_confirming_epsilon(self.confirming_epsilon)
        if self.confirmation is not None:
            self._check_confirmation(self.confirmation)
        said, by = self.chosen, "path"
        if self.confirmation is not None:
            said, by = last_rejected(self.confirmation), "confirmation"
        # Without a threshold all layers are used, which the manifest knows.
        layers = self.layers if said is None else None
        self._check_choice(said, by=by, values={"threshold": None, "variant": None, "risk": 0, "layers": layers})
        self._check_looks()

    def confirmations(self) -> list[tuple[str, PathEntry]]:
        """Returns the tests that confirm, each with where it stands in the file."""
        steps = self.confirmation or ()
        if len(steps) == 1:
            return [("confirmation", steps[0])]
        return [(f"confirmation[{index}]", step) for index, step in enumerate(steps)]

    def _check_confirmation(self, confirmation: tuple[PathEntry, ...]) -> None:
        """Refuses confirmations of something else than was chosen, or decisions that their p-values do not make."""
        if not confirmation:
            raise ManifestError("confirmation must have a test, or be left out, got []")
        for at, step in self.confirmations():
            step.check_of(at, group=self.group, lowest=self._lowest)
        if self.chosen is None:
            raise ManifestError("confirmation must be left out where path has chosen no threshold")
        accepted = [step.tested_as for step in self.path if step.rejected]
        places = []
        for at, step in self.confirmations():
            if step.tested_as not in accepted:
                raise ManifestError(
                    f"{at} must be of a threshold that path has accepted, got {threshold_in_words(*step.tested_as)}"
                )
            places.append(accepted.index(step.tested_as))
            if step.rejected != (step.p_value <= self.promised_epsilon):
                raise ManifestError(
                    f"{at}.rejected must be {shown(not step.rejected)}, got {shown(step.rejected)}: p_value is "
                    f"{shown(step.p_value)} and epsilon {shown(self.promised_epsilon)}"
                )
        if places != sorted(set(places)):
            raise ManifestError("confirmation must test thresholds in the order of path, each once")
        *before, last = confirmation
        if not all(step.rejected for step in before):
            raise ManifestError("confirmation must end at the first test that failed")
        if last.rejected and places[-1] != len(accepted) - 1:
            raise ManifestError(
                f"confirmation must end at {threshold_in_words(*accepted[-1])}, which path has chosen, or at a test "
                f"that failed, got {threshold_in_words(*last.tested_as)}"
            )

    def _check_confirming_epsilon(self, epsilon: float) -> None:
        """Refuses a level of confirmations that there are none of, or that is not above the planned one."""
        if self.confirmation is None or not epsilon > self.epsilon:
            raise ManifestError(
                "confirming_epsilon must be above epsilon, and left out where there is no confirmation, got "
                f"{shown(epsilon)}"
            )

    def _check_testing_order(self) -> None:
        has_variants = self.procedure in OF_VARIANTS
        tested = set()
        for index, entry in enumerate(self.path):
            if (entry.variant is not None) != has_variants:
                raise ManifestError(
                    f"path[{index}].variant must be there exactly if procedure is {' or '.join(OF_VARIANTS)}, got "
                    f"{'one' if entry.variant else 'none'} and {self.procedure}"
                )
            if has_variants and (entry.variant, entry.threshold) in tested:
                raise ManifestError(f"path[{index}] must be of a variant and threshold that were not tested before")
            tested.add((entry.variant, entry.threshold))
        if has_variants:
            return
        for index, (before, entry) in enumerate(pairwise(self.path), start=1):
            if not entry.threshold < before.threshold:
                raise ManifestError(
                    f"path[{index}].threshold must be below the one tested before it, {shown(before.threshold)}, "
                    f"got {shown(entry.threshold)}"
                )


@dataclass(frozen=True, kw_only=True)
class SettingStep(StepRecord):
    """The test of one setting.

    Attributes:
      setting: The setting.
      cost: Cost of the setting; None where nobody told one.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("setting",)

    setting: Text
    cost: Cost | None

    @property
    def tested(self) -> str:
        """The setting."""
        return self.setting


@dataclass(frozen=True, kw_only=True)
class SettingLook(LookRecord):
    """What an entry had come to after a round.

    Attributes:
      setting: The last setting in testing order that was accepted by then; None for none.
      cost: Its cost, or the mean over the examples counted by then; None where nobody told, and without a setting.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("n", "setting", "cost")

    setting: Text | None
    cost: Cost | None

    def proved(self, grid: Sequence[object]) -> Proved:
        """Returns the setting by its place, and its cost; infinity where nobody told, and without a setting."""
        return Proved(
            -1 if self.setting is None else grid.index(self.setting), math.inf if self.cost is None else self.cost
        )


@dataclass(frozen=True, kw_only=True)
class SettingCalibration(SettingTest, TestedEntry[SettingStep, SettingLook]):
    """One promise of settings, and the tests it rests on.

    Attributes:
      setting: The last setting in testing order that was accepted; None if none was.
      cost: Its cost; None where nobody told one, and where there is no setting.
      risk: Its empirical risk; None where there is no setting.
    """

    _FIRST: ClassVar[tuple[str, ...]] = (
        *("group", "loss", "tail", "delta", "epsilon", "p_value", "procedure"),
        *("setting", "cost", "risk"),
    )
    _TESTED: ClassVar[str] = "setting"
    _COST: ClassVar[str] = "cost"

    setting: Text | None
    cost: Cost | None
    risk: Signed | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({step.setting for step in self.path}) != len(self.path):
            raise ManifestError(f"path must test every setting once, got {shown([step.setting for step in self.path])}")
        self._check_choice(self.chosen, by="path", values=dict.fromkeys(("setting", "cost", "risk")))
        self._check_looks()
        for index, look in enumerate(self.looks or ()):
            if look.setting is None and look.cost is not None:
                raise ManifestError(f"looks[{index}].cost must be null without a setting, got {shown(look.cost)}")

    def named(self) -> str:
        """Returns the values that tell it from other entries, as callers write them."""
        names = ("group", "tail", "delta", "epsilon")
        return ", ".join(f"{name}={shown(getattr(self, name))}" for name in names)
