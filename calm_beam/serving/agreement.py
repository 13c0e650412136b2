"""Whether a model, a vocabulary and an engine are those that a manifest, or stored generations, are about.

If they are not, a threshold promises nothing. All comparisons of a model with a manifest are here, so that
`Generator`, `generate`, `inspect`, `verify`, `report` and `evaluate` never disagree. Which engine serves a manifest is
chosen here too.
"""

import dataclasses
import os
from typing import Any

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.engine_choice import Machine, asked_like, chosen_engine, single_prompt_engine
from calm_beam.decoding.settings import DecodeSettings, recorded_settings
from calm_beam.exits.measures import Need, check_named
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, open_recorded
from calm_beam.manifest import Calibration, EngineRecord, Manifest, ManifestError, ModelRecord, VocabularyRecord
from calm_beam.model import ModelConfig
from calm_beam.model.native import library
from calm_beam.risk.counts import differing_upper, epsilon_elsewhere


def agreed_settings(
    manifest: Manifest,
    entry: Calibration,
    *,
    checkpoint: Checkpoint,
    vocabulary: Vocabulary | None,
    confidence: str | None = None,
) -> DecodeSettings:
    """Returns how to decode, having found that model and vocabulary are those that were calibrated.

    Args:
      manifest: The manifest.
      entry: Its entry that is to be served.
      checkpoint: The model.
      vocabulary: Its vocabulary; None where there is none.
      confidence: The measure, which the caller has to name if it is code of the user's.

    Returns:
      The settings, by the entry's own variant if it has one, with the thresholds that it tested.

    Raises:
      ManifestError: If model or vocabulary are others, outputs were computed in another type, or they follow a rule
        that no decoder which skips layers can follow.
      MeasureError: If the caller named another confidence measure, or none where it is code of the user's.
    """
    settings = servable_settings(manifest, entry, confidence=confidence)
    check_model(manifest.model, checkpoint)
    check_vocabulary(manifest.vocabulary, vocabulary, checkpoint=checkpoint)
    if settings.rule.measure().needs is Need.CLASSIFIER and not checkpoint.config.exit_classifier:
        raise ManifestError(
            f"the manifest is of confidence {settings.rule.confidence!r}, which needs decoder/meta_cls in the "
            f"checkpoint; {checkpoint.uri} has none."
        )
    return settings


def servable_settings(manifest: Manifest, entry: Calibration, *, confidence: str | None = None) -> DecodeSettings:
    """Returns how an entry is decoded, after all checks that need no model.

    Args:
      manifest: The manifest to serve.
      entry: The entry of it to serve.
      confidence: The confidence measure, which the caller has to name if it is user code.

    Raises:
      ManifestError: If outputs were computed in a type, or by a rule, that no decoder which skips layers can follow.
      MeasureError: If `confidence` is another measure than the manifest's, or None and the manifest's is user code.
    """
    check_named(manifest.decode.confidence, confidence)
    tested = {step.threshold for step in entry.path}
    try:
        settings = recorded_settings(manifest.decode_of(entry), sorted(tested, reverse=True))
    except ValueError as error:
        raise ManifestError(f"{error} It cannot be served here.") from error
    if settings.rule.needs_full_model():
        raise ManifestError(
            f"the manifest is of confidence {settings.rule.confidence} and state_propagation "
            f"{settings.rule.state_propagation}, which need every layer for every token: it shows what is possible at "
            "best, and cannot be served. Calibrate with another rule."
        )
    return settings


def check_model(model: ModelRecord, checkpoint: Checkpoint, *, of: str = "the manifest") -> None:
    """Refuses a model that is not the recorded one.

    Args:
      model: What a manifest, or generations, say of their model.
      checkpoint: The loaded model.
      of: Source of the record, for messages.

    Raises:
      ManifestError: If it is another one.
    """
    found, layers = checkpoint.fingerprint(), checkpoint.config.num_decoder_layers
    if found != model.fingerprint:
        raise ManifestError(
            f"{of} is about a model with fingerprint {model.fingerprint} (from {model.uri}), the one in "
            f"{checkpoint.uri} has {found}. Thresholds hold for no other model: take that one, or calibrate this one."
            f"{''.join(f' {sentence}' for sentence in checkpoint.assumed)}"
        )
    if layers != model.layers:
        raise ManifestError(f"{of} says that the model has {model.layers} decoder layers, but it has {layers}.")


