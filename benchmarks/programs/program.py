"""A program of a device: a compiled function with arguments that have shapes, types and places, but no numbers."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from .placement import Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One program, and what is expected of it once it is compiled.

    Attributes:
      name: What it does.
      placement: Of its arguments.
      function: What `jax.jit` returns.
      arguments: Passed by position: `jax.ShapeDtypeStruct` where the program takes arrays.
      options: Passed by name, likewise.
      donated: Names of the options whose buffers it writes into, instead of copying them.
      conditionals: Layers, or heads, that it passes by where nobody needs them; None if that is not counted.
      sums: How often devices that share the model exchange numbers; None if that is not counted.
      smallest: The same step for one prompt, which has to compute a row in the same way; None if it may differ.
    """

    name: str
    placement: Placement
    function: Any
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    donated: tuple[str, ...] = ()
    conditionals: int | None = None
    sums: int | None = None
    smallest: "Program | None" = None

    @property
    def donated_bytes(self) -> int:
        """Bytes that each device has of the buffers which are written into.

        Arrays of one number do not count: Adafactor keeps them where it factors nothing, and a compiler that sees that
        they are 0 creates them again.
        """
        given = (leaf for name in self.donated for leaf in jax.tree.leaves(self.options[name]))
        return sum(_bytes_of(leaf) for leaf in given if math.prod(leaf.shape) > 1)

    @property
    def divided_shapes(self) -> set[tuple[int, ...]]:
        """Shapes of the arguments of which each device has a part."""
        return {
            leaf.shape
            for leaf in jax.tree.leaves((self.arguments, dict(self.options)))
            if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding.shard_shape(leaf.shape) != leaf.shape
        }


def _bytes_of(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
