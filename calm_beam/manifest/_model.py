"""The calibrated model and how it decodes: model, vocabulary, engine, exit rule, and speed.

Also the declared costs of a token, if exit rules were chosen by them, and the measured speeds of the chosen
rules.

Numbers stay as given (1 does not become 1.0): the digest is taken over them.
"""

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar

from calm_beam.errors import ManifestError
from calm_beam.exits.measures import MEASURES, Need, is_own
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.exits.schedules import SCHEDULES
from calm_beam.storage.record_values import AnyText, Cost, Count, Number, OneOf, Positive, Temperature, Text, shown
from calm_beam.storage.records import Record

VARIANT_MEASURES = tuple(
    name for name, measure in MEASURES.items() if measure.needs not in (Need.TOKENS, Need.LAST_TOKEN)
)
"""Measures that variants may have: those that can be served, and need only a name."""


ENGINES = ("native", "xla")
LOOP = "xla_loop"
"""The engine of single prompts that XLA decodes in a loop on the device."""
# Head forms that earlier versions certified with XLA.
_GONE_HEADS = ("int8", "bfloat16")
# Accelerators on which `benchmarks.across_devices` has found no confidence that differs between a sweep and batches of
# any size, with one device per model.
_SEEN_BATCH_INVARIANT = ("gpu NVIDIA H100 80GB HBM3",)
HEAD_FORMS = ("exact", *_GONE_HEADS, "uint8")
_DECAYING = [name for name, schedule in SCHEDULES.items() if schedule.decays]
# Two correct exponentials differ by a few units in the last place of 2^-52. A smaller difference than this changes a
# float32, with units of 2^-23, only if the exact value lies next to the midpoint between two float32 numbers.
_ROUNDING = 2.0**-48


class _MeasureName:
    """A built-in measure, or `module:name` of a user's own."""

    def __call__(self, key: str, value: object, /) -> None:
        if not isinstance(value, str) or not is_own(value):
            OneOf(tuple(MEASURES))(key, value)

    def schema(self) -> dict[str, Any]:
        """Returns the built-in measures, and the form of other names."""
        form = "^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"
        return {"anyOf": [OneOf(tuple(MEASURES)).schema(), {"type": "string", "pattern": form}]}


@dataclass(frozen=True, kw_only=True)
class ModelRecord(Record):
    """The model that was calibrated.

    Attributes:
      uri: Where its checkpoint was read from.
      fingerprint: Fingerprint of its parameters and configuration; serving compares it with that of the served model.
      layers: Number of decoder layers, at least 1.
    """

    uri: Text
    fingerprint: Text
    layers: Positive


