"""The parts of a manifest, as frozen values that check themselves when they are made.

Numbers stay as given (1 does not become 1.0): the digest is taken over them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from calm_beam.exits.measures import MEASURES, Need, is_own
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.exits.schedules import SCHEDULES
from calm_beam.risk.stopping import Proved
from calm_beam.risk.tails import split_tail

from ._checks import (
    ManifestError,
    check_choice,
    check_count,
    check_number,
    check_text,
    shown,
)
from ._objective import CONSISTENCIES, LOSSES, Objective
from ._record import Record
from ._tests import OF_VARIANTS, PROCEDURES, LookRecord, StepRecord, TestedEntry
from ._unseen import UnseenRecord, check_unseen
from ._values import AnyText, Count, Layers, Positive, Share, Temperature, Text, Unit, one_of

# Readers hold a manifest in memory; the whole list stands in `failures.jsonl` beside it.
MOST_FAILED_IDS = 1000
SERVED_DECODERS = ("batch",)
VARIANT_MEASURES = tuple(
    name for name, measure in MEASURES.items() if measure.needs not in (Need.TOKENS, Need.LAST_TOKEN)
)
"""Measures that variants may differ in: those that can be served, and need nothing but a name."""
ENGINES = ("native", "xla")
LOOP = "xla_loop"
"""The engine of single prompts that XLA decodes in a loop on the device."""
# Those that earlier versions certified by XLA.
_GONE_HEADS = ("int8", "bfloat16")
HEAD_FORMS = ("exact", *_GONE_HEADS, "uint8")


def check_loss(key: str, value: object) -> None:
    """Refuses anything but a loss, and the tail of one."""
    try:
        loss, _ = split_tail(value) if isinstance(value, str) else (value, None)
    except ValueError as error:
        raise ManifestError(f"{key}: {error}") from error
    check_choice(key, loss, choices=LOSSES)


def _check_confidence(key: str, value: object) -> None:
    if not isinstance(value, str) or not is_own(value):
        check_choice(key, value, choices=tuple(MEASURES))


@dataclass(frozen=True, kw_only=True)
class ModelRecord(Record):
    """The model that was calibrated.

    Attributes:
      uri: Where its checkpoint was read from.
      fingerprint: Identifies its parameters and configuration; serving compares it with its own.
      layers: Number of decoder layers, at least 1.
    """

    uri: Text
    fingerprint: Text
    layers: Positive


@dataclass(frozen=True, kw_only=True)
class ChatRecord(Record):
    """How prompts were made of texts: by a chat template, which is a part of every prompt.

    Attributes:
      template: The Jinja template itself.
      tokens: Texts of special tokens that it may use, by name.
      system: What every chat began with, before the text; None if it began with that.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("system",)

    template: Text
    tokens: Mapping[str, str]
    system: AnyText | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tokens, Mapping):
            raise ManifestError(f"tokens must be a JSON object, got {shown(self.tokens)}")
        for name, text in self.tokens.items():
            check_text("a name in tokens", name)
            check_text(f"tokens.{name}", text, empty_allowed=True)


