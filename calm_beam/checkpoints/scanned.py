"""Trees of models that scan over their layers, where one array holds a parameter of all layers of a stack.

Flaxformer keeps them under `encoder/encoder` and `decoder/decoder`, T5X's `examples/scalable_t5` under `encoder/layers`
and `decoder/layers`. Both stack on axis 1, at times keep the heads of attention kernels on an axis of their own, and
have a table of relative positions in every layer, where T5 shares one in a stack.
Source: Flaxformer `t5_architecture.py` (`scan_axis`), T5X `examples/scalable_t5/network.py`.
"""

import re

import numpy as np

from .checkpoint import FloatArrays

_LAYER_AXIS = 1
_STACKED = re.compile(r"(encoder|decoder)/(?:\1|layers)/(.+)")
_HEADS_APART = re.compile(r".*attention/(query|key|value|out)/kernel")
_TABLE_OF_A_LAYER = re.compile(r"(encoder|decoder)/layers_\d+/(?:relpos_bias|relative_posemb)/rel_embedding")


def unstack_layers(arrays: FloatArrays) -> dict[str, np.ndarray]:
    """Returns the arrays under the names and in the shapes of a tree without scanned layers, such as most are.

    Args:
      arrays: Weights by name, of a tree of either kind.

    Returns:
      The arrays by names such as `decoder/layers_0/mlp/wi_0/kernel`, with one table of relative positions a stack.

    Raises:
      ValueError: If arrays are stacked on another axis, or the tables of a stack's layers differ.
    """
    width = arrays["token_embedder/embedding"].shape[-1] if "token_embedder/embedding" in arrays else 0
    unstacked = {}
    for name, array in arrays.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            unstacked[name] = array
            continue
        stack, rest = match.groups()
        _check_axis(arrays, name.removesuffix(rest), name, width)
        for index, layer in enumerate(np.moveaxis(array, _LAYER_AXIS, 0)):
            unstacked[f"{stack}/layers_{index}/{rest}"] = layer
    return _share_tables({name: _join_heads(name, array) for name, array in unstacked.items()})


def _check_axis(arrays: FloatArrays, stack: str, name: str, width: int) -> None:
    """Refuses an array whose layers are not surely on axis 1; the norms, of two axes, tell how many there are."""
    norm = f"{stack}pre_mlp_layer_norm/scale"
    shape = arrays[norm].shape if norm in arrays else ()
    is_certain = len(shape) == 2 and shape[0] == width != shape[1]
    if not is_certain or arrays[name].shape[_LAYER_AXIS : _LAYER_AXIS + 1] != shape[_LAYER_AXIS:]:
        raise ValueError(
            f"{name} has shape {arrays[name].shape} and {norm} {shape or 'is missing'}: expected scanned layers on "
            f"axis {_LAYER_AXIS} (T5X's default for scan_axis), so that norms are ({width}, layers). Move that axis, "
            "or split each array into layers_0, layers_1, ..., and save the checkpoint again."
        )


def _join_heads(name: str, kernel: np.ndarray) -> np.ndarray:
    """Returns an attention kernel as a matrix."""
    if kernel.ndim != 3 or not (match := _HEADS_APART.fullmatch(name)):
        return kernel
    # [heads, head_dim, width] -> [heads * head_dim, width]; [width, heads, head_dim] -> [width, heads * head_dim]
    return kernel.reshape((-1, kernel.shape[2]) if match.group(1) == "out" else (kernel.shape[0], -1))


def _share_tables(arrays: FloatArrays) -> dict[str, np.ndarray]:
    """Returns the arrays with the equal tables of a stack's layers replaced by the one of the stack."""
    shared: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        match = _TABLE_OF_A_LAYER.fullmatch(name)
        table = f"{match.group(1)}/relpos_bias/rel_embedding" if match else name
        # With a table of both kinds, what the model computes is unknown: the layers' stay, and are refused by name.
        if match is None or table in arrays:
            shared[name] = array
        elif not np.array_equal(shared.setdefault(table, array), array):
            raise ValueError(
                f"{name} differs from the table of another layer: relative positions of each layer's own, as UMT5 has "
                "them, are not supported. T5 shares one table in a stack."
            )
    return shared
