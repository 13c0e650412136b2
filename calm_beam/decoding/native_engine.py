"""Rows of a batch, computed by native code that changes arrays in place: no padding, nothing compiled, and no copies.

Prompts still go through XLA: they are many tokens at a time, which it is fast at.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.model.interface import EarlyExitModel
from calm_beam.model.native_decoder import NativeDecoder
from calm_beam.native import calls

from . import device_steps
from .decisions import Decisions
from .engine import Placed
from .head_decisions import HeadDecisions
from .lanes import Rows
from .padding import row_parts
from .weights import Sources, Weights, decides_natively, sources_by_width
from .work import Work


class NativeEngine:
    """See `Engine`."""

    def __init__(
        self,
        model: EarlyExitModel,
        rule: ExitRule,
        *,
        weights: Weights,
        decoder: NativeDecoder,
        placed: Placed,
        lanes: int,
        steps: int,
        places: Mapping[int, int],
        prefixes: Mapping[int, Sequence[int]],
        row_sizes: tuple[int, ...],
    ) -> None:
        """Makes room; arguments are those of `XlaEngine`, and what native code is given of the model."""
        config = model.config
        self._model, self._weights, self._decoder, self._placed = model, weights, decoder, placed
        self._measure, self._row_sizes = rule.measure(), row_sizes
        self._sources = sources_by_width(model, weights, places=places, prefixes=prefixes)
        self._index_of_width = np.zeros(max(places) + 1, np.int32)
        self._index_of_width[list(places)] = np.arange(len(places))
        # What each layer's sources are to native code; None where prompts have come since.
        self._seen: list[Any] | None = None
        self._num_lanes = lanes
        inner = config.num_kv_heads * config.head_dim
        self._states = calls.aligned((config.num_decoder_layers + 1, len(placed.places) * lanes, config.emb_dim))
        self._cache = [
            (calls.aligned((placed.tree.capacity, inner)), calls.aligned((placed.tree.capacity, inner)))
            for _ in range(config.num_decoder_layers)
        ]
        self._confidence = rule.confidence
        self._heads = HeadDecisions(model, rule.confidence, weights=weights, row_sizes=row_sizes)
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

    def embed(self, lanes: np.ndarray, tokens: np.ndarray) -> None:
        """Puts the embeddings of tokens into entry 0."""
        self._states[0, lanes] = self._decoder.embedded(tokens)
        # With which every step begins.
        self._positions = self._placed.lengths - 1 + self._placed.tree.step
        self._turns = self._decoder.turns(self._positions)

    def run_layer(self, layer: int, rows: Rows, *, below: np.ndarray) -> tuple[np.ndarray, Work]:
        """Runs a layer for its rows, and returns their confidences if these are made of states."""
        slots = rows.slots
        calls.run_layer(
            self._decoder.layers[layer - 1],
            inputs=self._states[layer - 1],
            outputs=self._states[layer],
            store=self._cache[layer - 1],
            paths=self._placed.tree.all_paths(layer),
            sources=self._sources_of(layer),
            turns=self._turns,
            below=below,
            lanes=rows.lanes,
            nodes=rows.nodes,
            steps=rows.steps,
            prompts=slots,
            positions=self._positions[slots],
            source_of_row=self._index_of_width[self._placed.widths[slots]],
            places=self._placed.places[slots],
        )
        return self._measured(layer, rows.lanes, below), Work(layer_rows=len(rows.lanes))

    def decide(self, layers: np.ndarray, lanes: np.ndarray, **compared: np.ndarray) -> tuple[Decisions, Work]:
        """Returns what the heads decide of states, and what was asked for it."""
        if not self._decides_natively:
            return self._heads.of(self._look_up, layers=layers, lanes=lanes, **compared)
        tokens = np.empty(len(lanes), np.int32)
        facts = np.empty((4, len(lanes)), np.float32)
        for head, rows in self._weights.heads_of(layers):
            assert head.native is not None, "made where no other form was chosen"
            entries = self._entries(layers[rows], lanes[rows])
            tokens[rows], facts[:, rows] = calls.summarise(head.native, states=self._states, entries=entries)
        if self._measure.needs is Need.LOGITS:
            confidences = self._confidences(facts)
        else:
            confidences = np.zeros(len(lanes), np.float32)
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
        measured = np.zeros(len(lanes), np.float32)
        if self._measure.needs not in (Need.STATES, Need.CLASSIFIER):
            return measured
        for part, size in row_parts(len(lanes), self._row_sizes):
            measured[part] = self._measure_part(layer, lanes[part], below[part], size=size)
        return measured

    def _measure_part(self, layer: int, lanes: np.ndarray, below: np.ndarray, *, size: int) -> np.ndarray:
        confidences = device_steps.measure_rows(
            self._model,
            self._confidence,
            parameters={"classifier": self._weights.classifier},
            output=self._some(layer, lanes, size),
            inputs=self._some(layer - 1, below, size),
            layer=np.int32(layer),
        )
        measured: np.ndarray = np.asarray(confidences)[: len(lanes)]
        return measured

    def _confidences(self, facts: np.ndarray) -> np.ndarray:
        """Returns the confidences that a measure of logits makes of the facts of rows."""
        confidences = np.empty(facts.shape[1], np.float32)
        for part, size in row_parts(len(confidences), self._row_sizes):
            confidences[part] = self._confidences_part(facts[:, part], size=size)
        return confidences

    def _confidences_part(self, facts: np.ndarray, *, size: int) -> np.ndarray:
        count = facts.shape[1]
        longer = np.zeros((len(facts), size), np.float32)
        longer[:, :count] = facts
        made = device_steps.confidence_of(self._confidence, longer, vocab_size=self._model.config.vocab_size)
        confidences: np.ndarray = np.asarray(made)[:count]
        return confidences

    def keep_skipped(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        """Gives nodes of the layers that tokens skipped what these make of states."""
        calls.keep_skipped(
            self._decoder.layers[1:],
            self._cache[1:],
            states=self._states,
            entries=self._entries(layers, lanes),
            nodes=nodes,
            turns=self._turns,
            prompts=lanes // self._num_lanes,
        )

    def copy_skipped(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        """Gives them what the layer of each state has kept itself."""
        newest = self._placed.tree.newest(layers, lanes)
        for kept in zip(*self._cache, strict=True):
            made = np.empty((len(lanes), kept[0].shape[1]), np.float32)
            for layer in np.unique(layers).tolist():
                made[layers == layer] = kept[layer - 1][newest[layers == layer]]
            for index, store in enumerate(kept[1:]):
                is_skipped = nodes[index] < self._placed.tree.capacity
                store[nodes[index, is_skipped]] = made[is_skipped]

    def run_on_padding(self, slots: int) -> None:
        """Compiles whatever up to so many prompts may need of XLA: confidences, and other heads than native ones."""
        none = np.zeros(0, np.int32)
        sizes = sorted({size for rows in range(1, slots + 1) for _, size in row_parts(rows, self._row_sizes)})
        if not self._decides_natively:
            self._heads.run_on_padding(self._look_up, sizes)
        for size in sizes:
            if self._measure.needs in (Need.STATES, Need.CLASSIFIER):
                self._measure_part(1, none, none, size=size)
            if self._measure.needs is Need.LOGITS and self._decides_natively:
                self._confidences_part(np.zeros((4, 0), np.float32), size=size)

    def _entries(self, layers: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Returns where states stand among those of all layers."""
        entries: np.ndarray = layers.astype(np.int64) * self._states.shape[1] + lanes
        return entries

    def _sources_of(self, layer: int) -> Any:
        if self._seen is None:
            jax.block_until_ready([(sources.keys_values, sources.mask) for sources in self._sources.values()])
            of_width = [self._as_seen(sources) for sources in self._sources.values()]
            self._seen = [(calls.Sources * len(of_width))(*of_layer) for of_layer in zip(*of_width, strict=True)]
        return self._seen[layer - 1]

    def _as_seen(self, sources: Sources) -> list[calls.Sources]:
        """Returns what the sources of a width are to native code, by layer.

        Addresses alone: an array that was looked at otherwise is copied where it is given away.
        """
        mask = sources.mask.unsafe_buffer_pointer()
        return [
            calls.Sources(keys.unsafe_buffer_pointer(), values.unsafe_buffer_pointer(), mask, sources.width)
            for keys, values in sources.keys_values
        ]
