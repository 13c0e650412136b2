"""Which engine serves a manifest, and whether it is the one that was calibrated."""

import dataclasses
from typing import Any

from calm_beam.decoding.engine_choice import Machine, asked_like, chosen_engine
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.manifest import Calibration, EngineRecord, Manifest, ManifestError
from calm_beam.model import ModelConfig
from calm_beam.model.native import library
from calm_beam.risk.counts import differing_upper, epsilon_elsewhere

# What a comparison of two engines usually has, in which no output differed.
_COMPARED_PROMPTS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedEngine:
    """What serves a manifest.

    Attributes:
      calibrated: What the promise is about; None where the manifest does not say.
      batch: What decodes batches.
      single: What decodes a prompt by itself.
      asked: What decoders are asked for, by their arguments `engine` and `exit_head`.
    """

    calibrated: EngineRecord | None
    batch: EngineRecord
    single: EngineRecord
    asked: dict[str, Any]

    def is_other(self, served: EngineRecord) -> bool:
        """Returns whether an engine is known to round otherwise than what was calibrated."""
        return self.calibrated is not None and _rounds_otherwise(served, self.calibrated)


def served_engine(
    manifest: Manifest,
    settings: DecodeSettings,
    *,
    config: ModelConfig,
    engine: str,
    exit_head: str,
    machine: Machine | None,
    model_parallelism: int = 1,
) -> ServedEngine:
    """Returns what serves a manifest.

    Args:
      manifest: What was promised.
      settings: How it decodes.
      config: Of the model.
      engine: One of `ENGINE_CHOICES`. `auto` takes what was calibrated where the machine has it, and else what
        `chosen_engine` takes.
      exit_head: One of `EXIT_HEADS`; `auto` likewise.
      machine: As in `chosen_engine`.
      model_parallelism: Devices that share one model.

    Raises:
      UsageError: As `chosen_engine`.
    """
    calibrated = manifest.engine
    given: dict[str, Any] = {
        "config": config,
        "rule": settings.rule,
        "precision": settings.precision,
        "machine": machine,
        "model_parallelism": model_parallelism,
    }
    asked = asked_like(calibrated, engine=engine, exit_head=exit_head, **given)
    batch = chosen_engine(**asked, **given)
    single = chosen_engine(**asked, **given, in_loop=True)
    return ServedEngine(calibrated=calibrated, batch=batch, single=single, asked=asked)


def _rounds_otherwise(served: EngineRecord, calibrated: EngineRecord) -> bool:
    return served.is_unlike(calibrated) or not served.is_batch_invariant


def check_exact(served: EngineRecord, calibrated: EngineRecord | None) -> None:
    """Refuses an engine that rounds otherwise than what was calibrated.

    Raises:
      ManifestError: If it does, or the manifest does not say which was calibrated.
    """
    if calibrated is None:
        raise ManifestError(
            "exact_engine is asked for, but the manifest does not say which engine was calibrated: an earlier version "
            "of calm-beam wrote it. Calibrate anew, or leave exact_engine out."
        )
    if served.is_unlike(calibrated):
        raise ManifestError(
            f"exact_engine is asked for, but {served.in_words()} would serve, and {calibrated.in_words()} was "
            f"calibrated. {_way_there(calibrated) or 'Serve on a machine with the processor of the calibration'}, or "
            "calibrate by the engine that serves (--engine)."
        )
    if not served.is_batch_invariant:
        raise ManifestError(
            f"exact_engine is asked for, but {served.in_words()} would serve, and nobody has tested whether this kind "
            "of device rounds a prompt in the same way in a sweep and in a batch (benchmarks/across_devices.py tests "
            "it). Calibrate and serve on CPUs or on an H100, or leave exact_engine out."
        )


def _way_there(calibrated: EngineRecord) -> str:
    """Returns how this machine may serve by native code that was calibrated; empty if it cannot."""
    if calibrated.name != "native" or calibrated.instructions not in library.instruction_sets_here():
        return ""
    return f"Set {library.VARIABLE}={calibrated.instructions}, which this processor has"


def other_engine_in_words(manifest: Manifest, entry: Calibration, *, served: EngineRecord) -> str:
    """Returns what another engine leaves of a promise, or one that is not known to be batch-invariant.

    Nothing is said where neither is known to serve.

    Args:
      manifest: What was promised.
      entry: Of it.
      served: What serves.
    """
    calibrated = manifest.engine
    if calibrated is None or not _rounds_otherwise(served, calibrated):
        return ""
    step = entry.deciding
    q = differing_upper(0, _COMPARED_PROMPTS)
    example = ""
    if step is not None and step.n:
        found = epsilon_elsewhere(q, delta=entry.delta, epsilon=entry.promised_epsilon, n=step.n)
        if found > entry.promised_epsilon:
            example = (
                f", and then a promise may be broken with probability {found:.2g} instead of {entry.promised_epsilon:g}"
            )
    cause = f", but {calibrated.in_words()} was calibrated"
    if not served.is_unlike(calibrated):
        cause = ", as was calibrated, but it may round a prompt differently in a batch than in the sweep"
    return (
        f"{served.in_words()} serves{cause}: outputs differ at near ties. The "
        "risk as served is at most that of the calibration plus q, the share of prompts whose output differs. q is "
        f"not known here; even where 0 of {_COMPARED_PROMPTS:,} prompts differ it may be {q:.1%} (at 95 %){example}."
        + (f" {way}, to serve by what was calibrated." if (way := _way_there(calibrated)) else "")
    )
