"""Hidden-state saturation."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.spatial.distance

from calm_beam.exits.measures.built_in import hidden_state_saturation


def test_it_is_the_cosine() -> None:
    """Every pair of states has the cosine similarity that scipy gives."""
    generator = np.random.default_rng(0)
    state, below = (generator.standard_normal((5, 4, 16)).astype(np.float32) for _ in range(2))
    below = below + state
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = hidden_state_saturation(jnp.asarray(state), jnp.asarray(below))
    assert found.dtype == np.float32
    for index in np.ndindex(5, 4):
        expected = 1 - scipy.spatial.distance.cosine(state[index].astype(np.float64), below[index].astype(np.float64))
        np.testing.assert_allclose(found[index], expected, atol=1e-6)


def test_known_angles() -> None:
    """Parallel, perpendicular and opposite states have cosines 1, 0 and -1, at any length."""
    state = jnp.array([[3.0, 4.0], [1.0, 0.0], [2.0, 0.0]], np.float32)
    below = jnp.array([[6.0, 8.0], [0.0, 9.0], [-5.0, 0.0]], np.float32)
    assert hidden_state_saturation(state, below).tolist() == [1.0, 0.0, -1.0]


def test_it_depends_on_direction_only() -> None:
    """Scaling either state by a power of two changes nothing."""
    state, below = jnp.asarray(np.random.default_rng(1).standard_normal((2, 7, 16)), np.float32)
    scaled = hidden_state_saturation(state * np.float32(8), below * np.float32(0.25))
    np.testing.assert_array_equal(scaled, hidden_state_saturation(state, below))
