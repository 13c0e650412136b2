"""The patience measure."""

import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.exits.measures.built_in import share_in_agreement

pytestmark = pytest.mark.usefixtures("strict_promotion")


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_shares(k: int) -> None:
    """Patience is the share of the last k layers that predict this token; missing layers count as disagreeing."""
    generator = np.random.default_rng(k)
    token = generator.integers(0, 3, 200).astype(np.int32)
    earlier = generator.integers(-1, 3, (200, k - 1)).astype(np.int32)
    expected = [
        np.float32(([*row.tolist(), one].count(one)) / k) for one, row in zip(token.tolist(), earlier, strict=True)
    ]
    np.testing.assert_array_equal(share_in_agreement(token, earlier), np.array(expected, np.float32))


@pytest.mark.parametrize("k", [1, 3, 10])
def test_numpy_and_jax_agree_to_the_bit(k: int) -> None:
    """The sweep computes it on the host and the served decoder on the device; a threshold may equal such a share."""
    generator = np.random.default_rng(k)
    token = generator.integers(0, 2, 100).astype(np.int32)
    earlier = generator.integers(0, 2, (100, k - 1)).astype(np.int32)
    on_device = share_in_agreement(jnp.asarray(token), jnp.asarray(earlier))
    np.testing.assert_array_equal(share_in_agreement(token, earlier), on_device)
