"""The promises of a manifest, about thresholds or about the settings of a sweep that was made elsewhere.

Each promise has the tests that it rests on. Functions return promises as sentences. An `EntryChoice` identifies an
entry as one value that is passed on whole.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self, TypedDict, TypeVar

from calm_beam.errors import ManifestError
from calm_beam.risk.rules import Proved
from calm_beam.storage.record_values import Cost, Count, Items, Layers, Number, Share, Signed, Text, Unit, shown
from calm_beam.storage.records import ALONE_IF_ONE
from calm_beam.text import printable_line

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

# Only a group's count may be 0.
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
      variant: Its variant, if there are several; None elsewhere.
      near_ties: Examples whose output, or the full model's, depended on a decision within rounding; None if unknown.
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
        """The threshold and its variant."""
        return self.threshold, self.variant


@dataclass(frozen=True, kw_only=True)
class Look(LookRecord):
    """The state of an entry after a round of a sequential calibration.

    Attributes:
      threshold: The lowest threshold accepted by then; None if there is none.
      layers: Mean decoder layers per token at it; all layers if `threshold` is None.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("n", "threshold", "layers")

    threshold: Unit | None
    layers: Layers

    def proved(self, grid: Sequence[object]) -> Proved:
        """Returns the threshold's index, and its layers; all layers if there is none."""
        return Proved(-1 if self.threshold is None else grid.index(self.threshold), self.layers)


@dataclass(frozen=True, kw_only=True)
class Calibration(ThresholdTest, TestedEntry[PathEntry, Look]):
    """One promise about thresholds, and the tests it rests on.

    Attributes:
      loss: Loss computed from the metric's scores, as in `plan.tests`; None in manifests of early writers, who used
        `dissimilarity` and `relu`.
      threshold: The lowest accepted threshold, or None for "never exit"; with variants, the last accepted. With a
        confirmation, the last confirmed threshold, or None.
      variant: The variant to decode with, if there are several: it overrides `decode`. None elsewhere, and for "never
        exit".
      threshold_by_position: The threshold at every position of the output by the schedule, as float32, the first
        generated token's first. A token exits at the first exit layer whose confidence, in float32, is at least its
        number. None without a threshold, and in manifests of early writers.
      rule: The exit rule without the threshold: that of `decode`, with the values of its variant. None without a
        threshold, and in manifests of the first version.
      layers: Mean decoder layers per token at the threshold; all layers when it is None. If the threshold was
        confirmed, those of the outputs that confirmed it.
      risk: Empirical risk at the threshold; 0 when it is None. If the threshold was confirmed, the risk of the outputs
        that confirmed it.
      path: Every tested threshold: descending; or variants and thresholds in the chosen order; or variant by variant,
        each descending, the chosen one last.
      confirmation: The tests, by holdout examples, of thresholds accepted in `path`, whose outputs came from the
        decoder that serves: from the safest on, each at epsilon, up to the last accepted or the first that fails. The
        last rejected one is promised; if none was, nothing is. None if nothing was to be confirmed. The file stores a
        single test by itself, as early writers did, and several as a list.
      pays: False if a threshold was accepted but nothing is promised, since the cheapest one found safe costs no less
        than the full model, by `cost` of the manifest or as measured then; None elsewhere.
      confirming_epsilon: Level of the confirmations. Promises that hold together and have something to confirm divide
        among them the epsilon of those that have not, and what confirmed ones pass on. None if it is `epsilon`, or
        nothing was to be confirmed.
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
        """The choice of the path's tests, confirmed or not; None if nothing was found safe, or nothing pays."""
        return None if self.pays is False else super().chosen

    @property
    def promised_epsilon(self) -> float:
        """Level of the tests that the promise rests on: the confirmations if there are any, else the path."""
        if self.confirmation is None:
            return self.path_level
        return self.epsilon if self.confirming_epsilon is None else self.confirming_epsilon

    @property
    def deciding(self) -> PathEntry | None:
        """The test that decides what is promised; None if nothing was chosen.

        Among the confirmations it is the last that succeeded, or the first if none did.
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
        """The loss; the paper's in manifests that do not record it."""
        return self.loss or {"textual": "dissimilarity", "risk": "relu"}[self.consistency]

    @property
    def objective(self) -> Objective:
        """The loss of the promise."""
        return Objective(self.consistency, self.metric, loss=self.known_loss)

    def named(self) -> str:
        """Returns the values that identify the entry among those about the same group, as callers write them."""
        return (
            f"consistency={self.consistency}, metric={self.metric}, loss={self.known_loss}, delta={shown(self.delta)}, "
            f"epsilon={shown(self.epsilon)}, p_value={self.p_value}"
        )

    def has_proved_exits(self, layers: int) -> bool:
        """Returns whether anything that lets tokens exit was proved, even if nothing of it pays.

        Args:
          layers: The decoder's depth.
        """
        return any(step.rejected and step.layers < layers for step in self.path)

    def promise_in_words(self) -> str:
        """Returns the promise without its group, as text: `textual > 0.3, rouge_l, delta 0.1, epsilon 0.05`."""
        return f"{self.objective.consistency_in_words()}, {self.metric}, delta {self.delta:g}, epsilon {self.epsilon:g}"

    def __str__(self) -> str:
        """Returns the promise and the threshold, in a line."""
        exits = "never exit"
        if self.threshold is not None:
            at = threshold_in_words(self.threshold, self.variant)
            exits = f"threshold {at}, risk {self.risk:.4f}, {self.layers:.2f} layers a token"
        return printable_line(f"{_of_group(self.group)}{self.promise_in_words()}: {exits}")

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
        # Without a threshold all layers are used; the manifest checks their number.
        layers = self.layers if said is None else None
        self._check_choice(said, by=by, values={"threshold": None, "variant": None, "risk": 0, "layers": layers})
        self._check_looks()

    def confirmations(self) -> list[tuple[str, PathEntry]]:
        """Returns the tests that confirm, each with its key path in the file."""
        steps = self.confirmation or ()
        if len(steps) == 1:
            return [("confirmation", steps[0])]
        return [(f"confirmation[{index}]", step) for index, step in enumerate(steps)]

    def _check_confirmation(self, confirmation: tuple[PathEntry, ...]) -> None:
        """Refuses confirmations of anything but the choice, or decisions at odds with their p-values."""
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
        """Refuses a level without confirmations, or one that is not above the planned level."""
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
      setting: Name of the setting.
      cost: Cost of the setting; None if none was given.
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
    """The state of an entry after a round.

    Attributes:
      setting: The last setting in testing order that was accepted by then; None if there is none.
      cost: Its cost, or the mean over the examples counted by then; None if no costs were given, and without a setting.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("n", "setting", "cost")

    setting: Text | None
    cost: Cost | None

    def proved(self, grid: Sequence[object]) -> Proved:
        """Returns the setting's index, and its cost; infinity if unknown, and without a setting."""
        return Proved(
            -1 if self.setting is None else grid.index(self.setting), math.inf if self.cost is None else self.cost
        )


