"""Partitioning of compiled code among the devices of a group.

The group is the mesh of `jax.set_mesh`, around the call; without one, there is one device. These functions are for code
that is being compiled: they become part of the program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

# The axis of a group's devices.
PARTS = "parts"


def parts() -> int:
    """Returns how many devices share the model."""
    mesh = jax.sharding.get_abstract_mesh()
    # A caller may have a mesh of another kind.
    return 1 if mesh.empty else int(mesh.shape.get(PARTS, 1))


def divided(values: jax.Array, axis: int, *, of: int) -> jax.Array:
    """Returns values of which each device has its part of an axis.

    Without this constraint, XLA chooses a layout for every program, and moves values between programs with different
    layouts.

    Args:
      values: Any array.
      axis: The axis that is divided.
      of: Number of units along the axis, such as heads; if the devices cannot share it evenly, each has all values.
    """
    count = parts()
    if count == 1:
        return values
    spec = PartitionSpec(*(None,) * axis, PARTS) if of % count == 0 else PartitionSpec()
    placed: jax.Array = jax.lax.with_sharding_constraint(values, spec)
    return placed


def whole(values: jax.Array) -> jax.Array:
    """Returns values of which each device has all."""
    return divided(values, 0, of=1)


def spread(values: jax.Array) -> jax.Array:
    """Returns values of which each device has its part of the longest axis that they can share evenly, if any."""
    count = parts()
    axes = [axis for axis, size in enumerate(values.shape) if size % count == 0]
    if not axes:
        return whole(values)
    axis = max(axes, key=lambda axis: (values.shape[axis], axis))
    return divided(values, axis, of=values.shape[axis])


def by_part(compute: Callable[..., Any], shared: jax.Array, array: jax.Array, *, axis: int) -> Any:
    """Returns the results of a function for an array, or for every device's part of it.

    Args:
      compute: Takes `shared`, the array or a part of it, and the index on the axis where a part begins; None for the
        whole array. Returns a tree of arrays of one shape, whose numbers have 32 bits.
      shared: An array that every device has whole.
      array: An array that is divided on an axis, if the devices can share it evenly; else every device has it whole,
        and all compute with it.
      axis: The axis.

    Returns:
      The tree; with a leading axis for the parts, if there are several.
    """
    count = parts()
    if count == 1:
        return compute(shared, array, None)
    if array.shape[axis] % count:
        run: Any = jax.shard_map(
            lambda shared, array: compute(shared, array, None),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return run(shared, array)
    size = array.shape[axis] // count

    def of_device(shared: jax.Array, part: jax.Array) -> Any:
        made = compute(shared, part, jax.lax.axis_index(PARTS) * size)
        return _gathered(made)

    specs = PartitionSpec(), PartitionSpec(*(None,) * axis, PARTS)
    divided_run: Any = jax.shard_map(of_device, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    return divided_run(shared, array)


def looked_up(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the rows of a table, (entries, width), at some indices; their shape + (width,).

    If devices share the table, each looks up the rows that it has, and they add the results. XLA does so itself for
    several indices; for one index it takes a slice, for which it copies the whole table to every device on GPUs.
    """
    entries, count = table.shape[0], parts()
    if index.size > 1 or entries % count or count == 1:
        return jnp.take(table, index, axis=0)
    size = entries // count

    def of_device(index: jax.Array, part: jax.Array) -> jax.Array:
        place = index - jax.lax.axis_index(PARTS) * size
        row = jnp.take(part, jnp.clip(place, 0, size - 1), axis=0)
        has_it = ((place >= 0) & (place < size))[..., None]
        return jax.lax.psum(jnp.where(has_it, row, jnp.zeros_like(row)), PARTS)

    specs = PartitionSpec(), PartitionSpec(PARTS)
    run: Any = jax.shard_map(of_device, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    looked: jax.Array = run(index, table)
    return looked


def _gathered(made: Any) -> Any:
    """Returns the results of all devices, with a leading axis for the devices: they communicate once."""
    leaves, structure = jax.tree.flatten(made)
    bits = jnp.stack([jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in leaves])
    # [leaves, ...] -> [parts, leaves, ...]
    of_all = jax.lax.all_gather(bits, PARTS)
    gathered = [jax.lax.bitcast_convert_type(of_all[:, index], leaf.dtype) for index, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, gathered)
