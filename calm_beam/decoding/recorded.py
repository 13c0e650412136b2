"""How a manifest says that its model decodes, as settings to decode by."""

import dataclasses
from collections.abc import Sequence

from calm_beam.arithmetic import Precision
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import DecodeRecord, Variant

from .settings import DecodeSettings


def recorded_settings(decode: DecodeRecord, thresholds: Sequence[float]) -> DecodeSettings:
    """Returns the settings that give the outputs which were calibrated.

    Args:
      decode: Of the manifest.
      thresholds: Those to decode at, strictly descending.

    Raises:
      ValueError: If the outputs were computed in a type that is none of ours, or nothing decodes in that way.
    """
    return DecodeSettings(
        rule=recorded_rule(decode),
        thresholds=tuple(thresholds),
        max_input_length=decode.max_input_length,
        max_decode_length=decode.max_decode_length,
        task_prefix=decode.task_prefix,
        precision=recorded_arithmetic(decode),
        engine=decode.engine,
    )


def recorded_rule(decode: DecodeRecord) -> ExitRule:
    """Returns how tokens exit by a manifest; of one of its entries, if `decode` is that of the entry (`decode_of`)."""
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


def recorded_arithmetic(decode: DecodeRecord) -> Precision:
    """Returns in which numbers a manifest says that its model computes.

    Raises:
      ValueError: If that is none of ours.
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
