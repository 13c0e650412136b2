"""Kernels of queries and keys whose heads turn neighbouring values with each other, brought into our form."""

from collections.abc import Callable

import numpy as np

from .stored_array import Array, StoredArray


def turned(head_dim: int, *, scale: np.float32, neighbours: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Returns what makes our queries' or keys' kernels, (..., heads * head_dim), of those that are stored.

    Args:
      head_dim: Width of a head.
      scale: By what they are multiplied.
      neighbours: Whether value 2 i of a head is turned with value 2 i + 1 where they come from.
    """

    def change(values: np.ndarray) -> np.ndarray:
        if neighbours:
            # [..., heads, pairs, 2] -> [..., heads, 2, pairs]
            pairs = values.reshape(*values.shape[:-1], -1, head_dim // 2, 2)
            values = np.swapaxes(pairs, -1, -2).reshape(values.shape)
        return values * scale

    return change


def changed(array: Array, change: Callable[[np.ndarray], np.ndarray]) -> Array:
    """Returns an array whose rows are changed, each by itself, when they are read."""
    if not isinstance(array, StoredArray) or array.ndim == 1:
        return change(np.asarray(array))
    return StoredArray(
        array.shape,
        array.stored_dtype,
        read=lambda slices: change(array[slices[0]])[:, slices[1]],
        chunk=(array.chunk[0], array.shape[1]),
    )
