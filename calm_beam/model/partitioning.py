"""What compiled code has to know of the devices that it is divided among.

The group is that of `jax.set_mesh`, around the call; without one, there is one device. Everything here is for code that
is being compiled: it becomes part of the program.
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

    Without being told, XLA chooses for every program anew, and moves between two of them what is chosen differently.

    Args:
      values: Any array.
      axis: The one that is divided.
      of: What lies along it, such as heads; if the devices cannot share that evenly, each has all values.
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
    """Returns what is made of an array, or what every device makes of its part.

    Args:
      compute: Takes `shared`, the array or a part of it, and where on the axis a part begins; None for all of it.
        Returns a tree of arrays of one shape, whose numbers have 32 bits.
      shared: Whole on every device.
      array: Divided on an axis, if the devices can share that evenly; else whole, and all compute with it.
      axis: The axis.

    Returns:
      The tree; with an axis in front for the parts, if there are several.
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

    Of a table that devices share, each looks up what it has, and they add. XLA does so itself for several indices; for
    one it takes a slice, and on GPUs it brings the whole table to every device for that.
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
    """Returns what every device has made, with an axis in front for the devices: they exchange numbers once."""
    leaves, structure = jax.tree.flatten(made)
    bits = jnp.stack([jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in leaves])
    # [leaves, ...] -> [parts, leaves, ...]
    of_all = jax.lax.all_gather(bits, PARTS)
    gathered = [jax.lax.bitcast_convert_type(of_all[:, index], leaf.dtype) for index, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, gathered)
