"""The settings that can change a generated token, and how a manifest records them."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol, Self

from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import descending_grid
from calm_beam.manifest import DecodeRecord, EngineRecord, Variant
from calm_beam.model.architecture import ModelConfig
from calm_beam.model.registry import USUAL_INPUT_LENGTH, architecture_of
from calm_beam.precision import FLOAT32, Precision


class AskedOutputs(Protocol):
    """The settings of outputs other than the exit rule and its thresholds."""

    @property
    def max_input_length(self) -> int | None:
        """Most tokens of a prompt; None for the usual number."""
        ...

    @property
    def max_decode_length(self) -> int:
        """Most tokens of an output."""
        ...

    @property
    def task_prefix(self) -> str:
        """Text before every textual prompt."""
        ...

    @property
    def precision(self) -> Precision:
        """Precision in which the model computes."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """The settings that determine an output, together with model, vocabulary and prompt.

    Attributes:
      rule: How exits are decided.
      thresholds: Exit thresholds, distinct, strictly descending, in [0, 1].
      max_input_length: Most tokens of a prompt, eos included; longer prompts are cut.
      max_decode_length: Most tokens of an output, eos included; also N of a decaying schedule.
      task_prefix: Text before every textual prompt.
      precision: Precision in which the model computes: rounding moves exits.
      engine: The engine that computes, as `engine_choice` chooses it: engines round differently. None if not recorded.
    """

    rule: ExitRule
    thresholds: tuple[float, ...]
    max_input_length: int
    max_decode_length: int
    task_prefix: str = ""
    precision: Precision = FLOAT32
    engine: EngineRecord | None = None

    def __post_init__(self) -> None:
        grid = descending_grid(self.thresholds)
        if tuple(self.thresholds) != grid:
            raise ValueError(f"thresholds must be strictly descending, got {self.thresholds}.")
        # Store plain floats, so that 1 and 1.0 are one grid with one fingerprint.
        object.__setattr__(self, "thresholds", grid)
        check_sizes(max_input_length=self.max_input_length, max_decode_length=self.max_decode_length)
        try:
            self.task_prefix.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"task_prefix must be text that UTF-8 can hold, got {self.task_prefix!a:.80}.") from error

    @classmethod
    def of(cls, asked: AskedOutputs, rule: ExitRule, *, thresholds: tuple[float, ...]) -> Self:
        """Returns the settings of the requested outputs, by a rule and at thresholds.

        Raises:
          ValueError: If a value or a combination of values is invalid.
        """
        return cls(
            rule=rule,
            thresholds=thresholds,
            max_input_length=asked.max_input_length or USUAL_INPUT_LENGTH,
            max_decode_length=asked.max_decode_length,
            task_prefix=asked.task_prefix,
            precision=asked.precision,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; defaults of newer fields are omitted, so old fingerprints stay valid."""
        content = dataclasses.asdict(self)
        del content["precision"], content["engine"]
        if self.engine is not None:
            content["engine"] = self.engine.to_dict()
        if self.precision != FLOAT32:
            content["arithmetic"] = dataclasses.asdict(self.precision)
        for name in ("patience", "confidence_source"):
            if content["rule"][name] is None:
                del content["rule"][name]
        return content

    def fingerprint(self, *, model: str, vocabulary: str | None) -> str:
        """Returns 24 hexadecimal digits that name the outputs of a model under these settings.

        Args:
          model: The model's fingerprint.
          vocabulary: The vocabulary's fingerprint, or None for token ids.
        """
        content = json.dumps([self.to_dict(), self.precision.dtype, model, vocabulary], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def check_sizes(**sizes: int | None) -> None:
    """Checks that sizes, given by name, are at least 1; None is a size that is chosen later.

    Raises:
      ValueError: If one is below 1; the message has its name.
    """
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")


def check_decodable(
    config: ModelConfig,
    rules: Sequence[ExitRule],
    *,
    max_decode_length: int,
    max_input_length: int,
    **sizes: int | None,
) -> None:
    """Checks that a model can be decoded by some exit rules, at some sizes of prompts and outputs.

    Args:
      config: Sizes of the model.
      rules: How exits are decided.
      max_decode_length: Most tokens of an output.
      max_input_length: Most tokens of a prompt.
      **sizes: Other sizes, as `check_sizes` takes them.

    Raises:
      ValueError: If a size is below 1, the model has too few positions, or a rule does not fit it (no exit classifier,
        `min_exit_layer` too high).
    """
    check_sizes(max_decode_length=max_decode_length, max_input_length=max_input_length, **sizes)
    architecture_of(config).check_positions(config, source=max_input_length, steps=max_decode_length)
    for rule in rules:
        rule.check_model(config.num_decoder_layers, has_classifier=bool(config.exit_classifier))


def recorded_settings(decode: DecodeRecord, thresholds: Sequence[float]) -> DecodeSettings:
    """Returns the settings that reproduce the calibrated outputs.

    Args:
      decode: The manifest's record of decoding.
      thresholds: Thresholds to decode at, strictly descending.

    Raises:
      ValueError: If the outputs were computed in an unknown precision, or by unknown settings.
    """
    return DecodeSettings(
        rule=recorded_rule(decode),
        thresholds=tuple(thresholds),
        max_input_length=decode.max_input_length,
        max_decode_length=decode.max_decode_length,
        task_prefix=decode.task_prefix,
        precision=recorded_precision(decode),
        engine=decode.engine,
    )


def recorded_rule(decode: DecodeRecord) -> ExitRule:
    """Returns the exit rule that a manifest records, or one of its entries if `decode` is the entry's (`decode_of`)."""
    return ExitRule(
        confidence=decode.confidence,
        schedule=decode.schedule,
        tau=decode.tau,
        state_propagation=decode.state_propagation,
        min_exit_layer=decode.min_exit_layer,
        exit_interval=decode.exit_interval,
        patience=decode.patience,
        confidence_source=decode.confidence_source,
    )


def recorded_precision(decode: DecodeRecord) -> Precision:
    """Returns the precision that a manifest records.

    Raises:
      ValueError: If the precision is unknown.
    """
    try:
        return Precision.of(decode.dtype, decode.matmul_precision)
    except ValueError as error:
        raise ValueError(f"the manifest was made in another precision than there is here: {error}") from error


def settings_of_variant(settings: DecodeSettings, variant: Variant) -> DecodeSettings:
    """Returns settings with the exit rule of a variant.

    Raises:
      ValueError: If the schedule has no temperature and the variant has one, or conversely; or if the measure takes no
        schedule.
    """
    rule = dataclasses.replace(settings.rule, **variant.fields_of_rule())
    return dataclasses.replace(settings, rule=rule)