@dataclass(frozen=True, kw_only=True)
class EngineRecord(Record):
    """The engine that computed outputs. Another engine rounds differently, which changes an output now and then.

    Attributes:
      name: One of `ENGINES`, our own code for CPUs (`native`) or XLA; or `LOOP`, which calibrates nothing.
      instructions: The target of the code. For `native`, its instruction set; for `xla`, the platform, with the vector
        instructions of CPUs, or the kind of other devices and how many share a model; then the instruction set of the
        head if native code decides. None if the machines that decoded did not report it.
      head: Form of the output head that decided exits: `exact`, or `uint8`, which is int8 by native code. In records of
        earlier versions also `int8` or `bfloat16`, which XLA certified.
      prefill: `native` where the engine `native` prefilled prompts; None for XLA, which did so in earlier versions.
    """

    name: Annotated[str, OneOf((*ENGINES, LOOP))]
    instructions: Text | None = None
    head: Annotated[str, OneOf(HEAD_FORMS)]
    prefill: Annotated[str, OneOf(("native",))] | None = None

    def in_words(self) -> str:
        """Returns a short description of the engine.

        >>> EngineRecord(name="native", instructions="avx2", head="uint8", prefill="native").in_words()
        'native (avx2), head uint8'
        """
        instructions = "" if self.instructions is None else f" ({self.instructions})"
        prefill = ", prefill by XLA" if self.name == "native" and self.prefill is None else ""
        return f"{self.name}{instructions}, head {self.head}{prefill}"

    @property
    def is_gone(self) -> bool:
        """Whether no current version can decode with it."""
        return self != self.nearest()

    def nearest(self) -> "EngineRecord":
        """Returns the most similar engine of this version: the exact head if the head is gone, and its own prefill."""
        head = "exact" if self.head in _GONE_HEADS else self.head
        return replace(self, head=head, prefill="native" if self.name == "native" else None)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the engine is known to be batch-invariant: a prompt is rounded in the same way in any batch.

        It is on CPUs, and on the kinds of accelerators on which that was observed. Code that was only compiled for
        others counts as not known.
        """
        if self.name != "xla" or self.instructions is None or self.instructions.startswith("cpu"):
            return True
        return self.instructions in _SEEN_BATCH_INVARIANT

    def is_unlike(self, other: "EngineRecord") -> bool:
        """Returns whether the other is known to be another engine; unrecorded instructions are not compared."""
        known = self.instructions is not None and other.instructions is not None
        one, another = ((each.name, each.head, each.prefill) for each in (self, other))
        return one != another or (known and self.instructions != other.instructions)


def engine_difference(ours: EngineRecord | None, theirs: EngineRecord | None) -> tuple[str, ...]:
    """Returns text that two jobs have different engines, and how to use the other one; empty if they are the same.

    Args:
      ours: Engine of the job here; None if it was not recorded.
      theirs: Engine of the other job.
    """
    if ours == theirs:
        return ()
    here, there = ("one that was not recorded" if each is None else each.in_words() for each in (ours, theirs))
    if theirs is None:
        how = "; an earlier version of calm-beam decoded there"
    elif theirs.is_gone:
        how = "; an earlier version of calm-beam decoded there, in a way that is gone"
    elif ours is not None and theirs.name != ours.name:
        how = f"; --engine={theirs.name} takes the other, on a machine that has it"
    elif ours is not None and theirs.head != ours.head:
        how = f"; --exit_head={'int8' if theirs.head == 'uint8' else 'exact'} takes the other"
    else:
        how = ""
    return (f"the engine is {there} there, {here} here{how}",)


@dataclass(frozen=True, kw_only=True)
class ExitRuleRecord(Record):
    """The exit rule of tokens, without the threshold.

    Attributes:
      confidence: The measure compared with the threshold after each decoder layer: one of
        `calm_beam.exits.measures.MEASURES`, or `module:name` of a user's own.
      schedule: How the threshold changes from token to token: not at all, by Eq. 5 of the CALM paper, or by the formula
        in the released T5X code (which itself, as released, decodes with a constant threshold).
      tau: Temperature of a decaying schedule, at least 0; None if the schedule has none.
      min_exit_layer: First layer at which a token may exit, counted from 1.
      exit_interval: Number of layers from one exit layer to the next.
      patience: Number of layers compared by a measure that compares predicted tokens; None with other measures.
      confidence_source: Digest of the file that defines a user's own measure; None with built-in ones.
    """

    SCHEMA_RULES: ClassVar[Mapping[str, Any]] = {
        "if": {"properties": {"schedule": {"enum": _DECAYING}}},
        "then": {"properties": {"tau": {"type": "number"}}},
    }

    confidence: Annotated[str, _MeasureName()]
    schedule: Annotated[str, OneOf(tuple(SCHEDULES))]
    tau: Temperature | None
    min_exit_layer: Positive
    exit_interval: Positive
    patience: Positive | None = None
    confidence_source: Text | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau is None and self.schedule in _DECAYING:
            raise ManifestError(f"tau must be a number when schedule is {shown(self.schedule)}, got null")


@dataclass(frozen=True, kw_only=True)
class DecodeRecord(ExitRuleRecord):
    """Everything that can change a generated token; serving must decode in the same way.

    Attributes:
      state_propagation: How the layers that an earlier token skipped get their keys and values, one of
        `calm_beam.exits.propagations.PROPAGATIONS`.
      max_input_length: Longest input in tokens; longer ones are cut.
      max_decode_length: Longest output in tokens; also N of a decaying schedule.
      task_prefix: Text put before every input, possibly empty.
      dtype: Type in which the model computes: `float32` or `bfloat16`.
      matmul_precision: Precision of products of float32 numbers on GPUs and TPUs: `high` or `default`, as JAX calls
        them; None for the highest.
      engine: The engine of the outputs; None in manifests that do not record it.
    """

    _FIRST: ClassVar[tuple[str, ...]] = (
        *("confidence", "schedule", "tau", "state_propagation", "min_exit_layer", "exit_interval"),
        *("max_input_length", "max_decode_length", "task_prefix", "dtype"),
    )

    state_propagation: Annotated[str, OneOf(tuple(PROPAGATIONS))]
    max_input_length: Positive
    max_decode_length: Positive
    task_prefix: AnyText
    dtype: Text
    matmul_precision: Text | None = None
    engine: EngineRecord | None = None

    def rule(self) -> ExitRuleRecord:
        """Returns the exit rule."""
        return ExitRuleRecord(**{each.name: getattr(self, each.name) for each in fields(ExitRuleRecord)})

    def precision_in_words(self) -> str:
        """Returns a short description of the precision in which the model computes."""
        if self.matmul_precision is None:
            return self.dtype
        return f"{self.dtype} with products of {self.matmul_precision} precision"


@dataclass(frozen=True, kw_only=True)
class Variant(Record):
    """The values by which variants of decoding differ, in a calibration that has several.

    Attributes:
      tau: Temperature of a decaying schedule, as in `decode`.
      min_exit_layer: First layer at which a token may exit, as in `decode`.
      confidence: Confidence measure, as in `decode`; None if all variants have the same.
      exit_interval: Number of layers between exit layers, as in `decode`; None if all variants have the same.
    """

    tau: Temperature | None = None
    min_exit_layer: Positive
    confidence: Annotated[str, OneOf(VARIANT_MEASURES)] | None = None
    exit_interval: Positive | None = None

    def fields_of_rule(self) -> dict[str, Any]:
        """Returns the values that override fields of `DecodeRecord` and of an exit rule, by name."""
        given = {"confidence": self.confidence, "exit_interval": self.exit_interval}
        return {
            "tau": self.tau,
            "min_exit_layer": self.min_exit_layer,
            **{name: value for name, value in given.items() if value is not None},
        }

    def in_words(self) -> str:
        """Returns a short description of the variant.

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
    """Returns a threshold as text, with its variant if there are several.

    >>> threshold_in_words(0.5, None), threshold_in_words(0.5, Variant(tau=4, min_exit_layer=2))
    ('0.5', '0.5 (tau 4, from layer 2)')
    """
    return f"{threshold:g}" + ("" if variant is None else f" ({variant.in_words()})")