@dataclass(frozen=True, kw_only=True)
class SettingCalibration(SettingTest, TestedEntry[SettingStep, SettingLook]):
    """One promise about settings, and the tests it rests on.

    Attributes:
      setting: The last setting in testing order that was accepted; None if none was.
      cost: Its cost; None if none was given, and without a setting.
      risk: Its empirical risk; None without a setting.
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
        """Returns the values that identify the entry, as callers write them."""
        names = ("group", "tail", "delta", "epsilon")
        return ", ".join(f"{name}={shown(getattr(self, name))}" for name in names)

    def __str__(self) -> str:
        """Returns the promise and the setting, in a line."""
        loss = self.loss if self.tail is None else f"{self.loss} > {self.tail:g}"
        found = "no safe setting" if self.setting is None else f"setting {self.setting}, risk {self.risk:.4f}"
        promise = f"{loss}, delta {self.delta:g}, epsilon {self.epsilon:g}"
        return printable_line(f"{_of_group(self.group)}{promise}: {found}")


def _of_group(group: str | None) -> str:
    return "" if group is None else f"group {group}, "


THRESHOLDS, SETTINGS = "thresholds", "settings"
"""The kinds of manifests: about exit thresholds of a model, or about settings of a sweep that was made elsewhere."""

# By kind: what entries are about, and what is drawn.
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
    """Returns the promise of a manifest as a sentence.

    Args:
      kind: The kind of manifest, `THRESHOLDS` or `SETTINGS`.
      joint_epsilon: Probability with which any entry may be broken, if all hold together; None if each holds alone.
      hands_on: Whether entries that hold together pass on the epsilon that they do not need any more.
      cluster_key: Field of a data row that names its cluster, if clusters are the independent units.
      group_key: Field of a data row that names its group, if groups have their own entries.
      is_sequential: Whether the tests were watched while examples were decoded.
      variants: How several variants were tested: `PARETO` if a selection part chose what the other part tested, or
        `EACH_VARIANT`, each by itself; None without variants.
      most_confirmed: Largest number of thresholds per entry that a holdout has confirmed, among those that the rest had
        proved; 0 if nothing was to be confirmed.
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


