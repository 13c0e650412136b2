"""Rows of a batch, computed by native code that changes arrays in place: no padding, nothing compiled, and no copies.

Prompts still go through XLA: they are many tokens at a time, which it is fast at.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from calm_beam.exits.logit_summary import Summary
from calm_beam.exits.measures import Need, is_own
from calm_beam.exits.rule import ExitRule
from calm_beam.model.interface import EarlyExitModel
from calm_beam.native import calls

from . import device_steps
from .decisions import Decisions
from .engine import Slots
from .head_decisions import HeadDecisions
from .lanes import Rows
from .padding import row_parts
from .weights import Sources, Weights, decides_natively, sources_by_width
from .work import Work


class NativeEngine:
    """See `Engine`."""

    def __init__(self, model: EarlyExitModel, rule: ExitRule, *, weights: Weights, slots: Slots) -> None:
        """Makes room; arguments are those of `XlaEngine`, and the weights are packed for native code."""
        assert weights.native is not None, "see `engine_for`"
        config = model.config
        self._model, self._weights, self._decoder, self._slots = model, weights, weights.native, slots
        self._measure = rule.measure()
        self._sources = sources_by_width(model, weights, slots)
        self._index_of_width = np.zeros(max(slots.sources) + 1, np.int32)
        self._index_of_width[list(slots.sources)] = np.arange(len(slots.sources))
        # What each layer's sources are to native code; None where prompts have come, or stores moved, since.
        self._seen: list[Any] | None = None
        self._positions, self._source_of = (np.zeros(len(slots.places), np.int32) for _ in range(2))
        inner = config.num_kv_heads * config.head_dim
        self._states = calls.aligned((config.num_decoder_layers + 1, slots.num_lanes, config.emb_dim))
        self._cache = [
            (calls.aligned((slots.tree.capacity, inner)), calls.aligned((slots.tree.capacity, inner)))
            for _ in range(config.num_decoder_layers)
        ]
        self._rows = self._rows_by_layer()
        self._heads = HeadDecisions(model, rule.confidence, weights=weights, row_sizes=slots.row_sizes)
        self._decides_natively = not weights.is_certified and decides_natively(self._measure)

    def prefill(self, width: int, source_tokens: np.ndarray, *, lengths: np.ndarray, places: np.ndarray) -> None:
        """Gives places keys and values of prompts."""
        self._seen = None
        self._sources[width].admit(self._model, self._weights, source_tokens, lengths=lengths, places=places)

    def grow(self, added: int) -> None:
        """Adds nodes to the store of every layer."""
        for layer, pair in enumerate(self._cache):
            wider = [calls.aligned((len(values) + added, values.shape[1])) for values in pair]
            for new, old in zip(wider, pair, strict=True):
                new[: len(old)] = old
            self._cache[layer] = wider[0], wider[1]
        self._rows, self._seen = self._rows_by_layer(), None

    def _rows_by_layer(self) -> list[calls.Rows]:
        """Returns rows of every layer, none yet, where these stand now."""
        slots = self._slots
        return [
            calls.rows_of(
                inputs=self._states[index],
                outputs=self._states[index + 1],
                store=store,
                paths=slots.tree.all_paths(index + 1),
                prompt_lanes=slots.lanes,
                steps=slots.tree.step,
                positions=self._positions,
                source_of=self._source_of,
                places=slots.places,
            )
            for index, store in enumerate(self._cache)
        ]

    def embed(self, lanes: np.ndarray, tokens: np.ndarray) -> None:
        """Puts the embeddings of tokens into entry 0."""
        self._states[0, lanes] = self._decoder.embedded(tokens)
        # With which every step begins.
        self._positions[:] = self._slots.lengths - 1 + self._slots.tree.step
        self._turns = self._decoder.turns(self._positions)
        if self._seen is None:
            self._see_sources()
        for rows in self._rows:
            calls.set_turns(rows, self._turns)

    def run_layer(self, layer: int, rows: Rows, *, below: np.ndarray) -> tuple[np.ndarray, Work]:
        """Runs a layer for its rows, and returns their confidences if these are made of states."""
        of_layer = self._rows[layer - 1]
        calls.run_layer(self._decoder.layers[layer - 1], of_layer, below=below, lanes=rows.lanes, nodes=rows.nodes)
        return self._measured(layer, rows.lanes, below), Work(layer_rows=len(rows.lanes))

    def decide(self, layers: np.ndarray, lanes: np.ndarray, **compared: np.ndarray) -> tuple[Decisions, Work]:
        """Returns what the heads decide of states, and what was asked for it."""
        if not self._decides_natively:
            return self._heads.of(self._look_up, layers=layers, lanes=lanes, **compared)
        tokens, facts = np.empty(len(lanes), np.int32), np.empty((4, len(lanes)), np.float32)
        entries = self._entries(layers, lanes)
        for head, rows in self._weights.heads_of(layers):
            assert head.native is not None, "made where no other form was chosen"
            tokens[rows], facts[:, rows] = calls.summarise(head.native, states=self._states, entries=entries[rows])
        confidences = self._confidences(tokens, facts)
        decided = Decisions.exact(tokens, confidences=confidences, is_finite=np.isfinite(facts[0]))
        return decided, Work(projection_rows=len(lanes))

    def _look_up(self, layers: np.ndarray, lanes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns some states as all that there are: XLA would copy the rest."""
        return self._some(layers, lanes, size)[None], np.zeros(size, np.int32), np.arange(size, dtype=np.int32)

    def _some(self, layers: np.ndarray | int, lanes: np.ndarray, size: int) -> np.ndarray:
        """Returns states, padded to a size."""
        some = np.zeros((size, self._states.shape[2]), np.float32)
        some[: len(lanes)] = self._states[layers, lanes]
        return some

    def _measured(self, layer: int, lanes: np.ndarray, below: np.ndarray) -> np.ndarray:
        """Returns the confidences of rows, if these are made of states."""
        measure, output = self._measure, self._states[layer]
        if measure.needs is Need.STATES:
            if is_own(measure.name):
                return self._measured_by_xla(layer, lanes, below)
            return _quietly(measure.confidence, output[lanes], self._states[layer - 1, below], layer)
        if measure.needs is Need.CLASSIFIER:
            return _quietly(measure.confidence, self._decoder.exit_scores(output[lanes]))
        return np.zeros(len(lanes), np.float32)

    def _measured_by_xla(self, layer: int, lanes: np.ndarray, below: np.ndarray) -> np.ndarray:
        """Returns the same by a measure of the user's, who writes it for JAX."""
        measured = np.empty(len(lanes), np.float32)
        for part, size in row_parts(len(lanes), self._slots.row_sizes):
            output, inputs = self._some(layer, lanes[part], size), self._some(layer - 1, below[part], size)
            confidences = device_steps.measure_states(self._measure.name, output, inputs, np.int32(layer))
            measured[part] = np.asarray(confidences)[: len(measured[part])]
        return measured

    def _confidences(self, tokens: Any, facts: Any) -> np.ndarray:
        """Returns the confidences that a measure makes of what is known of the logits of rows."""
        if self._measure.of_summary is None:
            return np.zeros(len(tokens), np.float32)
        largest, second, total, weighted = facts
        summary = Summary(largest, tokens, second, total, weighted)
        return _quietly(self._measure.of_summary, summary, self._model.config.vocab_size)

    def keep_skipped(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        """Gives nodes of the layers that tokens skipped what these make of states."""
        calls.keep_skipped(
            self._decoder.layers[1:],
            self._cache[1:],
            states=self._states,
            entries=self._entries(layers, lanes),
            nodes=nodes,
            turns=self._turns,
            prompts=lanes // self._slots.lanes,
        )

    def copy_skipped(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        """Gives them what the layer of each state has kept itself."""
        newest = self._slots.tree.newest(layers, lanes)
        for kept in zip(*self._cache, strict=True):
            made = np.empty((len(lanes), kept[0].shape[1]), np.float32)
            for layer in np.unique(layers).tolist():
                made[layers == layer] = kept[layer - 1][newest[layers == layer]]
            for index, store in enumerate(kept[1:]):
                is_skipped = nodes[index] < self._slots.tree.capacity
                store[nodes[index, is_skipped]] = made[is_skipped]

    def run_on_padding(self, slots: int) -> None:
        """Compiles whatever up to so many prompts may need of XLA: confidences, and other heads than native ones."""
        sizes = sorted({size for rows in range(1, slots + 1) for _, size in row_parts(rows, self._slots.row_sizes)})
        if not self._decides_natively:
            self._heads.run_on_padding(self._look_up, sizes)
        if self._measure.needs is Need.STATES and is_own(self._measure.name):
            for size in sizes:
                self._measured_by_xla(1, np.zeros(size, np.int32), np.zeros(size, np.int32))

    def _entries(self, layers: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Returns where states stand among those of all layers."""
        entries: np.ndarray = layers.astype(np.int64) * self._states.shape[1] + lanes
        return entries

    def _see_sources(self) -> None:
        jax.block_until_ready([(sources.keys_values, sources.mask) for sources in self._sources.values()])
        self._source_of[:] = self._index_of_width[self._slots.widths]
        of_width = [self._as_seen(sources) for sources in self._sources.values()]
        self._seen = [(calls.Sources * len(of_width))(*of_layer) for of_layer in zip(*of_width, strict=True)]
        for rows, sources in zip(self._rows, self._seen, strict=True):
            calls.set_sources(rows, sources)

    def _as_seen(self, sources: Sources) -> list[calls.Sources]:
        """Returns what the sources of a width are to native code, by layer.

        Addresses alone: an array that was looked at otherwise is copied where it is given away.
        """
        mask = sources.mask.unsafe_buffer_pointer()
        return [
            calls.Sources(keys.unsafe_buffer_pointer(), values.unsafe_buffer_pointer(), mask, sources.width)
            for keys, values in sources.keys_values
        ]


def _quietly(confidence: Callable[..., Any], *arguments: Any) -> np.ndarray:
    """Returns the confidences of rows, of which some may be no numbers: whoever asks looks for that."""
    with np.errstate(all="ignore"):
        confidences: np.ndarray = confidence(*arguments)
    return confidences