def check_positions(key: str, positions: tuple[float, ...], *, threshold: float, decode: DecodeRecord) -> None:
    """Refuses thresholds that are not those of the schedule.

    The writer computes in float64 and rounds to float32, and so does this check. A constant schedule has no arithmetic
    that could differ: the numbers must be equal. A decaying one has an exponential, which mathematical libraries round
    differently in the last place: the number must be the float32 of a value within a share of 2^-48 of the value
    computed here. That is one float32 for all but one in millions of values, and one of two neighbours for those.

    Args:
      key: Key path of the positions.
      positions: Threshold of each position.
      threshold: The threshold that they follow from.
      decode: Names the schedule and the number of positions.

    Raises:
      ManifestError: If their number or a value differs.

    Source: CALM Eq. 5 (decaying threshold), and the formula in the released T5X code; as in `calm_beam.exits.rule`.
    """
    if len(positions) != decode.max_decode_length:
        raise ManifestError(
            f"{key} must have decode.max_decode_length entries, which is {decode.max_decode_length}, "
            f"got {len(positions)}"
        )
    for position, found in enumerate(positions):
        at = f"{key}[{position}]"
        Number(0, 1)(at, found)
        low, high = _allowed(threshold, decode, position=position)
        if not low <= found <= high or found != _float32(found):
            raise ManifestError(
                f"{at} must be {shown(low)}, which schedule {decode.schedule} makes of threshold {shown(threshold)} "
                f"in float32, got {shown(found)}"
            )


