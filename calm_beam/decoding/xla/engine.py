"""Rows of a batch, computed by XLA: padded to few sizes, since each is compiled for every step."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.decoding.branches import Branches
from calm_beam.decoding.decisions import Decisions
from calm_beam.decoding.engine import RunStep, Slots
from calm_beam.decoding.padding import all_path_lengths, padded, path_lengths, row_parts, sizes_up_to
from calm_beam.decoding.paths import Rows
from calm_beam.decoding.weights import Weights, zeros
from calm_beam.decoding.work import Work
from calm_beam.exits.measures import Need
from calm_beam.exits.propagations import PassedOn
from calm_beam.model import ArrayType, architecture_of
from calm_beam.model.interface import EarlyExitModel, Position

from . import steps
from .heads import HeadDecisions
from .sources import sources_by_width

# Most rows of a prompt that attend to its source together: room for as many is made for every prompt.
_RANKS = 8
# Bytes of keys and values that a host reads in the time that a call takes.
_CALL_BYTES = 4 << 20


class XlaEngine:
    """See `Engine`."""

    whole_step: RunStep | None = None

    def __init__(self, model: EarlyExitModel, branches: Branches, *, weights: Weights, slots: Slots) -> None:
        """Makes room.

        Args:
          model: The network.
          branches: How exits of each lane are decided.
          weights: Of the model.
          slots: Where prompts will stand.
        """
        self._model, self._branches, self._weights, self._slots = model, branches, weights, slots
        of_states = branches.indices(Need.STATES, Need.CLASSIFIER)
        self._of_states = {index: branches.rules[index].confidence for index in of_states}
        config, dtype = model.config, model.arithmetic.dtype
        self._layers = config.num_decoder_layers
        self._ranks = min(_RANKS, slots.lanes)
        inner = config.num_kv_heads * config.head_dim
        self._free_positions = _CALL_BYTES // (2 * inner * model.arithmetic.number_bytes)
        self._sources = sources_by_width(model, weights, slots)
        self._heads = HeadDecisions(model, branches, weights=weights, row_sizes=slots.row_sizes)
        pending = architecture_of(config).pending(config, model.arithmetic)
        *made, self._states = zeros(
            (
                *(ArrayType((slots.num_lanes, *of_row.shape), of_row.dtype) for of_row in pending.values()),
                ArrayType((self._layers + 1, slots.num_lanes, config.emb_dim), dtype),
            ),
        )
        self._pending = dict(zip(pending, made, strict=True))
        store = ArrayType((slots.tree.capacity, inner), dtype)
        stores = zeros((store,) * (2 * self._layers), axis=1, of=config.num_kv_heads)
        self._cache = list(zip(stores[::2], stores[1::2], strict=True))

    def prefill(self, width: int, source_tokens: np.ndarray, *, lengths: np.ndarray, places: np.ndarray) -> None:
        """Gives places keys and values of prompts."""
        self._sources[width].admit(self._model, self._weights, source_tokens, lengths=lengths, places=places)

    def grow(self, added: int) -> None:
        """Adds nodes to the store of every layer."""
        wider = ((0, added), (0, 0))
        # Layer by layer, so that no more than one is held twice.
        for layer, (keys, values) in enumerate(self._cache):
            self._cache[layer] = jnp.pad(keys, wider), jnp.pad(values, wider)

    def embed(self, lanes: np.ndarray, tokens: np.ndarray) -> None:
        """Puts the embeddings of tokens into entry 0."""
        for part, size in self._parts(len(lanes)):
            self._embed_part(lanes[part], tokens[part], size)

    def _embed_part(self, lanes: np.ndarray, tokens: np.ndarray, size: int) -> None:
        self._states = steps.embed(
            self._model,
            self._weights.embedding,
            states=self._states,
            tokens=padded(tokens, size),
            lanes=padded(lanes, size, fill=self._slots.num_lanes),
        )

    def run_layers(self, layers: range, rows: Rows, *, below: np.ndarray) -> tuple[np.ndarray, Work]:
        """Runs layers for rows, and returns their confidences by measures that are made of states."""
        measured = np.zeros((len(self._branches.measures), len(layers), len(rows.lanes)), np.float32)
        work = Work()
        # All parts are started before the first is waited for.
        parts = [
            (layer, *part)
            for layer in layers
            for part in self._run_parts(layer, rows, below if layer == layers.start else rows.lanes)
        ]
        for layer, chosen, size, confidences in parts:
            work += Work(layer_rows=len(chosen), padded_rows=size - len(chosen))
            for index, made in zip(self._of_states, confidences, strict=True):
                measured[index, layer - layers.start, chosen] = np.asarray(made)[: len(chosen)]
        return measured, work

    def decide(self, layers: np.ndarray, lanes: np.ndarray, **compared: np.ndarray) -> tuple[list[Decisions], Work]:
        """Returns what the heads decide of states, and what was asked for it."""
        return self._heads.of(self._look_up, layers=layers, lanes=lanes, **compared)

    def _look_up(self, layers: np.ndarray, lanes: np.ndarray, size: int) -> tuple[jax.Array, np.ndarray, np.ndarray]:
        return self._states, padded(layers, size), padded(lanes, size)

    def keep_skipped(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        """Gives nodes of the layers that tokens skipped what these make of states."""
        for part, size in self._parts(len(lanes)):
            self._keep_part(layers[part], lanes[part], nodes[:, part], size=size)

    def _keep_part(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray, *, size: int) -> None:
        self._cache[1:] = steps.fill_skipped(
            self._model,
            self._weights.layers[1:],
            cache=self._cache[1:],
            states=self._states,
            layers=padded(layers, size),
            lanes=padded(lanes, size),
            nodes=padded(nodes.T, size, fill=self._slots.tree.capacity).T,
            position=self._position(lanes // self._slots.lanes, size),
        )

    def copy_skipped(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        """Gives them what the layer of each state has kept itself."""
        for part, size in self._parts(len(lanes)):
            self._copy_part(layers[part], lanes[part], nodes[:, part], size=size)

    def _copy_part(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray, *, size: int) -> None:
        self._cache = steps.copy_skipped(
            self._model,
            self._cache,
            source_layers=padded(layers, size),
            source_nodes=padded(self._slots.tree.newest(layers, lanes), size),
            nodes=padded(nodes.T, size, fill=self._slots.tree.capacity).T,
        )

    def run_on_padding(self, slots: int, *, asked: int) -> None:
        """Compiles whatever prompts may need."""
        none = np.zeros(0, np.int32)
        rows = Rows(none, none, steps=none, nodes=none)
        row_sizes = self._slots.row_sizes
        sizes = sizes_up_to(slots, row_sizes)
        skipped = none, none, np.zeros((self._layers - 1, 0), np.int32)
        for size in sizes:
            self._embed_part(none, none, size)
            if self._branches.passed_on is PassedOn.KEYS_VALUES:
                self._copy_part(*skipped, size=size)
            else:
                self._keep_part(*skipped, size=size)
        self._heads.run_on_padding(self._look_up, sizes_up_to(asked, row_sizes))
        for size, length in itertools.product(sizes, all_path_lengths(self._slots.steps)):
            self._attend(1, rows, chosen=none, below=none, size=size, length=length)
        for width, sources in self._sources.items():
            for size in sizes_up_to(sources.places, row_sizes):
                is_gathered = size <= self._most_gathered(width)
                self._finish(1, rows, chosen=none, below=none, size=size, width=width, is_gathered=is_gathered)
        jax.block_until_ready(self._states)

    def _run_parts(
        self, layer: int, rows: Rows, below: np.ndarray
    ) -> Iterator[tuple[np.ndarray, int, Sequence[jax.Array]]]:
        """Runs a layer part by part, and yields each part's rows, what they were padded to, and their confidences.

        Each of its two steps has rows put together as it wants them.
        """
        for chosen, size, length in self._by_length(rows.steps):
            self._attend(layer, rows, chosen=chosen, below=below, size=size, length=length)
        for chosen, size, width, is_gathered in self._by_source(rows):
            confidences = self._finish(
                layer, rows, chosen=chosen, below=below, size=size, width=width, is_gathered=is_gathered
            )
            yield chosen, size, confidences

    def _layer_parameters(self, layer: int) -> dict[str, Any]:
        """Returns what a layer is made of, and what is measured after it."""
        parameters = {"layer": self._weights.layers[layer - 1]}
        if self._branches.indices(Need.CLASSIFIER):
            parameters["classifier"] = self._weights.classifier
        return parameters

    def _attend(self, layer: int, rows: Rows, *, chosen: np.ndarray, below: np.ndarray, size: int, length: int) -> None:
        """Runs a layer's attention to outputs for the chosen rows, padded to a size and a length of path.

        Args:
          layer: Which.
          rows: All of that layer.
          chosen: Some of them.
          below: Of all of them, where their inputs stand in the entry below.
          size: What the rows are padded to.
          length: What their paths are padded to.
        """
        self._pending, self._cache[layer - 1] = steps.attend_to_output(
            self._model,
            self._weights.layers[layer - 1],
            states=self._states,
            pending=self._pending,
            cache=self._cache[layer - 1],
            nodes=padded(rows.nodes[chosen], size, fill=self._slots.tree.capacity),
            paths=padded(self._slots.tree.paths(layer, rows.lanes[chosen], length=length), size),
            **self._at_layer(layer, rows, chosen=chosen, below=below, size=size),
        )

    def _at_layer(self, layer: int, rows: Rows, *, chosen: np.ndarray, below: np.ndarray, size: int) -> dict[str, Any]:
        """Returns what every step of a layer is told of it and of the chosen rows; arguments as of `_attend`."""
        return {
            "terms": self._weights.path_terms(layer),
            "layer": np.int32(layer),
            "below": padded(below[chosen], size),
            "lanes": padded(rows.lanes[chosen], size, fill=self._slots.num_lanes),
            "position": self._position(rows.slots[chosen], size),
        }

    def _position(self, slots: np.ndarray, size: int) -> Position:
        """Returns where the newest tokens of slots stand, padded to a size."""
        return Position(padded(self._slots.tree.step[slots], size), padded(self._slots.lengths[slots], size, fill=1))

    def _finish(
        self,
        layer: int,
        rows: Rows,
        *,
        chosen: np.ndarray,
        below: np.ndarray,
        size: int,
        width: int,
        is_gathered: bool,
    ) -> Sequence[jax.Array]:
        """Runs the rest of a layer for the chosen rows, and returns their confidences by each measure made of states.

        Args:
          layer: Which.
          rows: All of that layer.
          chosen: Some of them.
          below: Of all of them, where their inputs stand in the entry below.
          size: What the rows are padded to.
          width: Of their sources.
          is_gathered: Whether the source of each is gathered.
        """
        sources = self._sources[width]
        confidences: Sequence[jax.Array]
        self._states, confidences = steps.finish_layer(
            self._model,
            tuple(self._of_states.values()),
            num_ranks=self._ranks,
            is_gathered=is_gathered,
            parameters=self._layer_parameters(layer),
            states=self._states,
            pending=self._pending,
            keys_values=sources.keys_values[layer - 1],
            source_mask=sources.mask,
            places=padded(self._slots.places[rows.slots[chosen]], size, fill=sources.places),
            ranks=padded(_ranks(rows.slots)[chosen] % self._ranks, size),
            **self._at_layer(layer, rows, chosen=chosen, below=below, size=size),
        )
        return confidences

    def _parts(self, count: int) -> Iterator[tuple[slice, int]]:
        return row_parts(count, self._slots.row_sizes)

    def _by_length(self, steps: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
        """Yields rows that are run together, the size to pad them to, and the length of path that covers them."""
        lengths = path_lengths(steps, free=self._free_positions)
        for length in np.unique(lengths).tolist():
            chosen = np.flatnonzero(lengths == length)
            for part, size in self._parts(len(chosen)):
                yield chosen[part], size, min(length, self._slots.steps)

    def _by_source(self, rows: Rows) -> Iterator[tuple[np.ndarray, int, int, bool]]:
        """Yields rows that are run together, the size to pad them to, the width of their sources, and `is_gathered`.

        Many rows share what their sources need, so many of a prompt at a time. Where rows are few, that would be work
        for all sources: those of each row are gathered.
        """
        widths, ranks = self._slots.widths[rows.slots], _ranks(rows.slots)
        for width in np.unique(widths).tolist():
            chosen, most_gathered = np.flatnonzero(widths == width), self._most_gathered(width)
            parts = [(chosen[part], size) for part, size in self._parts(len(chosen))]
            if any(size > most_gathered for _, size in parts):
                blocks = ranks[chosen] // self._ranks
                parts = [
                    (chosen[blocks == block][part], size)
                    for block, count in enumerate(np.bincount(blocks).tolist())
                    for part, size in self._parts(count)
                ]
            for part, size in parts:
                yield part, size, width, size <= most_gathered

    def _most_gathered(self, width: int) -> int:
        """Returns how many rows have their sources gathered at most."""
        return self._sources[width].places // 4


def _ranks(slots: np.ndarray) -> np.ndarray:
    """Returns how many rows of the same slot stand before each row; rows are ordered by slot."""
    return np.arange(len(slots)) - np.searchsorted(slots, slots)
