"""Rows in tiles of one size, so that what is computed of a row does not depend on how many are beside it.

A matrix product adds up in another order when its size changes. So each step of the device takes a tile after the
other, in a loop that the compiler makes once: every row goes through the same instructions, in a batch of a prompt as
in a sweep of hundreds. How many tiles there are is told when it runs, and padding beyond the last costs nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from calm_beam.model.interface import Numbers

# With fewer rows, a host reads the weights of a layer for little; an accelerator is not filled by so few.
_HOST_ROWS, _DEVICE_ROWS = 32, 256


def is_host() -> bool:
    """Returns whether XLA computes on processors."""
    return jax.default_backend() == "cpu"


def tile_rows() -> int:
    """Returns the rows of a tile."""
    return _HOST_ROWS if is_host() else _DEVICE_ROWS


def whole_tiles(count: int) -> int:
    """Returns the rows of the tiles that hold so many, one at least."""
    return max(1, -(-count // tile_rows())) * tile_rows()


def over_tiles(compute: Callable[[Any, Any, Numbers], Any], made: Any, rows: Any, *, count: Numbers) -> Any:
    """Returns what is made of rows, tile by tile.

    Args:
      compute: Takes what was made so far, the rows of a tile and the number of the first of them; returns what is made.
      made: Arrays to begin with.
      rows: Arrays whose first axis is that of the rows, whole tiles of them.
      count: int32 scalar. Rows that are no padding, which come first.
    """
    tile = tile_rows()

    def of_tile(index: Any, made: Any) -> Any:
        first = index * tile
        return compute(made, jax.tree.map(lambda each: jax.lax.dynamic_slice_in_dim(each, first, tile), rows), first)

    return jax.lax.fori_loop(0, -(-jnp.asarray(count) // tile), of_tile, made)


def made_of_tiles(compute: Callable[[Any], Any], rows: Any, *, count: Numbers) -> Any:
    """Returns arrays that `compute` makes of the rows of each tile; the last axis of each is that of rows.

    Args:
      compute: Takes the rows of a tile.
      rows: As of `over_tiles`.
      count: Likewise.
    """
    (size, *_), tile = jax.tree.leaves(rows)[0].shape, tile_rows()
    of_tile = jax.eval_shape(lambda: compute(jax.tree.map(lambda each: each[:tile], rows)))
    nothing = jax.tree.map(lambda each: jnp.zeros((*each.shape[:-1], size), each.dtype), of_tile)

    def put(made: Any, some: Any, first: Numbers) -> Any:
        return jax.tree.map(
            lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=-1), made, compute(some)
        )

    return over_tiles(put, nothing, rows, count=count)
