"""Confidence from the output distribution, against a sorted softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from calm_beam.exits.measures.built_in import softmax_gap, softmax_max


def _sorted_probabilities(logits: np.ndarray) -> np.ndarray:
    return np.sort(scipy.special.softmax(logits.astype(np.float64), axis=-1), axis=-1)


@pytest.mark.parametrize("scale", [0.01, 1, 5, 30])
def test_gap_and_maximum_equal_a_sorted_softmax(scale: float) -> None:
    """For flat and for sharp distributions, both measures are those of scipy's softmax, sorted."""
    logits = (np.random.default_rng(0).standard_normal((50, 3, 40)) * scale).astype(np.float32)
    expected = _sorted_probabilities(logits)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        gap, largest = softmax_gap(jnp.asarray(logits)), softmax_max(jnp.asarray(logits))
    np.testing.assert_allclose(gap, expected[..., -1] - expected[..., -2], rtol=1e-4, atol=2e-7)
    np.testing.assert_allclose(largest, expected[..., -1], rtol=2e-6)
    assert gap.dtype == largest.dtype == np.float32
    assert gap.shape == (50, 3)


def test_small_gaps_keep_their_digits() -> None:
    """The gap of two nearly equal logits is accurate to float32, as a difference of probabilities would not be."""
    logits = jnp.array([[0.0, 3e-6, -40.0]], np.float32)
    np.testing.assert_allclose(softmax_gap(logits), np.tanh([3e-6 / 2]), rtol=1e-5)


@pytest.mark.parametrize("times", [2, 3, 8])
def test_a_tie_at_the_top_has_no_gap(times: int) -> None:
    """If the largest logit occurs more than once, the gap is exactly 0 and the maximum is shared."""
    logits = jnp.full((1, 8), -50.0, np.float32).at[0, :times].set(7.25)
    assert softmax_gap(logits).tolist() == [0.0]
    np.testing.assert_allclose(softmax_max(logits), np.array([1 / times]), rtol=1e-6)


def test_a_tie_below_the_top_is_no_tie() -> None:
    """Equal runners-up change nothing but the normaliser."""
    logits = jnp.array([[2.0, 1.0, 1.0, 0.0]], np.float32)
    expected = _sorted_probabilities(np.asarray(logits))
    np.testing.assert_allclose(softmax_gap(logits), expected[:, -1] - expected[:, -2], rtol=1e-6)


def test_a_sure_layer_reaches_exactly_one() -> None:
    """Both measures saturate: at a lead of 20 they equal 1.0 in float32, at a lead of 10 they do not."""
    logits = jnp.array([[20.0, 0.0, 0.0], [10.0, 0.0, 0.0]], np.float32)
    assert softmax_gap(logits)[0] == 1
    assert softmax_max(logits)[0] == 1
    assert softmax_gap(logits)[1] < softmax_max(logits)[1] < 1


def test_a_common_shift_changes_nothing() -> None:
    """Logits far from 0 neither overflow nor vanish."""
    logits = jnp.array([[4.0, 2.0, 1.0]], np.float32)
    for shift in (-(2.0**14), 2.0**14):
        shifted = logits + np.float32(shift)
        assert softmax_gap(shifted) == softmax_gap(logits)
        assert softmax_max(shifted) == softmax_max(logits)


def test_nan_is_passed_on() -> None:
    """A NaN among the logits gives NaN, which no threshold accepts."""
    logits = jnp.array([[4.0, np.nan, 1.0]], np.float32)
    assert np.isnan(softmax_max(logits)).all()
    assert np.isnan(softmax_gap(logits)).all()
