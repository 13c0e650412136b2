"""Rows of a batch, computed by XLA: whatever the number, in tiles of one size, and so by one program of each step."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.decoding.branches import Branches
from calm_beam.decoding.decisions import Decisions
from calm_beam.decoding.engine import RunStep, Slots
from calm_beam.decoding.padding import padded, parts_of
from calm_beam.decoding.paths import Rows
from calm_beam.decoding.weights import Weights, zeros
from calm_beam.decoding.work import Work
from calm_beam.exits.measures import Need
from calm_beam.exits.propagations import PassedOn
from calm_beam.model import ArrayType
from calm_beam.model.interface import EarlyExitModel

from . import steps
from .attended import grouped
from .heads import HeadDecisions
from .rows import AskedRows, CopiedRows, EmbeddedRows, LayerRows, SkippedRows
from .sources import sources_by_width
from .tiles import whole_tiles

# Most rows of a call: beyond that, what each call is told of them is itself a lot.
_MOST_ROWS = 4096


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
        config, dtype = model.config, model.precision.dtype
        self._layers = config.num_decoder_layers
        # Kept there: to be told a number takes a device as long as to be told of all rows.
        self._numbers = [jnp.int32(layer) for layer in range(self._layers + 1)]
        inner = config.num_kv_heads * config.head_dim
        self._rows = whole_tiles(min(_MOST_ROWS, slots.num_lanes))
        self._sources = sources_by_width(model, weights, slots)
        self._heads = HeadDecisions(model, branches, weights=weights, rows=self._rows)
        states = ArrayType((self._layers + 1, slots.num_lanes, config.emb_dim), dtype)
        (self._states,) = zeros((states,))
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
        for part in parts_of(len(lanes), self._rows):
            self._states = steps.embed(
                self._model,
                self._weights.embedding,
                states=self._states,
                rows=EmbeddedRows(
                    lanes=self._padded_lanes(lanes[part]), tokens=padded(tokens[part], self._rows)
                ).joined(),
            )

    def run_layers(self, layers: range, rows: Rows, *, below: np.ndarray) -> tuple[np.ndarray, Work]:
        """Runs layers for rows, and returns their confidences by measures that are made of states."""
        measured = np.zeros((len(self._branches.measures), len(layers), len(rows.lanes)), np.float32)
        work = Work()
        # All parts are started before the first is waited for.
        parts = [
            (layer, chosen, self._run(layer, rows, chosen=chosen, width=width, below=inputs))
            for layer in layers
            for inputs in [below if layer == layers.start else rows.lanes]
            for width, chosen in self._by_width(rows)
        ]
        for layer, chosen, confidences in parts:
            count = len(chosen)
            work += Work(layer_rows=count, padded_rows=whole_tiles(count) - count)
            # Where logits decide, nobody waits for a layer.
            made = np.asarray(confidences) if self._of_states else ()
            for index, values in zip(self._of_states, made, strict=True):
                measured[index, layer - layers.start, chosen] = values[:count]
        return measured, work

    def decide(self, layers: np.ndarray, lanes: np.ndarray, **compared: np.ndarray) -> tuple[list[Decisions], Work]:
        """Returns what the heads decide of states, and what was asked for it."""
        return self._heads.of(self._look_up, layers=layers, lanes=lanes, **compared)

    def _look_up(self, layers: np.ndarray, lanes: np.ndarray, size: int) -> tuple[jax.Array, np.ndarray]:
        beyond = self._slots.num_lanes
        asked = AskedRows(lanes=padded(lanes, size, fill=beyond), layers=padded(layers, size))
        return self._states, asked.joined()

    def keep_skipped(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        """Gives nodes of the layers that tokens skipped what these make of states."""
        for part in parts_of(len(lanes), self._rows):
            self._keep_part(layers[part], lanes[part], nodes[:, part])

    def _keep_part(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        self._cache[1:] = steps.fill_skipped(
            self._model,
            self._weights.layers[1:],
            terms=[self._weights.path_terms(layer) for layer in range(2, len(self._cache) + 1)],
            cache=self._cache[1:],
            states=self._states,
            rows=SkippedRows(
                lanes=self._padded_lanes(lanes),
                layers=padded(layers, self._rows),
                **self._position(lanes // self._slots.lanes),
                nodes=self._padded_nodes(nodes),
            ).joined(),
        )

    def copy_skipped(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        """Gives them what the layer of each state has kept itself."""
        for part in parts_of(len(lanes), self._rows):
            self._copy_part(layers[part], lanes[part], nodes[:, part])

    def _copy_part(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        self._cache = steps.copy_skipped(
            self._model,
            self._cache,
            rows=CopiedRows(
                layers=padded(layers, self._rows),
                source_nodes=padded(self._slots.tree.newest(layers, lanes), self._rows),
                nodes=self._padded_nodes(nodes),
            ).joined(),
        )

    def _padded_nodes(self, nodes: np.ndarray) -> np.ndarray:
        """Returns nodes that are given by layer and row, by row and layer."""
        return padded(nodes.T, self._rows, fill=self._slots.tree.capacity)

    def _padded_lanes(self, lanes: np.ndarray) -> np.ndarray:
        return padded(lanes, self._rows, fill=self._slots.num_lanes)

    def run_on_padding(self) -> None:
        """Compiles whatever prompts may need."""
        none = np.zeros(0, np.int32)
        rows = Rows(none, none, steps=none, nodes=none)
        self.embed(np.full(1, self._slots.num_lanes), np.zeros(1, np.int32))
        skipped = none, none, np.zeros((self._layers - 1, 0), np.int32)
        if self._branches.passed_on is PassedOn.KEYS_VALUES:
            self._copy_part(*skipped)
        else:
            self._keep_part(*skipped)
        self._heads.run_on_padding(self._look_up)
        for width in self._sources:
            self._run(1, rows, chosen=none, width=width, below=none)
        jax.block_until_ready(self._states)

    def _layer_parameters(self, layer: int) -> dict[str, Any]:
        """Returns what a layer is made of, and what is measured after it."""
        parameters = {"layer": self._weights.layers[layer - 1]}
        if self._branches.indices(Need.CLASSIFIER):
            parameters["classifier"] = self._weights.classifier
        return parameters

    def _run(self, layer: int, rows: Rows, *, chosen: np.ndarray, width: int, below: np.ndarray) -> jax.Array:
        """Runs a layer for chosen rows, and returns their confidences by each measure that is made of states, padded.

        Args:
          layer: Which.
          rows: All of that layer.
          chosen: Some of them, as many as go into a call.
          width: Of their sources.
          below: Of all of them, where their inputs stand in the entry below.
        """
        sources, slots, size = self._sources[width], self._slots, self._rows
        of_slot, lanes = rows.slots[chosen], rows.lanes[chosen]
        confidences: jax.Array
        self._states, self._cache[layer - 1], confidences = steps.run_layer(
            self._model,
            tuple(self._of_states.values()),
            parameters=self._layer_parameters(layer),
            states=self._states,
            cache=self._cache[layer - 1],
            keys_values=sources.keys_values[layer - 1],
            source_mask=sources.mask,
            terms=self._weights.path_terms(layer),
            layer=self._numbers[layer],
            rows=LayerRows(
                lanes=self._padded_lanes(lanes),
                below=padded(below[chosen], size),
                nodes=padded(rows.nodes[chosen], size, fill=slots.tree.capacity),
                paths=padded(slots.tree.paths(layer, lanes, length=slots.steps), size),
                **self._position(of_slot),
                **grouped(slots.places[of_slot], size),
            ).joined(),
        )
        return confidences

    def _position(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Returns where the newest tokens of slots stand, padded."""
        return {
            "steps": padded(self._slots.tree.step[slots], self._rows),
            "prompt_lengths": padded(self._slots.lengths[slots], self._rows, fill=1),
        }

    def _by_width(self, rows: Rows) -> Iterator[tuple[int, np.ndarray]]:
        """Yields rows that are run together, with the width of their sources."""
        widths = self._slots.widths[rows.slots]
        for width in np.unique(widths).tolist():
            chosen = np.flatnonzero(widths == width)
            for part in parts_of(len(chosen), self._rows):
                yield width, chosen[part]
