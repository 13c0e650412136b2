"""Whether what is about to be served is what a manifest is about. If not, its threshold promises nothing."""

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.recorded import recorded_settings
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.manifest import Calibration, Manifest, ManifestError
from calm_beam.vocabulary import Vocabulary


def agreed_settings(
    manifest: Manifest, entry: Calibration, checkpoint: Checkpoint, vocabulary: Vocabulary | None
) -> DecodeSettings:
    """Returns how to decode, having found that model and vocabulary are those that were calibrated.

    Args:
      manifest: The manifest.
      entry: Its entry that is to be served.
      checkpoint: The model.
      vocabulary: Its vocabulary; None where there is none.

    Returns:
      The settings, with the thresholds that the entry tested.

    Raises:
      ManifestError: If model or vocabulary are others, outputs were computed in another type, or they follow a rule
        that no decoder which skips layers can follow.
    """
    _check_model(manifest, checkpoint)
    _check_vocabulary(manifest, vocabulary, checkpoint)
    try:
        settings = recorded_settings(manifest.decode, [step.threshold for step in entry.path])
    except ValueError as error:
        raise ManifestError(f"{error} It cannot be served here.") from error
    if settings.rule.needs_full_model():
        raise ManifestError(
            f"the manifest is of confidence {settings.rule.confidence} and state_propagation "
            f"{settings.rule.state_propagation}, which need every layer for every token: it tells what could be had at "
            "best, and can be served by nobody. Calibrate with another rule."
        )
    return settings


def _check_model(manifest: Manifest, checkpoint: Checkpoint) -> None:
    found, layers = checkpoint.fingerprint(), checkpoint.config.num_decoder_layers
    if found != manifest.model.fingerprint:
        raise ManifestError(
            f"the manifest is about a model with fingerprint {manifest.model.fingerprint} (from {manifest.model.uri}), "
            f"the model to serve, {checkpoint.uri}, has {found}. Thresholds hold for no other model: serve that one, "
            "or calibrate this one."
        )
    if layers != manifest.model.layers:
        raise ManifestError(
            f"the manifest says that the model has {manifest.model.layers} decoder layers, but it has {layers}."
        )


def _check_vocabulary(manifest: Manifest, vocabulary: Vocabulary | None, checkpoint: Checkpoint) -> None:
    if manifest.vocabulary is None:
        if vocabulary is not None:
            raise ManifestError("the manifest is about token ids, without a vocabulary: leave it out.")
        return
    if vocabulary is None:
        raise ManifestError(
            f"the manifest is about outputs as text, and there is no vocabulary in or beside {checkpoint.uri}: say "
            "where its sentencepiece.model is."
        )
    expected = (manifest.vocabulary.fingerprint, manifest.vocabulary.extra_ids)
    if (vocabulary.fingerprint, vocabulary.extra_ids) != expected:
        raise ManifestError(
            f"the manifest is about a vocabulary with fingerprint {expected[0]} and {expected[1]} extra ids, the one "
            f"to serve has {vocabulary.fingerprint} and {vocabulary.extra_ids}: the same text would be other tokens."
        )
    if vocabulary.size > checkpoint.config.vocab_size:
        raise ManifestError(
            f"the vocabulary has {vocabulary.size} ids, the model's output head {checkpoint.config.vocab_size}: they "
            "do not belong together."
        )
