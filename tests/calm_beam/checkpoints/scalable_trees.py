"""Trees of T5X's `examples/scalable_t5`, made here independently of the reader."""

import re

import numpy as np

from calm_beam.checkpoints import FloatArrays
from calm_beam.model import T5Config
from tests.builders import build_arrays, build_config

SCALABLE = build_config(
    num_encoder_layers=2, num_decoder_layers=3, relative_bias_per_layer=True, activation="silu", num_heads=4, head_dim=4
)
ARRAYS = build_arrays(SCALABLE, 5)
# Text for it in T5X's config.
MLP_ACTIVATIONS = ("swish", "linear")
SOURCES = np.array([[9, 33, 4, 60, 12, 1], [5, 17, 8, 2, 40, 1]], np.int32)
DECODER_INPUTS = np.array([[0, 14, 8, 8, 63], [0, 3, 7, 21, 40]], np.int32)


def scalable_tree(config: T5Config, arrays: FloatArrays, *, scan_axis: int | None) -> dict[str, np.ndarray]:
    """Returns weights with separate heads in attention kernels, and stacked layers unless `scan_axis` is None."""
    tree = {name: _heads_apart(config, name, array) for name, array in arrays.items()}
    if scan_axis is None:
        return tree
    for stack, depth in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        for name in [name for name in tree if name.startswith(f"{stack}/layers_0/")]:
            rest = name.removeprefix(f"{stack}/layers_0/")
            layers = [tree.pop(f"{stack}/layers_{index}/{rest}") for index in range(depth)]
            tree[f"{stack}/{stack}/{rest}"] = np.stack(layers, scan_axis)
    return tree


def _heads_apart(config: T5Config, name: str, array: np.ndarray) -> np.ndarray:
    if re.search(r"attention/(query|key|value)/", name):
        return array.reshape(config.emb_dim, config.num_heads, config.head_dim)
    if re.search(r"attention/out/", name):
        return array.reshape(config.num_heads, config.head_dim, config.emb_dim)
    return array