@dataclass(frozen=True, kw_only=True)
class VocabularyRecord(Record):
    """The vocabulary that turned text into token ids, and outputs into text.

    Attributes:
      fingerprint: Identifies the SentencePiece model, or the tokenizer.
      extra_ids: Number of sentinel ids above its pieces.
      chat: How prompts were made of texts; None where a prompt is the text as it is.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("chat",)

    fingerprint: Text
    extra_ids: Count
    chat: ChatRecord | None = None


@dataclass(frozen=True, kw_only=True)
class EngineRecord(Record):
    """What computed outputs: another engine rounds otherwise, which moves an output now and then.

    Attributes:
      name: One of `ENGINES`; or `LOOP`, by which nothing is calibrated.
      instructions: What the code was made for: of `native`, its instruction set; of others, the platform with, of CPUs,
        their vector instructions, of others the kind of device, and how many share a model; then the instruction set of
        the head where native code decides. None where the machines that decoded did not say.
      head: Form of the output head that decided exits: `exact`, or `uint8`, which is int8 by native code. In records of
        earlier versions also `int8` or `bfloat16`, which XLA certified.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("instructions",)

    name: Annotated[str, one_of((*ENGINES, LOOP))]
    instructions: Text | None = None
    head: Annotated[str, one_of(HEAD_FORMS)]

    def in_words(self) -> str:
        """Returns the engine in a few words.

        >>> EngineRecord(name="native", instructions="avx2", head="uint8").in_words()
        'native (avx2), head uint8'
        """
        instructions = "" if self.instructions is None else f" ({self.instructions})"
        return f"{self.name}{instructions}, head {self.head}"

    @property
    def is_gone(self) -> bool:
        """Whether no version decodes by it any more."""
        return self.head in _GONE_HEADS

    def is_unlike(self, other: "EngineRecord") -> bool:
        """Returns whether the other is known to be another engine; instructions that one does not say are not told."""
        known = self.instructions is not None and other.instructions is not None
        return (self.name, self.head) != (other.name, other.head) or (known and self.instructions != other.instructions)


def engine_difference(ours: EngineRecord | None, theirs: EngineRecord | None) -> tuple[str, ...]:
    """Returns in words that two jobs are of different engines, and how to take the other; nothing if they are of one.

    Args:
      ours: That of the job here; None where it was not recorded.
      theirs: That of the other.
    """
    if ours == theirs:
        return ()
    here, there = ("one that was not recorded" if each is None else each.in_words() for each in (ours, theirs))
    if theirs is None:
        how = "; an earlier version of calm-beam decoded there"
    elif theirs.is_gone:
        how = "; an earlier version of calm-beam decoded there, by a head that is gone"
    elif ours is not None and theirs.name != ours.name:
        how = f"; --engine={theirs.name} takes the other, on a machine that has it"
    elif ours is not None and theirs.head != ours.head:
        how = f"; --exit_head={'int8' if theirs.head == 'uint8' else 'exact'} takes the other"
    else:
        how = ""
    return (f"the engine is {there} there, {here} here{how}",)


