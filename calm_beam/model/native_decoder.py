"""A decoder as native code takes it: `native/layer.c` and `native/head.c`.

It is for float32, on one device, and for architectures that say how their layers are packed
(`Architecture.native_decoder`). Elsewhere XLA does the same.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from calm_beam.arithmetic import Arithmetic
from calm_beam.native import calls, library


def is_for(arithmetic: Arithmetic, *, devices: int) -> bool:
    """Returns whether a model of an arithmetic, on so many devices, may be run by native code on this machine."""
    return arithmetic.dtype == "float32" and devices == 1 and library.is_available()


class Packing:
    """Packs what layers and heads are made of, and keeps the arrays that their addresses are of."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def address(self, values: Any) -> int:
        """Returns where float32 numbers stand from now on."""
        held = np.ascontiguousarray(values, np.float32)
        self._kept.append(held)
        return int(held.ctypes.data)

    def matrix(self, kernel: Any) -> calls.Matrix:
        """Returns a kernel, [in, out], packed."""
        panels = calls.packed(np.asarray(kernel))
        self._kept.append(panels)
        return calls.matrix(panels, kernel.shape[1])


@dataclasses.dataclass(frozen=True, eq=False)
class NativeDecoder:
    """What native code is given of a model.

    Attributes:
      layers: Weights of each layer.
      embedding: float32, shape (vocabulary, width).
      norms: float32, each (width,). The scale of the norm before the head after each layer.
      factors: What normed states are multiplied by for it.
      epsilon: What is added to their mean square.
      packing: What holds the weights.
    """

    layers: Sequence[calls.Layer]
    _: dataclasses.KW_ONLY
    embedding: np.ndarray
    norms: Sequence[np.ndarray]
    factors: Sequence[float]
    epsilon: float
    packing: Packing

    def head(self, layer: int, weights: tuple[Any, int]) -> calls.Head:
        """Returns the head after a layer, of the network's `head_weights`."""
        kernel, vocab_axis = weights
        return calls.Head(
            self.packing.matrix(np.moveaxis(np.asarray(kernel), vocab_axis, 1)),
            self.packing.address(self.norms[layer - 1]),
            self.epsilon,
            self.factors[layer - 1],
        )
