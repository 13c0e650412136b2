"""A model is the same model in every layout: equal arrays, equal fingerprints, equal outputs."""

import pathlib
from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint, load_checkpoint, write_native, write_t5x
from tests.builders import build_arrays, build_config, train_vocabulary
from tests.builders import write_t5x as write_t5x_independently
from tests.calm_beam.checkpoints.outputs import GOLDENS, generate


def _assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    assert found.config == expected.config
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
    assert found.fingerprint() == expected.fingerprint()


def _assert_generates_the_same(found: Checkpoint, expected: Checkpoint) -> None:
    source = np.random.default_rng(0).integers(2, expected.config.vocab_size, size=(3, 9))
    for ours, theirs in zip(generate(found, source), generate(expected, source), strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.exit_layers, theirs.exit_layers)
        np.testing.assert_allclose(ours.confidences, theirs.confidences, rtol=0, atol=1e-5)


def _through_native_to_t5x(checkpoint: Checkpoint, folder: pathlib.Path) -> Checkpoint:
    """Writes a model in the native layout, reads it, writes it in T5X's, and returns the model read from there."""
    vocabulary = train_vocabulary(folder / "trained.model", size=30)
    write_native(folder / "native", checkpoint.config, arrays=checkpoint.arrays, vocabulary_path=vocabulary)
    native = load_checkpoint(folder / "native")
    assert native.layout == "native"
    _assert_same(native, checkpoint)
    write_t5x(folder / "t5x", native.config, arrays=native.arrays, step=3, vocabulary_path=native.vocabulary_path)
    last = load_checkpoint(folder / "t5x")
    assert (last.layout, last.step) == ("t5x", 3)
    assert last.vocabulary_path is not None
    assert last.vocabulary_path.read_bytes() == vocabulary.read_bytes()
    return last


@pytest.mark.parametrize("name", ["original", "t5_1_1"])
def test_from_hugging_face(name: str, tmp_path: pathlib.Path) -> None:
    """Hugging Face to native to T5X, of an original T5 and a T5 1.1, keeps arrays, fingerprint and outputs."""
    first = load_checkpoint(GOLDENS / name)
    last = _through_native_to_t5x(first, tmp_path)
    _assert_same(last, first)
    _assert_generates_the_same(last, first)


def test_from_t5x(tmp_path: pathlib.Path) -> None:
    """T5X to native to T5X keeps arrays, fingerprint and outputs."""
    arrays = load_checkpoint(GOLDENS / "t5_1_1").arrays
    write_t5x_independently(tmp_path, arrays)
    first = load_checkpoint(tmp_path)
    last = _through_native_to_t5x(first, tmp_path)
    _assert_same(last, first)
    _assert_generates_the_same(last, first)


@pytest.mark.parametrize(
    "exits", [{"exit_classifier": 1}, {"exit_classifier": 2}, {"exit_norms": True, "exit_heads": True}]
)
def test_what_exits_have_goes_along(exits: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """A model with an exit classifier, or with exit norms and heads, comes back with these from both layouts."""
    config = build_config(num_encoder_layers=1, num_decoder_layers=3, **exits)
    write_t5x_independently(tmp_path, build_arrays(config, 0))
    first = load_checkpoint(tmp_path)
    assert first.config == config
    _assert_same(_through_native_to_t5x(first, tmp_path), first)
