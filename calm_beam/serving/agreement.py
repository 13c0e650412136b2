"""Whether a model and a vocabulary are those that a manifest, or stored generations, are about.

If they are not, a threshold promises nothing. Whoever holds a model against a manifest does it here, so that
`Generator`, `generate`, `inspect`, `verify`, `report` and `evaluate` never disagree.
"""

import os

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.recorded import recorded_settings
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.measures import Need, check_named
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, open_recorded
from calm_beam.manifest import Calibration, Manifest, ManifestError, ModelRecord, VocabularyRecord


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
    """Returns how an entry is decoded, having found all that can be found without the model.

    Args:
      manifest: As in `agreed_settings`.
      entry: As there.
      confidence: As there.

    Raises:
      ManifestError: If outputs were computed in a type, or by a rule, that no decoder which skips layers can follow.
      MeasureError: As there.
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
      checkpoint: The model at hand.
      of: What says so, for messages.

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
      checkpoint: The model at hand.
      path: Where the user says that the vocabulary is; None looks in and beside the checkpoint, if one is recorded.

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
      vocabulary: The one at hand; None if there is none.
      checkpoint: The model at hand, if it is.
      of: What says so, for messages.

    Raises:
      ManifestError: If it is another one, there is none, or there should be none.
    """
    if record is None:
        if vocabulary is not None:
            raise ManifestError(f"{of} is about token ids, without a vocabulary: leave the vocabulary out.")
        return
    if vocabulary is None:
        where = "" if checkpoint is None else f" in or beside {checkpoint.uri}"
        raise ManifestError(
            f"{of} is about outputs as text, and there is no vocabulary{where}: say where its sentencepiece.model, or "
            "its tokenizer.json, is."
        )
    if (vocabulary.fingerprint, vocabulary.extra_ids) != (record.fingerprint, record.extra_ids):
        raise ManifestError(
            f"{of} is about a vocabulary with fingerprint {record.fingerprint} and {record.extra_ids} extra ids, the "
            f"one at hand has {vocabulary.fingerprint} and {vocabulary.extra_ids}: the same text would be other tokens."
        )
    if vocabulary.chat != record.chat:
        raise ManifestError(f"{of} is about prompts that another chat template made, or another system prompt.")
    if checkpoint is not None and vocabulary.size > checkpoint.config.vocab_size:
        raise ManifestError(
            f"the vocabulary has {vocabulary.size} ids, the model's output head {checkpoint.config.vocab_size}: they "
            "do not belong together."
        )
