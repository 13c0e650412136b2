"""Rotary positions: the rotated values, the angles, and the effect of scaling."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.model.llama import RopeScaling
from calm_beam.model.llama.attention import inverse_frequencies, rotated, turnings
from tests.calm_beam.model.llama.builders import build_llama_config

_LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0)
_YARN = RopeScaling(kind="yarn", factor=4.0, original_max_positions=4096, attention_factor=1.25)


def _frequencies(**changes: Any) -> np.ndarray:
    return inverse_frequencies(build_llama_config(head_dim=128, **changes))


def test_turns_depend_on_distance_alone() -> None:
    """The product of a rotated query and key depends on their distance alone, at large positions too."""
    config = build_llama_config(head_dim=8)
    query, key = np.random.default_rng(0).standard_normal((2, 1, 1, 8)).astype(np.float32)
    positions = np.array([0, 7, 5_000, 100_000], np.int32)
    far, near = (
        rotated(jnp.broadcast_to(values, (4, 1, 8)), positions + ahead, turning=turnings(config)[0])
        for values, ahead in ((query, 3), (key, 0))
    )
    products = np.sum(np.asarray(far) * np.asarray(near), axis=(1, 2))
    np.testing.assert_allclose(products, products[0], rtol=0, atol=2e-2)
    np.testing.assert_allclose(products[:2], products[0], rtol=0, atol=1e-5)
    assert abs(products[0] - float(np.sum(query * key))) > 0.1


def test_angles_are_exact_far_out() -> None:
    """Cosines and sines of 100,000 positions are those of float64 angles, but for the rounding of the angle."""
    config = build_llama_config(head_dim=2)
    positions = np.arange(0, 100_000, 997, dtype=np.int32)
    turned = rotated(jnp.ones((len(positions), 1, 2)), positions, turning=turnings(config)[0])
    angles = positions.astype(np.float64)
    expected = np.stack([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)], axis=-1)
    np.testing.assert_allclose(turned[:, 0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_frequencies_fall_from_one(theta: float) -> None:
    """Frequencies fall geometrically from one: theta ** -(2 i / head_dim)."""
    found = _frequencies(rope_theta=theta)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [math.exp(-math.log(theta) * i / 64) for i in range(64)], rtol=1e-6)


def test_linear_scaling_divides_all() -> None:
    """Linear scaling divides all frequencies by its factor; `dynamic` changes nothing within the model's positions."""
    plain = _frequencies()
    np.testing.assert_allclose(_frequencies(rope_scaling=RopeScaling(kind="linear", factor=4.0)), plain / 4, rtol=1e-6)
    np.testing.assert_array_equal(_frequencies(rope_scaling=RopeScaling(kind="dynamic", factor=4.0)), plain)


@pytest.mark.parametrize("scaling", [_LLAMA3, _YARN], ids=["llama3", "yarn"])
def test_fast_turns_stay_and_slow_ones_are_divided(scaling: RopeScaling) -> None:
    """Fast rotations stay and slow ones are divided; in between, the share that stays falls from 1 to 0."""
    plain = _frequencies(rope_theta=500_000.0)
    ratio = plain / _frequencies(rope_theta=500_000.0, rope_scaling=scaling)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(scaling.factor, rel=1e-6)
    assert np.all(np.diff(ratio) > -1e-5)
    assert 3 < np.sum((ratio > 1.001) & (ratio < scaling.factor - 0.001)) < 40


def test_layers_turn_each_in_its_way() -> None:
    """Some layers do not rotate, and those with a window have a base of their own, without scaling."""
    config = build_llama_config(
        sliding_window=4, windowed_layers=(0,), local_rope_theta=100.0, unturned_layers=(1,), rope_scaling=_YARN
    )
    local, still, usual = turnings(config)
    np.testing.assert_allclose(local.frequencies, [100 ** (-i / 3) for i in range(3)], rtol=1e-6)
    np.testing.assert_array_equal(still.frequencies, np.zeros(3))
    np.testing.assert_array_equal(usual.frequencies, inverse_frequencies(config))
    assert [turning.factor for turning in (local, still, usual)] == [1, 1, 1.25]
    values = jnp.ones((1, 1, 6))
    np.testing.assert_array_equal(rotated(values, np.array([9], np.int32), turning=still), values)


def test_values_behind_those_that_are_turned_stay() -> None:
    """With partial rotation of a head of 6, value 0 rotates with value 2 and 1 with 3, and the rest stays."""
    config = build_llama_config(turned_dim=4, rope_theta=100.0)
    values = np.array([[[1.0, 0.0, 0.0, 0.0, 5.0, 6.0]]], np.float32)
    turned = rotated(jnp.asarray(values), np.array([1], np.int32), turning=turnings(config)[0])
    np.testing.assert_allclose(turned, [[[math.cos(1), 0, math.sin(1), 0, 5, 6]]], rtol=0, atol=1e-6)


def test_yarns_factor_scales_what_is_turned() -> None:
    """Yarn's factor scales queries and keys each, at position 0 too."""
    values = jnp.ones((1, 1, 128))
    config = build_llama_config(head_dim=128, rope_scaling=_YARN)
    turned = rotated(values, np.zeros(1, np.int32), turning=turnings(config)[0])
    np.testing.assert_allclose(turned, 1.25 * np.ones((1, 1, 128)), rtol=1e-6)