def recorded_vocabulary(
    record: VocabularyRecord | None, checkpoint: Checkpoint, *, path: str | os.PathLike[str] | None
) -> Vocabulary | None:
    """Returns the vocabulary to hold against a record, with the sentinels and chat that it says; None if there is none.

    Args:
      record: What a manifest, or generations, say of their vocabulary; None where they have none.
      checkpoint: The loaded model.
      path: The user's path of the vocabulary; None looks in and next to the checkpoint, if one is recorded.

    Raises:
      VocabularyError: If it cannot be read.
    """
    if path is None and record is not None:
        path = checkpoint.vocabulary_path
    return None if path is None else open_recorded(path, record)


def check_vocabulary(
    record: VocabularyRecord | None,
    vocabulary: Vocabulary | None,
    *,
    checkpoint: Checkpoint | None,
    of: str = "the manifest",
) -> None:
    """Refuses a vocabulary that is not the recorded one.

    Args:
      record: What a manifest, or generations, say of their vocabulary; None where they have none.
      vocabulary: The loaded vocabulary; None if there is none.
      checkpoint: The loaded model, if there is one.
      of: Source of the record, for messages.

    Raises:
      ManifestError: If it is another one, there is none, or there should be none.
    """
    if record is None:
        if vocabulary is not None:
            raise ManifestError(f"{of} is about token ids, without a vocabulary: leave the vocabulary out.")
        return
    if vocabulary is None:
        where = "" if checkpoint is None else f" in or next to {checkpoint.uri}"
        raise ManifestError(
            f"{of} is about outputs as text, and there is no vocabulary{where}: say where its sentencepiece.model, or "
            "its tokenizer.json, is."
        )
    if (vocabulary.fingerprint, vocabulary.extra_ids) != (record.fingerprint, record.extra_ids):
        raise ManifestError(
            f"{of} is about a vocabulary with fingerprint {record.fingerprint} and {record.extra_ids} extra ids, the "
            f"one given has {vocabulary.fingerprint} and {vocabulary.extra_ids}: the same text would be other tokens."
        )
    if vocabulary.chat != record.chat:
        raise ManifestError(f"{of} is about prompts that another chat template made, or another system prompt.")
    if vocabulary.record().stop_strings != record.stop_strings:
        raise ManifestError(f"{of} is about outputs that other stop strings have ended.")
    if checkpoint is not None and vocabulary.size > checkpoint.config.vocab_size:
        raise ManifestError(
            f"the vocabulary has {vocabulary.size} ids, the model's output head {checkpoint.config.vocab_size}: they "
            "do not belong together."
        )


# Usual size of a comparison of two engines in which no output differed.
_COMPARED_PROMPTS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedEngine:
    """The engine that serves a manifest.

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
    single = single_prompt_engine(**asked, **given)
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
            "of calm-beam wrote it. Calibrate again, or leave exact_engine out."
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
    is_here = calibrated.instructions in library.instruction_sets_here()
    if calibrated.name != "native" or calibrated.is_gone or not is_here:
        return ""
    return f"Set {library.VARIABLE}={calibrated.instructions}, which this processor has"


_ONE_BY_ONE = (
    "Only single prompts are decoded so, batches are not: pass exact_engine=True (--exact_engine) to decode single "
    "prompts by what was calibrated too"
)


def other_engine_in_words(
    manifest: Manifest, entry: Calibration, *, served: EngineRecord, batch: EngineRecord | None = None
) -> str:
    """Returns what another engine leaves of a promise, or one that is not known to be batch-invariant.

    There is no message if neither is known to serve.

    Args:
      manifest: What was promised.
      entry: Of it.
      served: What serves.
      batch: What decodes batches, if `served` is what decodes single prompts.
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
    remedy = ""
    if batch is not None and not _rounds_otherwise(batch, calibrated):
        remedy = f" {_ONE_BY_ONE}."
    elif way := _way_there(calibrated):
        remedy = f" {way}, to serve by what was calibrated."
    return (
        f"{served.in_words()} serves{cause}: outputs differ at near ties. The "
        "risk as served is at most that of the calibration plus q, the share of prompts whose output differs. q is "
        f"not known here; even where 0 of {_COMPARED_PROMPTS:,} prompts differ it may be {q:.1%} (at 95 %){example}."
        f"{remedy}"
    )
