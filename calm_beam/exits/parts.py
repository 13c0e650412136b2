"""Rows in parts, where what is computed for all of them at once would be too large."""

from collections.abc import Callable
from typing import TypeVar

import jax

_Rows = TypeVar("_Rows")
_Values = TypeVar("_Values")


def in_parts(compute: Callable[[_Rows], _Values], rows: _Rows, *, most: int) -> _Values:
    """Returns what a function makes of rows, taking at most so many at a time.

    Args:
      compute: Returns an array, or a tuple of arrays, whose first axis is that of the rows.
      rows: An array, or a tuple of arrays, of as many rows. More of them than `most` are halved as long as their number
        is even.
      most: Rows.
    """
    count = together = jax.tree.leaves(rows)[0].shape[0]
    while together % 2 == 0 and together > most:
        together //= 2
    if together == count:
        return compute(rows)
    parts = jax.tree.map(lambda values: values.reshape(-1, together, *values.shape[1:]), rows)
    joined: _Values = jax.tree.map(lambda values: values.reshape(count, *values.shape[2:]), jax.lax.map(compute, parts))
    return joined
