"""The Flax model against plain numpy, under JAX's strictest settings."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.model import EarlyExitT5, T5Config
from calm_beam.precision import FLOAT32, Precision
from tests.builders import build_checkpoint, build_config
from tests.numpy_t5 import NumpyT5

_BFLOAT16 = Precision(dtype="bfloat16")

pytestmark = pytest.mark.usefixtures("strict_promotion")

_SOURCES = ([9, 33, 4, 60, 12, 1], [5, 1], [2, 2, 7, 1])
_TARGETS = ([0, 14, 8, 8, 63], [0, 3, 0, 21, 40], [0, 1, 2, 3, 4])


_KINDS: dict[str, dict[str, Any]] = {
    "1.1": {},
    "tied": {"tied_head": True},
    "1.0": {"tied_head": True, "gated_mlp": False},
    "scalable": {"relative_bias_per_layer": True, "activation": "silu"},
    "exit norms": {"tied_head": True, "exit_norms": True},
    "exit heads": {"tied_head": True, "exit_heads": True},
}


@pytest.fixture(params=list(_KINDS.values()), ids=list(_KINDS))
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    """Gives a T5 1.1, one with a tied head, an original T5, one of `scalable_t5`, and one with exit norms and heads."""
    return build_checkpoint(build_config(exit_classifier=2, **request.param), seed=3)


@functools.cache
def _compiled(config: T5Config, method: str, precision: Precision) -> Callable[..., jax.Array]:
    # Compiled as a whole, since JAX would compile every operation for every shape.
    return jax.jit(functools.partial(EarlyExitT5(config, precision=precision).apply, method=method))


def _apply(
    checkpoint: Checkpoint, method: str, *arrays: np.ndarray | jax.Array, precision: Precision = FLOAT32
) -> jax.Array:
    return _compiled(checkpoint.config, method, precision)({"params": checkpoint.parameters(precision)}, *arrays)


def _logits(checkpoint: Checkpoint, states: jax.Array, precision: Precision) -> jax.Array:
    """Returns the logits of each layer's head, (layers, batch, target, vocabulary)."""
    apply = functools.partial(EarlyExitT5(checkpoint.config, precision=precision).apply, method="head")
    parameters = {"params": checkpoint.parameters(precision)}
    made = [apply(parameters, state, layer) for layer, state in enumerate(states, start=1)]
    return jnp.stack([jnp.asarray(logits) for logits in made])


def _padded(sources: tuple[list[int], ...] = _SOURCES, *, width: int = 8) -> np.ndarray:
    return np.array([[*source, *[0] * (width - len(source))] for source in sources], np.int32)


def _assert_close(found: jax.Array, expected: np.ndarray) -> None:
    """Asserts equality within 1e-5 of the largest value, the accuracy of float32."""
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def _assert_rounded_alike(found: jax.Array, expected: np.ndarray) -> None:
    """Asserts that nearly all values are the same bfloat16 numbers, and the others near, as a sum may be near a tie."""
    assert found.dtype == jnp.bfloat16
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert np.median(error) == 0
    assert error.max() < np.abs(expected).max() * 2**-7


def test_in_bfloat16_everything_is_rounded_where_numpy_rounds(checkpoint: Checkpoint) -> None:
    """In bfloat16, states are float64's with factors and states rounded; logits and scores are their float32 sums."""
    targets, apply = np.array(_TARGETS, np.int32), functools.partial(_apply, precision=_BFLOAT16)
    plain = NumpyT5(checkpoint.config, checkpoint.arrays, "bfloat16")
    encoded = apply(checkpoint, "encode", _padded())
    states = apply(checkpoint, "decode_teacher_forced", _padded(), targets)
    logits, scores = _logits(checkpoint, states, _BFLOAT16), apply(checkpoint, "exit_score", states)
    for row, (source, target) in enumerate(zip(_SOURCES, _TARGETS, strict=True)):
        _assert_rounded_alike(encoded[row, : len(source)], plain.encode(source))
        _assert_rounded_alike(states[:, row], plain.teacher_forced(source, target))
        exact = np.asarray(states[:, row], np.float64)
        _assert_close(scores[:, row], plain.exit_score(exact))
        # Norms are rounded, and float32's may be near a tie.
        np.testing.assert_allclose(
            logits[:, row], plain.logits_of_layers(exact), rtol=0, atol=2**-7 * np.abs(logits).max()
        )
        assert np.median(np.abs(logits[:, row] - plain.logits_of_layers(exact))) < 1e-5


def test_the_encoder_equals_numpy(checkpoint: Checkpoint) -> None:
    """At every real position of a padded batch the encoder gives numpy's result for the prompt alone."""
    encoded = _apply(checkpoint, "encode", _padded())
    plain = NumpyT5(checkpoint.config, checkpoint.arrays)
    for row, source in enumerate(_SOURCES):
        _assert_close(encoded[row, : len(source)], plain.encode(source))


def test_the_decoder_equals_numpy(checkpoint: Checkpoint) -> None:
    """States, logits and classifier scores of every layer and position equal numpy's."""
    targets = np.array(_TARGETS, np.int32)
    states = _apply(checkpoint, "decode_teacher_forced", _padded(), targets)
    logits = _apply(checkpoint, "__call__", _padded(), targets)
    scores = _apply(checkpoint, "exit_score", states)
    plain = NumpyT5(checkpoint.config, checkpoint.arrays)
    assert states.shape == (4, 3, 5, 16)
    assert logits.shape == (4, 3, 5, 64)
    for row, (source, target) in enumerate(zip(_SOURCES, _TARGETS, strict=True)):
        expected = plain.teacher_forced(source, target)
        _assert_close(states[:, row], expected)
        _assert_close(logits[:, row], plain.logits_of_layers(expected))
        _assert_close(scores[:, row], plain.exit_score(expected))


def test_padding_does_not_change_a_row(checkpoint: Checkpoint) -> None:
    """Wider padding, and other rows in the batch, do not change a prompt's states."""
    states = _apply(checkpoint, "decode_teacher_forced", _padded(), np.array(_TARGETS, np.int32))
    narrow = _padded()[1:2, :2]
    assert narrow.all()
    _assert_close(
        _apply(checkpoint, "decode_teacher_forced", narrow, np.array(_TARGETS[1:2], np.int32)),
        np.asarray(states[:, 1:2]),
    )


def test_later_inputs_do_not_change_earlier_states(checkpoint: Checkpoint) -> None:
    """Later inputs do not change earlier states."""
    targets = np.array(_TARGETS, np.int32)
    changed = targets.copy()
    changed[:, 3:] = 50
    before = _apply(checkpoint, "decode_teacher_forced", _padded(), targets)
    after = _apply(checkpoint, "decode_teacher_forced", _padded(), changed)
    np.testing.assert_array_equal(before[:, :, :3], after[:, :, :3])
    assert np.abs(before[:, :, 3:] - after[:, :, 3:]).max() > 0.1
