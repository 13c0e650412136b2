"""Conversion of parameters that other projects arrange differently to our form.

T5X trees may scan over their layers, or have relative position biases in every layer. A scanned model keeps a parameter
of all layers of a stack in one array: Flaxformer and T5X's `examples/scalable_t5` under `encoder/encoder` and
`decoder/decoder`, others under `encoder/layers` and `decoder/layers`. Layers are on axis 1 by default
(`param_scan_axis`), or on axis 0. With or without scanning, `scalable_t5` has a table of relative positions in every
layer, where T5 has one per stack, and a separate axis for the heads of attention kernels.

Kernels of queries and keys may be arranged for rotary positions that rotate neighbouring values together.
Source: Flaxformer `t5_architecture.py` (`scan_axis`), T5X `examples/scalable_t5/network.py` and `layers.py`.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from calm_beam.model import MOST_LAYERS, check_dimensions

from .checkpoint import Arrays
from .metadata import check_together
from .stored_array import Array, StoredArray, are_equal

_AXES = (1, 0)
_EMBEDDING = "token_embedder/embedding"
_STACKED = re.compile(r"((encoder|decoder)/(?:\2|layers)/)(.+)")
_HEADS_APART = re.compile(r".*attention/(query|key|value|out)/kernel")
_TABLE_OF_A_LAYER = re.compile(r"(encoder|decoder)/layers_(\d+)/(?:relpos_bias|relative_posemb)/rel_embedding")


def unstack_layers(arrays: Arrays) -> dict[str, Array]:
    """Returns the arrays with the names and shapes of a tree without scanned layers, which is the usual form.

    Args:
      arrays: Weights by name, from any kind of tree.

    Returns:
      The arrays by names such as `decoder/layers_0/mlp/wi_0/kernel`, attention kernels as matrices. Relative positions
      have one table per stack if its layers have equal ones, else one per layer. Arrays that are stored for all layers
      together are held in memory.

    Raises:
      CheckpointError: If those do not fit into memory.
      ValueError: If the axis on which layers are stacked is ambiguous, or an array is empty.
    """
    check_dimensions({name: array.shape for name, array in arrays.items()})
    stacked: dict[str, list[str]] = {}
    unstacked: dict[str, Array] = {}
    for name, array in arrays.items():
        match = _STACKED.fullmatch(name)
        if match is None or _EMBEDDING not in arrays:
            unstacked[name] = array
        else:
            stacked.setdefault(match.group(1), []).append(name)
    axes = {home: _layer_axis(arrays, home, names=names) for home, names in stacked.items()}
    check_together(
        {
            name: arrays[name].shape
            for home, names in stacked.items()
            for name in names
            if isinstance(arrays[name], StoredArray) and not _has_layers_apart(arrays[name], axes[home])
        }
    )
    for home, names in stacked.items():
        stack = home.partition("/")[0]
        for name in names:
            for index, layer in enumerate(_layers(arrays[name], axes[home])):
                unstacked[f"{stack}/layers_{index}/{name.removeprefix(home)}"] = layer
    return _with_settled_tables({name: _join_heads(name, array) for name, array in unstacked.items()})


def split_heads(name: str, kernel: np.ndarray, *, num_heads: int) -> np.ndarray:
    """Returns an attention kernel with a separate axis for heads, and any other array unchanged."""
    match = _HEADS_APART.fullmatch(name)
    if match is None:
        return kernel
    # [heads * head_dim, width] -> [heads, head_dim, width]; [width, heads * head_dim] -> [width, heads, head_dim]
    return kernel.reshape(
        (num_heads, -1, kernel.shape[1]) if match.group(1) == "out" else (kernel.shape[0], num_heads, -1)
    )


def _layer_axis(arrays: Arrays, home: str, *, names: Sequence[str]) -> int:
    """Returns the only axis on which all arrays of a stack can have its layers, judged by the norms' two axes."""
    norm, width = f"{home}pre_mlp_layer_norm/scale", arrays[_EMBEDDING].shape[-1]
    shape = arrays[norm].shape if norm in arrays else ()
    # Axes that the norms allow, and for each an array with another number of layers there.
    odd = {
        axis: next((name for name in names if arrays[name].shape[axis : axis + 1] != (shape[axis],)), None)
        for axis in _AXES
        if len(shape) == 2 and shape[1 - axis] == width and shape[axis] <= MOST_LAYERS
    }
    found = [axis for axis, name in odd.items() if name is None]
    if len(found) == 1:
        return found[0]
    name = next((name for name in odd.values() if name is not None), norm)
    shown = f"has shape {arrays[name].shape}" if name in arrays else "is missing"
    beside = "" if name == norm else f" and {norm} {shape}"
    raise ValueError(
        f"{name} {shown}{beside}: expected scanned layers on axis 1 or on axis 0 of all arrays, at most {MOST_LAYERS}, "
        f"so that norms are ({width}, layers) or (layers, {width}); {'both are' if found else 'neither is'} possible "
        "here. Split each array into layers_0, layers_1, ..., and save the checkpoint again."
    )


