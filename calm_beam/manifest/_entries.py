"""The promises of a manifest, of thresholds or of the settings of a sweep that was made elsewhere.

Each has the tests that it rests on. What they promise is said in words, and a choice says which entry is meant, as one
value that is passed on whole.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self, TypedDict, TypeVar

from calm_beam.errors import ManifestError
from calm_beam.risk.rules import Proved
from calm_beam.storage.record_values import Cost, Count, Items, Layers, Number, Share, Signed, Text, Unit, shown
from calm_beam.storage.records import ALONE_IF_ONE

from ._model import ExitRuleRecord, Variant, threshold_in_words
from ._tests import (
    EACH_VARIANT,
    OF_VARIANTS,
    PARETO,
    AskedTest,
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


THRESHOLDS, SETTINGS = "thresholds", "settings"
"""The kinds of manifests: about exit thresholds of a model, or about settings of a sweep that was made elsewhere."""

# What entries of a kind are about, and what was drawn.
_NOUNS = {
    THRESHOLDS: {
        "its": "at its threshold",
        "of_every": "at the threshold of every entry",
        "one": "A prompt",
        "several": "prompts",
        "sample": "the calibration set",
        "whole": "the calibration set",
    },
    SETTINGS: {
        "its": "of its setting",
        "of_every": "of the setting of every entry",
        "one": "An example",
        "several": "examples",
        "sample": "the examples",
        "whole": "the examples of the sweep",
    },
}


def guarantee_in_words(
    *,
    kind: str = THRESHOLDS,
    joint_epsilon: float | None = None,
    hands_on: bool = False,
    cluster_key: str | None = None,
    group_key: str | None = None,
    is_sequential: bool = False,
    variants: str | None = None,
    most_confirmed: int = 0,
) -> str:
    """Returns what a manifest promises.

    Args:
      kind: What it is about, `THRESHOLDS` or `SETTINGS`.
      joint_epsilon: Probability with which any entry may be broken, if they hold together; None if each alone.
      hands_on: Whether entries that hold together hand on what they need no more of their epsilon.
      cluster_key: Field of a data row that names its cluster, if clusters are the independent units.
      group_key: Field of a data row that names its group, if groups have entries of their own.
      is_sequential: Whether the tests were watched while examples were decoded.
      variants: How several variants were tested: `PARETO`, where a part of the calibration set has chosen what the
        other part tested, or `EACH_VARIANT`, each by itself; None where there was one.
      most_confirmed: How many thresholds of an entry a part of the calibration set has confirmed at most, of those that
        the rest had proved; 0 where nothing was to be confirmed.
    """
    nouns = _NOUNS[kind]
    one, several, sample = nouns["one"], nouns["several"], nouns["sample"]
    draws = f"for {several} drawn independently from the same distribution as {nouns['whole']}"
    if joint_epsilon is None:
        promise = (
            f"Each calibration entry holds alone: with probability at least 1 - epsilon over the draw of {sample}, the "
            f"expected loss {nouns['its']} is at most delta, {draws}. "
            "Several entries are not promised to hold together."
        )
    else:
        if hands_on:
            level = "tested_epsilon" + (" or confirming_epsilon" if most_confirmed else "")
            alone = (
                "Entries that had nothing left to test have handed their epsilon on. An entry without a "
                f"{level} holds alone with probability at least 1 - its own epsilon; one with it was tested at that "
                f"level, and holds with probability at least 1 - {joint_epsilon:g}."
            )
        else:
            its_own = "its own epsilon" + (", or its confirming_epsilon where it has one" if most_confirmed > 1 else "")
            alone = f"Each alone holds with probability at least 1 - {its_own}."
        promise = (
            f"All calibration entries hold together: with probability at least 1 - {joint_epsilon:g} over the draw of "
            f"{sample}, the expected loss {nouns['of_every']} is at most that entry's delta, {draws}. {alone}"
        )
    if cluster_key is not None:
        promise += (
            f" {one} is drawn here by drawing a cluster, which {cluster_key} names, and then one of its {several}: "
            "clusters are what must be drawn independently, and every cluster weighs the same."
        )
    if group_key is not None:
        promise += (
            f" An entry of a group, which {group_key} names, is about {several} drawn from that group alone; an entry "
            f"without a group is about all {several} together, and may be broken for some of the groups."
        )
    if is_sequential:
        promise += (
            " The tests were looked at after every round of examples, in an order settled beforehand; their p-values "
            "hold whenever that stops."
        )
    if variants == PARETO:
        promise += (
            " Which variants and thresholds were tested, and in which order, was chosen by a part of the calibration "
            "set that a hash had drawn beforehand; the other part alone has tested them."
        )
    if variants == EACH_VARIANT:
        promise += (
            " Every variant was tested by itself, each at an equal share of epsilon, so that all that was found safe "
            "holds together, and the cheapest of it was taken."
        )
    if most_confirmed > 1:
        promise += (
            f" Thresholds that one part of the calibration set had proved, at most {most_confirmed} of an entry, were "
            "then tested once more, by a part that a hash had drawn beforehand and that had no part in choosing them: "
            "from the safest on up to the first that failed, decoded at that threshold by the decoder that serves. The "
            "promise is about what that decoder gives, and rests on these tests alone."
        )
    elif most_confirmed:
        promise += (
            " Every threshold was then tested once more, by a part of the calibration set that a hash had drawn "
            "beforehand and that had no part in choosing it: decoded at that threshold by the decoder that serves. The "
            "promise is about what that decoder gives, and rests on that test alone."
        )
    return promise


def elsewhere_in_words(decoder: str) -> str:
    """Returns what a promise is about where a decoder of the user's has decoded, which is called so."""
    return (
        f"The outputs were decoded elsewhere, by what its user calls {decoder}. The promise is about what that decoder "
        "gave, and nothing here checks that what is served is the same."
    )


