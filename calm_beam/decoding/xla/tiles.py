"""Rows in tiles of one size, so that what is computed of a row does not depend on how many are beside it.

A matrix product adds up in another order when its size changes. So each step of the device takes a tile after the
other, in a loop that the compiler makes once: every row goes through the same instructions, in a batch of a prompt as
in a sweep of hundreds. How many tiles there are is told when it runs, and padding beyond the last costs nothing.

An accelerator asks the host at every turn of such a loop whether there is another, and the host, which starts the
programs, waits for it. Where rows are one tile, there is therefore no loop there; the instructions of a tile are the
same. Devices that share a model keep the loop, since without it their compiler makes other instructions of a tile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from calm_beam.model.interface import Numbers
from calm_beam.model.partitioning import parts as sharing_devices

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


def apart(values: Any) -> Any:
    """Returns arrays that the compiler is to make before it goes on, so that neither side is compiled with the other.

    Compilers join what reads rows from a buffer, or writes them there, to what computes with them, where that pays for
    buffers of such a size; and what is joined may add up in another order. With this between the two, only the sizes of
    a tile decide how a row is computed.
    """
    return jax.lax.optimization_barrier(values)


def over_tiles(compute: Callable[[Any, Any, Numbers], Any], made: Any, rows: Any, *, count: Numbers) -> Any:
    """Returns what is made of rows, tile by tile.

    Args:
      compute: Takes what was made so far, the rows of a tile and the number of the first of them; returns what is made.
      made: Arrays to begin with.
      rows: Arrays whose first axis is that of the rows, whole tiles of them.
      count: int32 scalar. Rows that are no padding, which come first.
    """
    (size, *_), tile = jax.tree.leaves(rows)[0].shape, tile_rows()

    def of_tile(index: Any, made: Any) -> Any:
        first = index * tile
        return compute(made, apart(_part(rows, first, tile)), first)

    if _is_one_part(size, tile):
        return of_tile(0, made)
    return jax.lax.fori_loop(0, -(-jnp.asarray(count) // tile), of_tile, made)


def made_of_tiles(compute: Callable[[Any], Any], rows: Any, *, count: Numbers) -> Any:
    """Returns arrays that `compute` makes of the rows of each tile; the last axis of each is that of rows.

    Args:
      compute: Takes the rows of a tile.
      rows: As of `over_tiles`.
      count: Likewise.
    """
    (size, *_), tile = jax.tree.leaves(rows)[0].shape, tile_rows()

    def of_tile(first: Any) -> Any:
        return compute(apart(_part(rows, first, tile)))

    return made_by_part(of_tile, size=size, part=tile, parts=-(-jnp.asarray(count) // tile), axis=-1)


def made_by_part(
    compute: Callable[[Any], Any], *, size: int, part: int, parts: Numbers, axis: int, fill: float = 0
) -> Any:
    """Returns arrays of which a part is computed after the other.

    Args:
      compute: Takes the place at which a part begins, and returns its arrays.
      size: Of the arrays along the axis.
      part: Of a part of them.
      parts: int32 scalar. How many are computed.
      axis: Along which they follow each other.
      fill: What the others are.
    """
    if _is_one_part(size, part):
        return apart(compute(0))

    def whole(of_part: jax.ShapeDtypeStruct) -> jax.Array:
        shape = list(of_part.shape)
        shape[axis] = size
        return jnp.full(shape, fill, of_part.dtype)

    def put(index: Any, made: Any) -> Any:
        first = index * part
        return jax.tree.map(
            lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=axis),
            made,
            apart(compute(first)),
        )

    return jax.lax.fori_loop(0, parts, put, jax.tree.map(whole, jax.eval_shape(compute, 0)))


def _is_one_part(size: int, part: int) -> bool:
    return size == part and not is_host() and sharing_devices() == 1


def _part(rows: Any, first: Numbers, size: int) -> Any:
    return jax.tree.map(lambda each: jax.lax.dynamic_slice_in_dim(each, first, size), rows)