def _has_layers_apart(array: Array, axis: int) -> bool:
    """Returns whether each layer of a stacked array can be read separately."""
    return isinstance(array, StoredArray) and array.divides(axis, array.shape[axis])


def _layers(array: Array, axis: int) -> Iterator[Array]:
    """Yields the layers of a stacked array; reading them one by one would read its chunks once per layer."""
    if isinstance(array, StoredArray) and _has_layers_apart(array, axis):
        return (array.at(index, axis=axis) for index in range(array.shape[axis]))
    return iter(np.moveaxis(np.asarray(array), axis, 0))


def _join_heads(name: str, kernel: Array) -> Array:
    """Returns an attention kernel as a matrix."""
    if kernel.ndim != 3 or not (match := _HEADS_APART.fullmatch(name)):
        return kernel
    # [heads, head_dim, width] -> [heads * head_dim, width]; [width, heads, head_dim] -> [width, heads * head_dim]
    if isinstance(kernel, StoredArray):
        return kernel.joined(0 if match.group(1) == "out" else 1)
    return kernel.reshape((-1, kernel.shape[2]) if match.group(1) == "out" else (kernel.shape[0], -1))


def _with_settled_tables(arrays: Arrays) -> dict[str, Array]:
    """Returns the arrays with relative position tables either for all stacks or for all layers."""
    settled: dict[str, Array] = {}
    of_layers: dict[str, dict[str, Array]] = {"encoder": {}, "decoder": {}}
    for name, array in arrays.items():
        match = _TABLE_OF_A_LAYER.fullmatch(name)
        # With tables of both kinds, the computation is unknown: the layers' tables stay, and are refused by name.
        if match is None or _table_of(match.group(1)) in arrays:
            settled[name] = array
        else:
            of_layers[match.group(1)][match.group(2)] = array
    if any(_differ(list(tables.values())) for tables in of_layers.values()):
        for stack, tables in of_layers.items():
            if not tables and _table_of(stack) in settled:
                # A stack's table applies to each of its layers.
                shared = settled.pop(_table_of(stack))
                tables = dict.fromkeys(_layers_of(arrays, stack), shared)
            settled |= {f"{stack}/layers_{index}/relpos_bias/rel_embedding": table for index, table in tables.items()}
    else:
        settled |= {_table_of(stack): next(iter(tables.values())) for stack, tables in of_layers.items() if tables}
    return settled


def _table_of(stack: str) -> str:
    return f"{stack}/relpos_bias/rel_embedding"


def _differ(tables: Sequence[Array]) -> bool:
    # A table that is not finite equals no other.
    return any(not are_equal(tables[0], table) for table in tables[1:])


def _layers_of(arrays: Arrays, stack: str) -> list[str]:
    """Returns the numbers of a stack's layers, as in their names."""
    pattern = re.compile(rf"{stack}/layers_(\d+)/")
    return sorted({match.group(1) for name in arrays if (match := pattern.match(name))})


def turned(head_dim: int, *, scale: np.float32, neighbours: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from stored query or key kernels, (..., heads * head_dim), to kernels in our form.

    Args:
      head_dim: Width of a head.
      scale: Factor to multiply them by.
      neighbours: Whether the source rotates value 2 i of a head together with value 2 i + 1.
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