@dataclass(frozen=True, kw_only=True)
class DecodeRecord(Record):
    """Everything that can change a generated token; serving must decode in the same way.

    Attributes:
      confidence: Name of one of `calm_beam.exits.measures.MEASURES`, or `module:name` of a user's own.
      schedule: One of `SCHEDULES`.
      tau: Temperature of a decaying schedule, at least 0; None where the schedule has none.
      state_propagation: Name of one of `calm_beam.exits.propagations.PROPAGATIONS`.
      min_exit_layer: First layer at which a token may exit, counted from 1.
      exit_interval: Number of layers from one possible exit to the next.
      max_input_length: Longest input in tokens; longer ones are cut.
      max_decode_length: Longest output in tokens; also N of a decaying schedule.
      task_prefix: Text put before every input, possibly empty.
      dtype: Type in which the model computes.
      patience: How many layers a measure that compares predicted tokens looks at; None with other measures.
      confidence_source: Digest of the file that defines a user's own measure; None with ours.
      matmul_precision: Of products of float32 numbers on GPUs and TPUs, by JAX's names; None for `highest`.
      engine: What computed the outputs; None in manifests that do not say.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("patience", "confidence_source", "matmul_precision", "engine")

    confidence: Annotated[str, _check_confidence]
    schedule: Annotated[str, one_of(tuple(SCHEDULES))]
    tau: Temperature | None
    state_propagation: Annotated[str, one_of(tuple(PROPAGATIONS))]
    min_exit_layer: Positive
    exit_interval: Positive
    max_input_length: Positive
    max_decode_length: Positive
    task_prefix: AnyText
    dtype: Text
    patience: Positive | None = None
    confidence_source: Text | None = None
    matmul_precision: Text | None = None
    engine: EngineRecord | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau is None and SCHEDULES[self.schedule].decays:
            raise ManifestError(f"tau must be a number when schedule is {shown(self.schedule)}, got null")

    def arithmetic_in_words(self) -> str:
        """Returns in which numbers the model computes, in a few words."""
        if self.matmul_precision is None:
            return self.dtype
        return f"{self.dtype} with products of {self.matmul_precision} precision"


@dataclass(frozen=True, kw_only=True)
class Variant(Record):
    """What tells the ways of decoding apart of a calibration that has several.

    Attributes:
      tau: As in `DecodeRecord`.
      min_exit_layer: As in `DecodeRecord`.
      confidence: As in `DecodeRecord`; None where all variants have one measure.
      exit_interval: As in `DecodeRecord`; None where all variants have one.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("tau", "confidence", "exit_interval")

    tau: Temperature | None = None
    min_exit_layer: Positive
    confidence: Annotated[str, one_of(VARIANT_MEASURES)] | None = None
    exit_interval: Positive | None = None

    def fields_of_rule(self) -> dict[str, Any]:
        """Returns what stands in the place of fields of `DecodeRecord` and of an exit rule, by their names."""
        given = {"confidence": self.confidence, "exit_interval": self.exit_interval}
        return {
            "tau": self.tau,
            "min_exit_layer": self.min_exit_layer,
            **{name: value for name, value in given.items() if value is not None},
        }

    def in_words(self) -> str:
        """Returns it in a few words.

        >>> Variant(tau=4, min_exit_layer=2).in_words(), Variant(min_exit_layer=1).in_words()
        ('tau 4, from layer 2', 'from layer 1')
        >>> Variant(confidence="state", min_exit_layer=2, exit_interval=3).in_words()
        'state, from layer 2 in steps of 3'
        """
        measure = "" if self.confidence is None else f"{self.confidence}, "
        tau = "" if self.tau is None else f"tau {self.tau:g}, "
        steps = "" if self.exit_interval in (None, 1) else f" in steps of {self.exit_interval}"
        return f"{measure}{tau}from layer {self.min_exit_layer}{steps}"


def threshold_in_words(threshold: float, variant: Variant | None) -> str:
    """Returns a threshold, and the way of decoding that it is for where there are several.

    >>> threshold_in_words(0.5, None), threshold_in_words(0.5, Variant(tau=4, min_exit_layer=2))
    ('0.5', '0.5 (tau 4, from layer 2)')
    """
    return f"{threshold:g}" + ("" if variant is None else f" ({variant.in_words()})")


@dataclass(frozen=True, kw_only=True)
class GroupRecord(Record):
    """A group of the calibration set.

    Attributes:
      name: What the data call it.
      examples: How many examples it has; 0 where a sequential calibration stopped before the first of them.
    """

    name: Text
    examples: Count


@dataclass(frozen=True, kw_only=True)
class CountedData(Record):
    """Examples from which something was proved, of a calibration set or of a sweep that was made elsewhere.

    Attributes:
      patterns: Files or runs that they, or their losses, were read from.
      examples: Number of examples, failed ones included.
      clusters: Number of clusters, where they and not examples are the independent units; None otherwise.
      fingerprint: Identifies the examples; of a sweep, their losses under all settings too.
    """

    patterns: tuple[Text, ...]
    examples: Positive
    clusters: Count | None
    fingerprint: Text

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clusters(self.examples, self.clusters)

    @property
    def units(self) -> int:
        """Number of independent units: clusters where there are some, examples otherwise."""
        return self.examples if self.clusters is None else self.clusters


def check_clusters(examples: int, clusters: int | None) -> None:
    """Refuses a number of clusters that so many examples cannot be in."""
    if clusters is not None:
        # Where there are examples, they are in some cluster.
        check_count("clusters", clusters, low=min(1, examples))
        if clusters > examples:
            raise ManifestError(f"clusters must be at most examples, which is {examples}, got {clusters}")


