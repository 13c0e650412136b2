"""Rows in tiles of one size, and positions in blocks of one size, so that a row gives the same bits in any batch.

A matrix product adds up in another order when its size changes. So each step on the device takes one tile after the
other, in a loop that is compiled once: every row runs the same instructions, in a batch of one prompt as in a sweep of
hundreds. The number of tiles is an argument, and padding beyond the last tile costs nothing.

An accelerator asks the host at every turn of such a loop whether there is another, and the host, which starts the
programs, waits for it. So on an accelerator there is no loop if the rows are one tile; the instructions of a tile are
the same. Devices that share a model keep the loop, since without it their compiler makes other instructions for a tile.

A tile of rows attends to its paths, in a store of nodes, and to the sources of its prompts. A softmax and a sum over
positions also add up in another order when there are more positions. So positions come in blocks of one size, and
blocks are added up one after the other: further blocks in which a row attends to nothing do not change its bits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from calm_beam.decoding.compilation import padded
from calm_beam.model.interface import KeysValues, Numbers
from calm_beam.model.numerics import MASKED
from calm_beam.model.partitioning import parts as sharing_devices

# With fewer rows, a host reads a layer's weights for little work; so few rows do not fill an accelerator.
_HOST_ROWS, _DEVICE_ROWS = 32, 256


def is_host() -> bool:
    """Returns whether XLA computes on CPUs."""
    return jax.default_backend() == "cpu"


def tile_rows() -> int:
    """Returns the rows of a tile."""
    return _HOST_ROWS if is_host() else _DEVICE_ROWS


def whole_tiles(count: int) -> int:
    """Returns the rows of the tiles that hold `count` rows; at least one tile."""
    return max(1, -(-count // tile_rows())) * tile_rows()


def apart(values: Any) -> Any:
    """Returns arrays behind an optimization barrier: the compiler fuses nothing across it.

    Compilers fuse the reads of rows from a buffer, or the writes there, with the computation if that pays for buffers
    of such a size; and fused code may add up in another order. With a barrier between the two, only the sizes of a tile
    determine how a row is computed.
    """
    return jax.lax.optimization_barrier(values)


def over_tiles(compute: Callable[[Any, Any, Numbers], Any], made: Any, rows: Any, *, count: Numbers) -> Any:
    """Returns arrays that are updated tile by tile.

    Args:
      compute: Takes the arrays so far, the rows of a tile and the index of the first of them; returns the new arrays.
      made: The initial arrays.
      rows: Arrays whose first axis is that of the rows, whole tiles of them.
      count: int32 scalar. Rows that are not padding, which come first.
    """
    (size, *_), tile = jax.tree.leaves(rows)[0].shape, tile_rows()

    def of_tile(index: Any, made: Any) -> Any:
        first = index * tile
        return compute(made, apart(_part(rows, first, tile)), first)

    if _is_one_part(size, tile):
        return of_tile(0, made)
    return jax.lax.fori_loop(0, -(-jnp.asarray(count) // tile), of_tile, made)


def made_of_tiles(compute: Callable[[Any], Any], rows: Any, *, count: Numbers) -> Any:
    """Returns the arrays that `compute` returns for each tile, joined along their last axis, that of rows.

    Args:
      compute: Takes the rows of a tile.
      rows: See `over_tiles`.
      count: See `over_tiles`.
    """
    (size, *_), tile = jax.tree.leaves(rows)[0].shape, tile_rows()

    def of_tile(first: Any) -> Any:
        return compute(apart(_part(rows, first, tile)))

    return made_by_part(of_tile, size=size, part=tile, parts=-(-jnp.asarray(count) // tile), axis=-1)


def made_by_part(
    compute: Callable[[Any], Any], *, size: int, part: int, parts: Numbers, axis: int, fill: float = 0
) -> Any:
    """Returns arrays that are computed one part after the other.

    Args:
      compute: Takes the index at which a part begins, and returns its arrays.
      size: Size of the arrays along the axis.
      part: Size of a part along the axis.
      parts: int32 scalar. Number of parts that are computed.
      axis: Axis along which the parts follow each other.
      fill: Value of the parts that are not computed.
    """
    if _is_one_part(size, part):
        return apart(compute(0))

    def whole(of_part: jax.ShapeDtypeStruct) -> jax.Array:
        shape = list(of_part.shape)
        shape[axis] = size
        return jnp.full(shape, fill, of_part.dtype)

    # Traced once, for shapes and the loop: tracing a model takes longer than compiling a small one.
    traced, of_part = jax.make_jaxpr(compute, return_shape=True)(jax.ShapeDtypeStruct((), np.int32, weak_type=True))
    run = jax.extend.core.jaxpr_as_fun(traced)

    def put(index: Any, made: Any) -> Any:
        first = index * part
        return jax.tree.map(
            lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=axis),
            made,
            apart(jax.tree.unflatten(jax.tree.structure(of_part), run(first))),
        )

    return jax.lax.fori_loop(0, parts, put, jax.tree.map(whole, of_part))


def _is_one_part(size: int, part: int) -> bool:
    return size == part and not is_host() and sharing_devices() == 1


def _part(rows: Any, first: Numbers, size: int) -> Any:
    return jax.tree.map(lambda each: jax.lax.dynamic_slice_in_dim(each, first, size), rows)


# Positions of a block. On a host, small blocks keep what a tile gathers in the processor's caches; on an accelerator,
# starting a step takes longer than computing it, so that blocks are large.
_HOST_STEPS, _DEVICE_STEPS, _HOST_SOURCE = 16, 256, 32
# Rows of a prompt that attend to its source together, and groups of them at a time. On an accelerator each row attends
# alone, since a tile has room for as many sources as rows in any case: no row shares a small product with others.
_HOST_RANKS, _HOST_GROUPS = 4, 8


def ranks() -> int:
    """Returns how many rows of a prompt attend to its source together."""
    return _HOST_RANKS if is_host() else 1


def grouped(places: np.ndarray, size: int) -> dict[str, np.ndarray]:
    """Returns the groups, ranks and places of `GroupedSources`, each of shape (size,).

    Args:
      places: shape (rows,). Place of each row's source; equal places are adjacent.
      size: Padded number of rows: whole tiles, each of which has its own groups.
    """
    index = np.arange(len(places))
    of_tile = index % tile_rows()
    begins = np.append(True, places[1:] != places[:-1])[: len(places)]
    # A prompt's rows before the tile do not count.
    before = np.minimum(index - np.maximum.accumulate(np.where(begins, index, 0)), of_tile)
    begun = np.cumsum(before % ranks() == 0)
    groups = begun - begun[index - of_tile]
    of_groups = np.zeros(size, np.int32)
    of_groups[index - of_tile + groups] = places
    return {
        "groups": padded(groups, size, fill=size),
        "ranks": padded(before % ranks(), size),
        "places": of_groups,
    }


def path_positions(steps: int) -> int:
    """Returns the positions of paths of `steps` steps, rounded up to whole blocks."""
    return -(-steps // _path_block(steps)) * _path_block(steps)


def _path_block(steps: int) -> int:
    return _HOST_STEPS if is_host() else min(_DEVICE_STEPS, -(-steps // _HOST_STEPS) * _HOST_STEPS)


def source_positions(width: int) -> int:
    """Returns the positions of sources of a width: rounded up to whole blocks on a host, one block elsewhere."""
    return -(-width // _HOST_SOURCE) * _HOST_SOURCE if is_host() else width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Keys and values in blocks of positions; implements `Attended`.

    Attributes:
      positions: Number of positions.
      size: Positions of a block.
      count: int32 scalar. Number of blocks that are read, from the first.
      keys: Returns the keys of a block, given its first position.
      values: Returns the values of a block, given its first position.
    """

    positions: int
    size: int
    count: jax.Array
    keys: Callable[[Any], jax.Array]
    values: Callable[[Any], jax.Array]

    def logits(self, of_keys: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """See `Attended`."""
        if self.positions == self.size:
            return of_keys(self.keys(0))
        made: jax.Array = made_by_part(
            lambda first: of_keys(self.keys(first)),
            size=self.positions,
            part=self.size,
            parts=self.count,
            axis=-1,
            fill=float(MASKED),
        )
        return made

    def total(self, values: jax.Array) -> jax.Array:
        """See `Attended`."""
        by_block = jnp.sum(values.reshape(*values.shape[:-1], -1, self.size), axis=-1)
        return functools.reduce(jnp.add, (by_block[..., block] for block in range(by_block.shape[-1])))

    def mixed(self, of_values: Callable[..., jax.Array], *by_position: jax.Array) -> jax.Array:
        """See `Attended`."""

        def of_block(first: Any) -> jax.Array:
            parts = [jax.lax.dynamic_slice_in_dim(each, first, self.size, axis=-1) for each in by_position]
            return of_values(self.values(first), *apart(parts))

        if self.positions == self.size:
            return of_block(0)
        shape = jax.eval_shape(lambda: of_block(0)).shape
        made: jax.Array = jax.lax.fori_loop(
            0, self.count, lambda index, made: made + of_block(index * self.size), jnp.zeros(shape)
        )
        return made


def over_path(store: KeysValues, paths: jax.Array, steps: jax.Array, *, kv_heads: int) -> Blocks:
    """Returns the keys and values of rows' paths in blocks.

    Args:
      store: A layer's store of keys and values, each (nodes, heads of keys * head_dim).
      paths: shape (rows, steps of an output). The nodes that each row attends to, its own included.
      steps: shape (rows,). Step of each row; nodes of later steps are not read, or masked.
      kv_heads: Heads of keys.
    """
    length = paths.shape[1]
    positions, size = path_positions(length), _path_block(length)
    paths = jnp.pad(paths, ((0, 0), (0, positions - length)))

    def gathered(values: jax.Array, first: Any) -> jax.Array:
        nodes = jax.lax.dynamic_slice_in_dim(paths, first, size, axis=1)
        of_block: jax.Array = apart(values.at[nodes].get(mode="clip"))
        return of_block.reshape(*nodes.shape, kv_heads, -1)

    keys, values = (functools.partial(gathered, each) for each in store)
    return Blocks(positions=positions, size=size, count=jnp.max(steps) // size + 1, keys=keys, values=values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSources:
    """Sources to which groups of rows attend, each with rows of one prompt; implements `Sources`.

    Attributes:
      keys_values: A layer's keys and values, each (places, heads of keys, source, head_dim).
      mask: bool, shape (places, source).
      groups: int32, shape (rows,). Group of each row; at least the number of groups for padding.
      ranks: int32, shape (rows,). Below `ranks()`, different for the rows of a group.
      places: int32, shape (groups,). Place of each group's source.
    """

    keys_values: KeysValues
    mask: jax.Array
    groups: jax.Array
    ranks: jax.Array
    places: jax.Array

    def place(self, rows: jax.Array) -> jax.Array:
        """See `Sources`."""
        spread = jnp.zeros((len(self.places), ranks(), rows.shape[-1]), rows.dtype)
        return spread.at[self.groups, self.ranks].set(rows, mode="drop")

    def pick(self, placed: jax.Array) -> jax.Array:
        """See `Sources`."""
        return placed.at[self.groups, self.ranks].get(mode="clip")

    def each(self, attend: Callable[..., Any], *placed: jax.Array) -> Any:
        """See `Sources`."""
        together = _HOST_GROUPS if is_host() else len(self.places)

        def some(first: Any) -> Any:
            of_groups = [jax.lax.dynamic_slice_in_dim(each, first, together) for each in (self.places, *placed)]
            places, *others = apart(of_groups)
            return attend(*self._of_places(places), *others)

        if together == len(self.places):
            return some(0)
        count = jnp.max(jnp.where(self.groups < len(self.places), self.groups + 1, 0))
        return made_by_part(some, size=len(self.places), part=together, parts=-(-count // together), axis=0)

    def _of_places(self, places: jax.Array) -> tuple[Blocks, jax.Array]:
        """Returns the sources at some places in blocks, and the mask of their positions."""
        is_token = apart(self.mask.at[places].get(mode="clip"))
        width = is_token.shape[1]
        size = _HOST_SOURCE if is_host() else width
        assert width % size == 0, "see `source_positions`"
        longest = jnp.max(jnp.where(is_token, jnp.arange(1, width + 1)[None], 0))

        def gathered(values: jax.Array, first: Any) -> jax.Array:
            _, heads, _, head_dim = values.shape
            of_places = jax.vmap(
                lambda place: jax.lax.dynamic_slice(values, (place, 0, first, 0), (1, heads, size, head_dim))
            )(places)
            made: jax.Array = apart(of_places[:, 0])
            return made

        keys, values = (functools.partial(gathered, each) for each in self.keys_values)
        return Blocks(positions=width, size=size, count=-(-longest // size), keys=keys, values=values), is_token
