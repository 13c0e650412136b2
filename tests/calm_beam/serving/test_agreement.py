"""Serving refuses any difference from the calibration with a clear message."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import ManifestError, VocabularyRecord, content_digest
from calm_beam.serving import Generator
from tests.builders import build_checkpoint, build_config, train_vocabulary
from tests.calm_beam.serving.builders import build_served_manifest
from tests.pipelines import CONFIG, write_vocabulary

_CHECKPOINT = build_checkpoint(CONFIG)


@pytest.fixture(scope="module")
def vocabulary_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The file of a small vocabulary."""
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "v.model")


def test_another_model_is_refused() -> None:
    """A single other weight makes another model, and the message names both fingerprints."""
    other = build_checkpoint(CONFIG, seed=1)
    expected, found = _CHECKPOINT.fingerprint(), other.fingerprint()
    with pytest.raises(
        ManifestError,
        match=rf"fingerprint {expected} \(from /models/tiny\), the one in /nowhere has {found}. Thresholds hold for "
        "no other model: take that one, or calibrate this one.",
    ):
        Generator.from_manifest(build_served_manifest(_CHECKPOINT), other)


def test_another_depth_is_refused() -> None:
    """A manifest with a wrong depth is refused, though the fingerprint is right."""
    manifest = build_served_manifest(_CHECKPOINT)
    manifest = dataclasses.replace(manifest, model=dataclasses.replace(manifest.model, layers=5))
    with pytest.raises(ManifestError, match="says that the model has 5 decoder layers, but it has 4"):
        Generator.from_manifest(manifest, _CHECKPOINT)


def test_another_vocabulary_is_refused(vocabulary_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Another vocabulary file, other sentinels, a missing vocabulary and an unexpected one are refused."""
    vocabulary = Vocabulary(vocabulary_path)
    manifest = build_served_manifest(_CHECKPOINT, vocabulary=vocabulary)
    other = train_vocabulary(tmp_path / "other.model", size=45)
    with pytest.raises(ManifestError, match=f"fingerprint {vocabulary.fingerprint} and 0 extra ids, the one given"):
        Generator.from_manifest(manifest, _CHECKPOINT, vocabulary=other)
    with pytest.raises(ManifestError, match=r"no vocabulary in or next to /nowhere: say where its sentencepiece.model"):
        Generator.from_manifest(manifest, _CHECKPOINT)
    with pytest.raises(ManifestError, match="is about token ids, without a vocabulary: leave the vocabulary out"):
        Generator.from_manifest(build_served_manifest(_CHECKPOINT), _CHECKPOINT, vocabulary=vocabulary_path)


def test_a_vocabulary_beyond_the_head_is_refused(vocabulary_path: pathlib.Path) -> None:
    """A vocabulary with ids that the model lacks is refused."""
    small = build_checkpoint(build_config(vocab_size=41))
    vocabulary = Vocabulary(vocabulary_path)
    manifest = build_served_manifest(small, vocabulary=vocabulary)
    record = VocabularyRecord(fingerprint=vocabulary.fingerprint, extra_ids=2)
    with pytest.raises(ManifestError, match="the vocabulary has 42 ids, the model's output head 41"):
        Generator.from_manifest(dataclasses.replace(manifest, vocabulary=record), small, vocabulary=vocabulary_path)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (
            {"dtype": "float16"},
            "made in another precision than there is here: dtype must be one of float32,",
        ),
        (
            {"matmul_precision": "low"},
            "matmul_precision must be one of highest, high, default; got 'low'. It",
        ),
        ({"confidence": "oracle"}, "is of confidence oracle and state_propagation from_exit, which need every layer"),
        ({"state_propagation": "full_cache"}, "state_propagation full_cache, which need every layer for every token"),
        ({"tau": 2.0}, "tau must not be given with schedule 'constant', got 2.0. It cannot be served here."),
    ],
)
def test_what_cannot_be_served_alike_is_refused(decode: dict[str, Any], message: str) -> None:
    """Another precision, and rules that need every layer for every token, are refused."""
    with pytest.raises(ManifestError, match=message):
        Generator.from_manifest(build_served_manifest(_CHECKPOINT, decode=decode), _CHECKPOINT)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schedule", "linear", 'decode.schedule must be one of constant, decay, decay_t5x, got "linear"'),
        ("state_propagation", "from_best", "decode.state_propagation must be one of from_exit, from_first_exit"),
        ("token_from", "last_layer", "decode.token_from is not a key of a manifest"),
        ("beam_size", 4, "decode.beam_size is not a key of a manifest"),
    ],
)
def test_words_that_are_not_known_are_refused(tmp_path: pathlib.Path, key: str, value: object, message: str) -> None:
    """A manifest of a later writer, with semantics that this decoder lacks, is refused."""
    content: Any = build_served_manifest(_CHECKPOINT).to_dict()
    content["decode"][key] = value
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**content, "digest": content_digest(content)}))
    with pytest.raises(ManifestError, match=message):
        Generator.from_manifest(path, _CHECKPOINT)


def test_a_model_without_an_exit_classifier_is_refused() -> None:
    """A manifest whose confidence is a classifier is refused for a model without one."""
    bare = build_checkpoint(build_config())
    manifest = build_served_manifest(bare, rule=ExitRule(confidence="classifier"))
    with pytest.raises(
        ValueError, match="is of confidence 'classifier', which needs decoder/meta_cls in the checkpoint"
    ):
        Generator.from_manifest(manifest, bare)
