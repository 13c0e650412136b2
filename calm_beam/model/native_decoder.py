"""A decoder packed for native code: `native/layer.c` and `native/head.c`.

It is for float32, on one device, and holds a packed copy of the weights. In other cases XLA computes instead.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calm_beam.model.native import library
from calm_beam.model.native.structures import CACHED_WEIGHTS
from calm_beam.precision import Precision

from .architecture import ModelConfig


def why_not_for(config: ModelConfig, precision: Precision, *, devices: int) -> str | None:
    """Returns the reason why native code does not run a model in a precision on so many devices; None if it may.

    It does not check whether this machine has native code; `library` does.
    """
    if precision.dtype != "float32":
        return f"it computes in float32, and the model is to compute in {precision.dtype}"
    if devices != 1:
        return f"it is for a model on one device, and {devices} devices are to share one"
    return None


def packed_bytes(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], *, has_exact_heads: bool) -> int:
    """Returns the bytes of the packed copy of weights, in addition to the weights as they were read.

    Args:
      config: Sizes of the model.
      shapes: Name and shape of each of its parameters.
      has_exact_heads: Whether the copy includes heads, and not only layers.
    """
    layers = sum(math.prod(shape) for name, shape in shapes.items() if "/layers_" in name)
    heads = (config.num_decoder_layers if config.exit_heads else 1) if has_exact_heads else 0
    return 4 * (layers + heads * config.vocab_size * config.emb_dim)


_NOT_IN_STEPS = ("encoder_decoder_attention/key/", "encoder_decoder_attention/value/")


def runs_steps(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns whether native code is faster with whole steps in one call: the weights of a layer fit in a cache.

    Rows then need not wait for each other, and a prompt by itself takes all its steps in one call.

    Args:
      shapes: Name and shape of each of the model's parameters.
    """
    kernels = (
        math.prod(shape)
        for name, shape in shapes.items()
        if name.startswith("decoder/layers_0/") and not any(part in name for part in _NOT_IN_STEPS)
    )
    return sum(kernels) <= CACHED_WEIGHTS


def norms_before_heads(config: ModelConfig, decoder: Mapping[str, Any]) -> list[Any]:
    """Returns the parameters of the norm before the head after each layer: its own, or the final one."""
    last = config.num_decoder_layers
    own = [decoder[f"exit_norms_{index}"] for index in range(last - 1)] if config.exit_norms else []
    return own + [decoder["decoder_norm"]] * (last - len(own))


def classifier_of(config: ModelConfig, decoder: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns kernel and bias of the exit classifier among a decoder's parameters, if it has one."""
    if not config.exit_classifier:
        return None
    return np.asarray(decoder["meta_cls"]["kernel"]), np.asarray(decoder["meta_cls"]["bias"])


class Packing:
    """Packs the weights of layers and heads, and keeps references to the arrays at their addresses."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def address(self, values: Any) -> int:
        """Returns the address of float32 numbers, which stays valid."""
        held = np.ascontiguousarray(values, np.float32)
        self._kept.append(held)
        return int(held.ctypes.data)

    def matrix(self, kernel: Any) -> library.Matrix:
        """Returns a kernel, [in, out], packed."""
        panels = library.packed(np.asarray(kernel))
        self._kept.append(panels)
        return library.matrix(panels, kernel.shape[1])


@dataclasses.dataclass(frozen=True, eq=False)
class NativeDecoder:
    """A model's decoder, packed for native code.

    Attributes:
      layers: Weights of each layer.
      prompt_layers: Layers that tokens of prompts run through: the encoder's, or the decoder's but the last.
      source_layers: Layers whose keys and values of sources are made of the last prompt layer's output: the decoder's
        cross-attention; without an encoder, only the last layer, since the others made theirs.
      rows_of_prompts: One of `library.ROWS`.
      embedding: float32, shape (vocabulary, width).
      norms: float32, each (width,). The scale of the norm before the head after each layer.
      factors: Factor of normed states before the head after each layer.
      epsilon: Number that norms before heads add to the mean square.
      embedding_factor: Factor of embeddings.
      frequencies: float32, shape (head_dim / 2,). Radians by which a position turns each pair of a head's numbers; None
        without rotary positions.
      turn_factor: Factor of their cosines and sines.
      packing: Owner of the arrays of weights.
      classifier: float32, the kernel, (width, 1 or 2), and the bias of the exit classifier; None if there is none.
    """

    layers: Sequence[library.Layer]
    _: dataclasses.KW_ONLY
    prompt_layers: Sequence[library.Layer]
    source_layers: Sequence[library.Layer]
    rows_of_prompts: str
    embedding: np.ndarray
    norms: Sequence[np.ndarray]
    factors: Sequence[float]
    epsilon: float
    packing: Packing
    classifier: tuple[np.ndarray, np.ndarray] | None = None
    embedding_factor: float = 1.0
    frequencies: np.ndarray | None = None
    turn_factor: float = 1.0

    def embedded(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the embeddings of tokens, (rows,); NaN for unknown ids, so that their prompts alone are reported."""
        is_known = (tokens >= 0) & (tokens < len(self.embedding))
        embedded: np.ndarray = self.embedding[np.where(is_known, tokens, 0)]
        embedded[~is_known] = np.nan
        return embedded if self.embedding_factor == 1 else embedded * np.float32(self.embedding_factor)

    def turns(self, positions: np.ndarray) -> np.ndarray | None:
        """Returns cosines and sines for positions, (prompts,), for `library.Stack.set_turns`."""
        if self.frequencies is None:
            return None
        angles = positions[:, None].astype(np.float32) * self.frequencies
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(self.turn_factor)

    def head(self, layer: int, weights: tuple[Any, int]) -> library.Head:
        """Returns the head after a layer, packed from the network's `head_weights`."""
        kernel, vocab_axis = weights
        return library.Head(
            self.packing.matrix(np.moveaxis(np.asarray(kernel), vocab_axis, 1)),
            self.packing.address(self.norms[layer - 1]),
            self.epsilon,
            self.factors[layer - 1],
        )
