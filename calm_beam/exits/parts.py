"""Rows in parts, where what is computed for all of them at once would be too large."""

from collections.abc import Callable
from typing import TypeVar

import jax

_Values = TypeVar("_Values")


def in_parts(compute: Callable[[jax.Array], _Values], states: jax.Array, *, most: int) -> _Values:
    """Returns what a function makes of states, (rows, width), taking at most so many rows at a time.

    Args:
      compute: Returns arrays of shape (rows,), in a tuple.
      states: More rows than `most` are halved as long as their number is even.
      most: Rows.
    """
    rows = together = states.shape[0]
    while together % 2 == 0 and together > most:
        together //= 2
    if together == rows:
        return compute(states)
    made = jax.lax.map(compute, states.reshape(rows // together, together, -1))
    joined: _Values = jax.tree.map(lambda values: values.reshape(rows), made)
    return joined