# Keys of an entry, which `guarantee_in_words` names for readers of a manifest, as words for readers of a terminal.
_KEYS_IN_WORDS = (
    ("An entry without a tested_epsilon or confirming_epsilon holds", "An entry that was handed none of it holds"),
    ("An entry without a tested_epsilon holds", "An entry that was handed none of it holds"),
    ("one with it was tested at that level, and holds", "one that was handed some was tested at more, and holds"),
    (", or its confirming_epsilon where it has one", ", or that of its confirmation"),
)


def without_keys(guarantee: str) -> str:
    """Returns the promise of a manifest for terminals, where its keys are not seen."""
    for key, words in _KEYS_IN_WORDS:
        guarantee = guarantee.replace(key, words)
    return guarantee


def elsewhere_in_words(decoder: str) -> str:
    """Returns a sentence on what a promise is about, for a user's decoder of this name."""
    return (
        f"The outputs were decoded elsewhere, by what its user calls {decoder}. The promise is about what that decoder "
        "gave, and nothing here checks that what is served is the same."
    )


GUARANTEE = guarantee_in_words()
"""The promise if each entry holds alone, and prompts are drawn independently."""


PROMISE = ("consistency", "metric", "loss", "delta", "epsilon")
"""The fields that identify a promise, without its group."""


# Values that identify entries of one kind only, and what to do with a manifest of the other kind.
_ONLY = {
    THRESHOLDS: (("consistency", "metric", "loss", "confidence"), "Leave it out."),
    SETTINGS: (("tail",), "Name its {sign}loss."),
}
_Entry = TypeVar("_Entry", bound=AskedTest)


class EntryWords(TypedDict, total=False):
    """The arguments by which callers choose an entry: the fields of `EntryChoice`."""

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
    """The choice of a manifest's entry. Values of None are left open, if one entry matches the rest.

    Attributes:
      consistency: `textual` or `risk`.
      metric: Name of the metric. A user's own loss code is run only if it is named here.
      loss: Loss computed from its scores, such as `signed` or `dissimilarity>0.3`.
      group: Group that the entry is about; None for the entry about all prompts or examples.
      tail: For entries about settings, the loss that an example may have; None for the entry about the mean loss.
      delta: Risk tolerance, exactly as calibrated.
      epsilon: Allowed probability of breaking it, exactly as calibrated.
      confidence: The confidence measure, if the manifest names a user's code. It chooses no entry: it is named here
        since a file alone must not decide what runs.
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
        """Returns the choice made by flags, or by the fields of a transform.

        Args:
          holder: An object with attributes of the same names; missing attributes are left open.
        """
        return cls(**{field.name: getattr(holder, field.name, None) for field in dataclasses.fields(cls)})

    def promise(self) -> dict[str, str | float]:
        """Returns the values that the promise must have, by name, without its group and those left open."""
        values = {name: getattr(self, name) for name in PROMISE}
        return {name: value for name, value in values.items() if value is not None}

    def among(self, entries: Iterable[_Entry]) -> tuple[_Entry, ...]:
        """Returns the entries about its group that match all values that are not left open."""
        asked = {"group": self.group, **self.promise()}
        return tuple(entry for entry in entries if all(getattr(entry, name) == asked[name] for name in asked))

    def check_for(self, kind: str, *, sign: str = "") -> None:
        """Raises ManifestError if it names a value that no entry of a kind has.

        Args:
          kind: `THRESHOLDS` or `SETTINGS`.
          sign: Prefix of names in the message: `--` for flags.
        """
        for other, (names, remedy) in _ONLY.items():
            for name in names:
                if other != kind and getattr(self, name) is not None:
                    raise ManifestError(
                        f"{sign}{name} is for manifests of kind {other}, and this one is of kind {kind}. "
                        f"{remedy.format(sign=sign)}"
                    )


ANY_ENTRY = EntryChoice()


def with_words(choice: EntryChoice, words: EntryWords, *, function: Callable[..., Any]) -> EntryChoice:
    """Returns a choice with some of its fields replaced.

    Args:
      choice: The choice.
      words: The keyword arguments of a function that are none of its own parameters.
      function: The function that was called; an error names it.

    Raises:
      TypeError: If a word is no field of `EntryChoice`; names the nearest argument.
    """
    fields = [field.name for field in dataclasses.fields(EntryChoice)]
    unknown = next((name for name in words if name not in fields), None)
    if unknown is None:
        return dataclasses.replace(choice, **words)
    # Only for a mistake: a manifest is read where imports should take little time.
    import difflib
    import inspect

    names = [*fields, *inspect.signature(function).parameters]
    nearest = difflib.get_close_matches(unknown, names, n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    raise TypeError(f"{function.__name__}() has no argument {unknown!r}.{hint}")


"""The choice without any value: the served entry, or the only one."""
