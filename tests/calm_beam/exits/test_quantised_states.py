"""States in few bits, and what they leave out."""

import jax.numpy as jnp
import numpy as np

from calm_beam.exits.quantised_head import UNIT, quantised_head
from calm_beam.exits.quantised_states import quantised_states


def test_rounding_of_kept_columns_is_counted_where_their_squares_vanish() -> None:
    """What a head keeps of a state is rounded, however small it is."""
    weights = np.ones((40, 32), np.float32)
    weights[:, 5:7] = 1000
    head = quantised_head(jnp.asarray(weights), "int8")
    assert sorted(head.kept.tolist()) == [5, 6]
    states = np.ones((2, 32), np.float32)
    states[:, 5:7] = np.array([[1e-25], [0]], np.float32)
    kept_norm = np.asarray(quantised_states(jnp.asarray(states), head, parts=1).kept_norm)
    assert kept_norm[0, 0] >= 1e-25 * UNIT
    assert kept_norm[1, 0] == 0