GUARANTEE = guarantee_in_words()
"""What is promised where each entry holds alone, and every prompt is drawn by itself."""


PROMISE = ("consistency", "metric", "loss", "delta", "epsilon")
"""What is asked of a promise, whatever group it is about."""


# What only entries of a kind are told apart by, and what to do where a manifest is of the other.
_ONLY = {
    THRESHOLDS: (("consistency", "metric", "loss", "confidence"), "Leave it out."),
    SETTINGS: (("tail",), "Name its {sign}loss."),
}
_Entry = TypeVar("_Entry", bound=AskedTest)


class EntryWords(TypedDict, total=False):
    """The arguments by which callers name an entry: the fields of `EntryChoice`."""

    consistency: str | None
    metric: str | None
    loss: str | None
    group: str | None
    tail: float | None
    delta: float | None
    epsilon: float | None
    confidence: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryChoice:
    """The entry of a manifest that is asked for. What is None is left open, where one entry matches the rest.

    Attributes:
      consistency: `textual` or `risk`.
      metric: Name of the metric. Losses by code of the user's are measured only if it is named here.
      loss: What is made of its scores, such as `signed` or `dissimilarity>0.3`.
      group: Group that the entry is about; None for the entry about all prompts or examples.
      tail: Of an entry about settings, the loss that an example may have; None for the entry of the mean loss.
      delta: Risk tolerance, exactly as calibrated.
      epsilon: Allowed probability of breaking it, exactly as calibrated.
      confidence: The confidence measure, if the manifest names code of the user's. It chooses no entry: it is named
        since a file alone does not decide what runs.
    """

    consistency: str | None = None
    metric: str | None = None
    loss: str | None = None
    group: str | None = None
    tail: float | None = None
    delta: float | None = None
    epsilon: float | None = None
    confidence: str | None = None

    @classmethod
    def named_by(cls, holder: object) -> Self:
        """Returns the choice that flags, or the fields of a transform, make.

        Args:
          holder: What has attributes of the same names; what it has no attribute for is left open.
        """
        return cls(**{field.name: getattr(holder, field.name, None) for field in dataclasses.fields(cls)})

    def promise(self) -> dict[str, str | float]:
        """Returns what is asked of the promise, whatever group it is about: values by name, without those left open."""
        values = {name: getattr(self, name) for name in PROMISE}
        return {name: value for name, value in values.items() if value is not None}

    def among(self, entries: Iterable[_Entry]) -> tuple[_Entry, ...]:
        """Returns the entries about its group that have the promise that is asked for, as far as it is."""
        asked = {"group": self.group, **self.promise()}
        return tuple(entry for entry in entries if all(getattr(entry, name) == asked[name] for name in asked))

    def check_for(self, kind: str, *, sign: str = "") -> None:
        """Raises ManifestError if it names what no entry of a kind has.

        Args:
          kind: `THRESHOLDS` or `SETTINGS`.
          sign: What stands before names in the message: `--` where they are flags.
        """
        for other, (names, remedy) in _ONLY.items():
            for name in names:
                if other != kind and getattr(self, name) is not None:
                    raise ManifestError(
                        f"{sign}{name} is for manifests of kind {other}, and this one is of kind {kind}. "
                        f"{remedy.format(sign=sign)}"
                    )


ANY_ENTRY = EntryChoice()
"""The choice of whoever names nothing: the entry that is served, or the only one."""