def _allowed(threshold: float, decode: DecodeRecord, *, position: int) -> Sequence[float]:
    """Returns the lowest and the highest float32 that the threshold of a position can be."""
    schedule = SCHEDULES[decode.schedule]
    if not schedule.decays:
        return [_float32(threshold)] * 2
    assert decode.tau is not None
    scale, shift = schedule.factors(0.1 * math.exp(-float(decode.tau) * position / decode.max_decode_length))
    value = scale * threshold + shift
    return [_float32(min(1.0, value * factor)) for factor in (1 - _ROUNDING, 1 + _ROUNDING)]


def _float32(value: float) -> float:
    """Returns the nearest float32, rounding ties to even."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


OBJECTIVES = LATENCY, THROUGHPUT, LAYERS, FLOPS = ("latency", "throughput", "layers", "flops")
"""The cost that exits should save: seconds of single prompts, of batches, layers, or operations."""
UNITS = {LATENCY: "seconds", THROUGHPUT: "seconds", LAYERS: "layers", FLOPS: "operations"}
"""The unit of each objective."""


@dataclass(frozen=True, kw_only=True)
class CostRecord(Record):
    """The declared cost of a token, settled before any loss was seen; the promises hold whatever the numbers.

    A token costs `output`, `layer` for each layer that it uses, `skipped` for each that it skips, and a test
    at each exit layer where it goes on, and where it exits by a measure that does not need logits.

    Attributes:
      unit: Unit of the numbers: `seconds`, `operations` or `layers`.
      batch: Number of prompts decoded together; None if it does not matter.
      device: JAX's name of the kind of device that was measured; None if nothing was measured.
      cores: Number of cores that the process might use; None if nothing was measured.
      engine: The engine that decoded; None if nothing was measured.
      layer: Cost of a used layer. If it was measured, the additional cost over a skipped layer.
      skipped: Cost of a skipped layer. If it was measured, 0: it is included in the other two.
      output: Cost of everything else.
      logits_test: Cost of an exit test of logits; None if not measured: such measures are then no candidates.
      states_test: Cost of an exit test of states; None if not measured: such measures are then no candidates.
      classifier_test: Cost of a test of the exit classifier; None if not measured: it is then no candidate.
    """

    unit: Annotated[str, OneOf(tuple(dict.fromkeys(UNITS.values())))]
    batch: Positive | None = None
    device: Text | None = None
    cores: Positive | None = None
    engine: EngineRecord | None = None
    layer: Cost
    skipped: Cost
    output: Cost
    logits_test: Cost | None = None
    states_test: Cost | None = None
    classifier_test: Cost | None = None

    @property
    def was_measured(self) -> bool:
        """Whether the cost was measured on a machine."""
        return self.device is not None


@dataclass(frozen=True, kw_only=True)
class SpeedRecord(Record):
    """The measured speed of a promised threshold, in turns with the full model, on the machine that calibrated.

    Attributes:
      calibrations: Indices of the promises that it is about, which are decoded alike, counted from 0.
      factor: Seconds of the full model divided by those of the threshold, for the same prompts.
      standard_error: Standard error of the factor over samples of prompts; None if there was a single part.
      prompts: Number of prompts that both have decoded.
      batch: Number of prompts decoded together.
      seconds: Mean time of a prompt.
      full_seconds: Mean time of a prompt by the full model.
      device: JAX's name of the kind of device.
      cores: Number of cores that the process might use.
      engine: The engine that decoded.
    """

    calibrations: tuple[Count, ...]
    factor: Annotated[float, Number(0, above=True)]
    standard_error: Cost | None = None
    prompts: Positive
    batch: Positive
    seconds: Cost
    full_seconds: Cost
    device: Text
    cores: Positive
    engine: EngineRecord


def check_speeds(speeds: tuple[SpeedRecord, ...], exits: Collection[int]) -> None:
    """Refuses speeds of promises that do not exist, or for which nothing was found safe.

    Args:
      speeds: Speeds of a manifest.
      exits: Indices of the promises that exit, or would if it paid.

    Raises:
      ManifestError: If a speed is of another promise.
    """
    for index, speed in enumerate(speeds):
        wrong = next((place for place in speed.calibrations if place not in exits), None)
        if wrong is not None:
            raise ManifestError(
                f"speeds[{index}].calibrations must be places of entries that accepted one, got {shown(wrong)}"
            )