@dataclass(frozen=True, kw_only=True)
class DataRecord(CountedData):
    """The calibration set.

    Attributes:
      choosing: Number of independent units that have chosen what was tested, and in which order; the others tested it.
        None where the order was fixed beforehand.
      groups: The groups that its examples fall into, by name in ascending order; None where they are not told apart.
      duplicates: Examples whose input had already occurred; they weaken the assumption of independent draws.
      failed: Examples that could not be decoded or scored and count with loss 1 at every threshold.
      failed_ids: Their ids in ascending order, the first `MOST_FAILED_IDS` of them; None in manifests that do not say,
        and where none failed.
      truncated: Examples whose input was cut to the longest allowed.
      unseen: Examples with texts that a metric did not see, by metric in ascending order; None where there are none,
        and in manifests that do not say.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("clusters", "choosing", "groups", "failed_ids", "unseen")
    _FIRST: ClassVar[tuple[str, ...]] = (
        *("patterns", "examples", "clusters", "choosing", "groups"),
        *("duplicates", "failed", "failed_ids", "truncated", "unseen"),
    )

    clusters: Positive | None = None
    choosing: Positive | None = None
    groups: tuple[GroupRecord, ...] | None = None
    duplicates: Count
    failed: Count
    failed_ids: tuple[Text, ...] | None = None
    truncated: Count
    unseen: tuple[UnseenRecord, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, count in (("duplicates", self.duplicates), ("failed", self.failed), ("truncated", self.truncated)):
            if count > self.examples:
                raise ManifestError(f"{key} must be at most examples, which is {self.examples}, got {count}")
        if self.failed_ids is not None:
            self._check_failed_ids(self.failed_ids)
        check_unseen(self.unseen, examples=self.examples)
        if self.choosing is not None and self.choosing >= self.units:
            raise ManifestError(f"choosing must leave others to test, of {self.units} {self.unit}, got {self.choosing}")
        if self.groups is not None:
            self._check_groups(self.groups)

    def _check_groups(self, groups: tuple[GroupRecord, ...]) -> None:
        names = [group.name for group in groups]
        if not names or any(after <= before for before, after in pairwise(names)):
            raise ManifestError(f"groups must have one or more names, ascending, each once, got {shown(names)}")
        if sum(group.examples for group in groups) != self.examples:
            raise ManifestError(
                f"groups must have all examples, of which there are {self.examples}, got "
                f"{sum(group.examples for group in groups)}"
            )
        if self.clusters is not None:
            raise ManifestError("groups must be left out where there are clusters, which may hold several of them")
        if self.choosing is not None:
            raise ManifestError("groups must be left out where some of the examples have chosen what was tested")

    def _check_failed_ids(self, failed_ids: tuple[str, ...]) -> None:
        if any(after <= before for before, after in pairwise(failed_ids)):
            raise ManifestError(f"failed_ids must ascend, each id once, got {shown(failed_ids)}")
        listed = min(self.failed, MOST_FAILED_IDS)
        if not failed_ids or len(failed_ids) != listed:
            raise ManifestError(
                f"failed_ids must have {listed} ids, since failed is {self.failed} (left out where that is 0), "
                f"got {len(failed_ids)}"
            )

    @property
    def unit(self) -> str:
        """What the independent units are: `examples` or `clusters`."""
        return "examples" if self.clusters is None else "clusters"

    def units_of(self, group: str | None) -> int | None:
        """Returns the number of independent units that tested a promise about a group; None for an unknown group.

        For None, of a promise about all prompts: all units, but for those that have chosen what was tested.
        """
        if group is None:
            return self.units - (self.choosing or 0)
        return next((each.examples for each in self.groups or () if each.name == group), None)


@dataclass(frozen=True, kw_only=True)
class ConfirmationRecord(Record):
    """The part of the calibration set that chose nothing, and what decoded it at the thresholds that were chosen.

    Attributes:
      decoder: One of `SERVED_DECODERS`: what decoded, the full model's outputs too.
      exit_head: Form of the output head that was asked for; `auto` is what `calm_beam.decoding.engine_choice` takes.
      dtype: Type in which the model computed; `DecodeRecord.dtype`.
      data: The part: what `Manifest.data` says of the rest, with the same patterns and groups.
      engine: What computed the outputs; None in manifests that do not say.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("engine",)

    decoder: Annotated[str, one_of(SERVED_DECODERS)]
    exit_head: Text
    dtype: Text
    data: DataRecord
    engine: EngineRecord | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.choosing is not None:
            raise ManifestError(f"data.choosing must be left out, since these chose nothing, got {self.data.choosing}")


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

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("variant", "near_ties")
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
class Calibration(TestedEntry[PathEntry, Look]):
    """One promise of thresholds, and the tests it rests on.

    Attributes:
      consistency: What quality is compared with, one of `CONSISTENCIES`.
      metric: Name of the metric behind the loss.
      loss: What is made of the metric's scores, one of `LOSSES` or a tail of one (`calm_beam.risk.tails`); None in
        manifests that do not say.
      threshold: The lowest accepted threshold, or None for "never exit"; where there are variants, the last accepted.
        Where something was to be confirmed, the last one confirmed, or None.
      variant: How it has to be decoded, where there are several ways: in place of what `Manifest.decode` says. None
        elsewhere, and for "never exit".
      threshold_by_position: What the schedule makes of it, a float32 for each position of the output; None where it is
        None, and in manifests of early writers.
      layers: Mean decoder layers per token at the threshold; all layers when it is None. Where the threshold was
        confirmed, those of the outputs that confirmed it.
      risk: Empirical risk at the threshold, likewise; 0 when it is None.
      path: Every threshold tested: descending; or of variants and thresholds in the order that was chosen; or variant
        by variant, each descending, the one that is chosen last.
      confirmation: The tests, by examples that chose nothing, of thresholds accepted in `path`, whose outputs came from
        the decoder that serves: from the safest on, each at epsilon, up to the last accepted or the first that fails.
        The last one rejected is promised; where none was, `threshold` is None. None where nothing was to be confirmed.
        A single one stands in the file by itself, as early writers put it, and several in a list.
      confirming_epsilon: Level of the confirmations, where it is not `epsilon`: of promises that hold together, those
        that have something to confirm divide the epsilon of those that have not.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = (
        "loss",
        "group",
        "variant",
        "threshold_by_position",
        "confirmation",
        "confirming_epsilon",
        "looks",
        "example_risk",
    )

    _FIRST: ClassVar[tuple[str, ...]] = (
        *("consistency", "metric", "loss", "group", "delta", "epsilon", "p_value", "procedure"),
        *("threshold", "variant", "threshold_by_position", "layers", "risk", "path"),
        *("confirmation", "confirming_epsilon"),
    )
    _TESTED: ClassVar[str] = "threshold"
    _NOTHING: ClassVar[str] = "when threshold is null"

    consistency: Annotated[str, one_of(CONSISTENCIES)]
    metric: Text
    loss: Annotated[str, check_loss] | None = None
    group: Text | None = None
    procedure: Annotated[str, one_of((*PROCEDURES, *OF_VARIANTS))]
    threshold: Unit | None
    variant: Variant | None = None
    threshold_by_position: tuple[float, ...] | None = None
    layers: Layers
    risk: float
    confirmation: tuple[PathEntry, ...] | None = None
    confirming_epsilon: Share | None = None

    @property
    def promised_epsilon(self) -> float:
        """Allowed probability that the promise is broken: the level of the tests that it rests on."""
        return self.epsilon if self.confirming_epsilon is None else self.confirming_epsilon

    @property
    def deciding(self) -> PathEntry | None:
        """The test that decides what is promised; None where nothing was chosen.

        Of the confirmations it is the last that held, or the first where none did.
        """
        if self.confirmation is None:
            return self.chosen
        return next((step for step in reversed(self.confirmation) if step.rejected), self.confirmation[0])

    def to_dict(self) -> dict[str, object]:
        """Returns the record as plain JSON values, with a single confirmation in place of a list of it."""
        values = super().to_dict()
        if self.confirmation is not None and len(self.confirmation) == 1:
            values["confirmation"] = self.confirmation[0].to_dict()
        return values

    @property
    def is_signed(self) -> bool:
        """Whether losses lie in [-1, 1] and not in [0, 1]."""
        return self.loss == "signed"

    @property
    def _is_promised(self) -> bool:
        return self.threshold is not None

    @property
    def known_loss(self) -> str:
        """The loss; manifests that do not say mean the paper's."""
        return self.loss or {"textual": "dissimilarity", "risk": "relu"}[self.consistency]

    @property
    def objective(self) -> Objective:
        """The loss that it is about."""
        return Objective(self.consistency, self.metric, loss=self.known_loss)

    def promise_in_words(self) -> str:
        """Returns what is promised, whatever group it is about: `textual > 0.3, rouge_l, delta 0.1, epsilon 0.05`."""
        return f"{self.objective.consistency_in_words()}, {self.metric}, delta {self.delta:g}, epsilon {self.epsilon:g}"

    @classmethod
    def _read(cls, key: str, value: object, *, at: str) -> object:
        if key != "confirmation":
            return super()._read(key, value, at=at)
        if not isinstance(value, list):
            return (PathEntry.from_dict(value, at=at),)
        if len(value) == 1:
            raise ManifestError(f"{at} must be the test itself where there is one, got a list of it")
        return super()._read(key, value, at=at)

    def __post_init__(self) -> None:
        check_number("risk", self.risk, low=self._lowest, high=1)
        super().__post_init__()
        if self.threshold is None and self.threshold_by_position is not None:
            raise ManifestError(
                "threshold_by_position must be left out when threshold is null, "
                f"got {shown(self.threshold_by_position)}"
            )
        self._check_testing_order()
        if self.confirming_epsilon is not None:
            self._check_confirming_epsilon(self.confirming_epsilon)
        if self.confirmation is not None:
            self._check_confirmation(self.confirmation)
        self._check_choice_follows()
        if self.looks is not None:
            self._check_looks(self.looks)

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

    def _check_choice_follows(self) -> None:
        said = self.chosen
        source = "path"
        if self.confirmation is not None:
            said, source = self.deciding, "confirmation"
            if said is not None and not said.rejected:
                said = None
        expected = said.threshold if said else None
        if self.threshold != expected:
            why = "the last one rejected in path (null for none)"
            if source == "confirmation":
                why = "as confirmation says (null if it was not rejected)"
            raise ManifestError(f"threshold must be {shown(expected)}, {why}, got {shown(self.threshold)}")
        variant = said.variant if said else None
        if self.variant != variant:
            raise ManifestError(
                f"variant must be {'left out' if variant is None else variant.in_words()}, as {source} says of "
                f"threshold, got {'none' if self.variant is None else self.variant.in_words()}"
            )
        risk = said.risk if said else 0
        if self.risk != risk:
            raise ManifestError(f"risk must be {shown(risk)}, as {source} says of threshold, got {shown(self.risk)}")
        if said and self.layers != said.layers:
            raise ManifestError(
                f"layers must be {shown(said.layers)}, as {source} says of threshold, got {shown(self.layers)}"
            )

    def _check_looks(self, looks: tuple[Look, ...]) -> None:
        for index, (before, look) in enumerate(pairwise(looks), start=1):
            if before.threshold is not None and (look.threshold is None or look.threshold > before.threshold):
                raise ManifestError(
                    f"looks[{index}].threshold must be at most {shown(before.threshold)}, which was accepted before, "
                    f"got {shown(look.threshold)}"
                )
        # What was looked at had been chosen by then, whatever became of it since.
        chosen = self.chosen
        threshold, layers = (chosen.threshold, chosen.layers) if chosen else (None, self.layers)
        self._check_end(looks, {"threshold": threshold, "layers": layers})
