"""Keys and values of prompts for native code: made by XLA while that runs, and taken over once they are needed."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from calm_beam.decoding.engine import Slots
from calm_beam.decoding.weights import Weights, prefixes_by_width
from calm_beam.decoding.xla import steps
from calm_beam.model.interface import EarlyExitModel, KeysValues
from calm_beam.model.native import calls


@dataclasses.dataclass(frozen=True, eq=False)
class _Coming:
    """What XLA makes of prompts.

    Attributes:
      width: Which sources they are of.
      places: shape (prompts,). Where these stand.
      keys_values: Of every layer, each (rows, heads of keys, positions, head_dim); rows of padding behind the prompts.
      mask: bool, shape (rows, positions).
    """

    width: int
    places: np.ndarray
    keys_values: Sequence[KeysValues]
    mask: Any


class SourcesOfWidth:
    """Sources of one padded width: of every layer, and which positions are of a prompt."""

    def __init__(self, model: EarlyExitModel, *, width: int, places: int) -> None:
        """Makes room."""
        config = model.config
        shape = places, config.num_kv_heads, width, config.head_dim
        self.keys_values = [(calls.aligned(shape), calls.aligned(shape)) for _ in range(config.num_decoder_layers)]
        self.mask = np.zeros((places, width), bool)

    def take_over(self, coming: _Coming) -> None:
        """Copies what has been made; waits for it."""
        places, count = coming.places, len(coming.places)
        mask = np.asarray(coming.mask)[:count]
        length = mask.shape[1]
        # What is masked is not looked at.
        self.mask[places, :length], self.mask[places, length:] = mask, False
        for pair, made in zip(self.keys_values, coming.keys_values, strict=True):
            for store, values in zip(pair, made, strict=True):
                store[places, :, :length] = np.asarray(values)[:count]


class NativeSources:
    """Sources of all prompts that an engine has been given."""

    def __init__(self, model: EarlyExitModel, weights: Weights, slots: Slots) -> None:
        """Makes room."""
        self._model, self._weights, self._slots = model, weights, slots
        self._by_width = {
            width: SourcesOfWidth(model, width=width, places=places) for width, places in slots.sources.items()
        }
        self._prefixes = prefixes_by_width(model, weights, slots)
        self._index_of_width = np.zeros(max(slots.sources) + 1, np.int32)
        self._index_of_width[list(slots.sources)] = np.arange(len(slots.sources))
        # In the order in which XLA makes them; and which places they are for.
        self._coming: collections.deque[_Coming] = collections.deque()
        self._is_coming = np.zeros((len(slots.sources), max(slots.sources.values())), bool)
        self.of_slot = np.zeros(len(slots.places), np.int32)

    def prefill(self, width: int, source_tokens: np.ndarray, *, lengths: np.ndarray, places: np.ndarray) -> None:
        """Has XLA go through prompts; does not wait for it."""
        here = places[places < self._slots.sources[width]]
        index = self._index_of_width[width]
        # Whoever was there before may have ended without a step, so that nobody has asked for that yet.
        self._take_over(index, here)
        keys_values, mask = steps.prefill(
            self._model,
            self._weights.all,
            source_tokens=source_tokens,
            lengths=lengths,
            prefix=self._prefixes.get(width, ()),
        )
        if not len(here):
            # What is compiled on padding is nobody's: it goes at once, and if it fails, that is told here.
            jax.block_until_ready((keys_values, mask))
            return
        self._is_coming[index, here] = True
        self._coming.append(_Coming(width, here, keys_values, mask))

    def see(self, slots: np.ndarray) -> None:
        """Sees that the sources of slots are there."""
        self.of_slot[:] = self._index_of_width[self._slots.widths]
        self._take_over(self.of_slot[slots], self._slots.places[slots])

    def _take_over(self, widths: np.ndarray | np.int32, places: np.ndarray) -> None:
        """Takes over what is made, in turn, until nothing is coming for places, given with indices of widths."""
        while self._coming and self._is_coming[widths, places].any():
            coming = self._coming[0]
            self._by_width[coming.width].take_over(coming)
            self._is_coming[self._index_of_width[coming.width], coming.places] = False
            self._coming.popleft()

    def as_seen(self) -> list[Any]:
        """Returns what they are to native code, by layer: an array of `calls.Sources`, by the index of their width."""
        of_width = [
            [
                calls.Sources(keys.ctypes.data, values.ctypes.data, sources.mask.ctypes.data, width)
                for keys, values in sources.keys_values
            ]
            for width, sources in self._by_width.items()
        ]
        return [(calls.Sources * len(of_width))(*of_layer) for of_layer in zip(*of_width, strict=True)]
