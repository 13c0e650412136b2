"""The native engine: it computes the rows of a batch in native code, which changes arrays in place.

It pads, compiles and copies nothing. XLA still prefills prompts, since it is fast at many tokens at a time: it
computes their keys and values while native code runs, and they are copied over once a step needs them.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np

from calm_beam.decoding.branches import Branches
from calm_beam.decoding.compilation import padded, parts_of
from calm_beam.decoding.engine import Decisions, RunStep, Slots, StepOutputs, Work
from calm_beam.decoding.kv_cache import Rows
from calm_beam.decoding.weights import Weights, decides_natively, prefixes_by_width
from calm_beam.decoding.xla import steps
from calm_beam.decoding.xla.engine import HeadDecisions
from calm_beam.decoding.xla.steps import AskedRows
from calm_beam.decoding.xla.tiles import whole_tiles
from calm_beam.exits.decision import Summary
from calm_beam.exits.measures import Measure, Need
from calm_beam.model.interface import EarlyExitModel, KeysValues
from calm_beam.model.native import library


@dataclasses.dataclass(frozen=True, eq=False)
class _Coming:
    """A prefill that XLA is computing.

    Attributes:
      width: Padded width of the sources.
      places: shape (prompts,). The places of the prompts.
      keys_values: Of every layer, each (rows, heads of keys, positions, head_dim); padding rows follow the prompts.
      mask: bool, shape (rows, positions).
    """

    width: int
    places: np.ndarray
    keys_values: Sequence[KeysValues]
    mask: Any


class SourcesOfWidth:
    """Sources of one padded width: keys and values of every layer, and the mask of each prompt's positions."""

    def __init__(self, model: EarlyExitModel, *, width: int, places: int) -> None:
        """Allocates the arrays."""
        config = model.config
        shape = places, config.num_kv_heads, width, config.head_dim
        self.keys_values = [(library.aligned(shape), library.aligned(shape)) for _ in range(config.num_decoder_layers)]
        self.mask = np.zeros((places, width), bool)

    def take_over(self, coming: _Coming) -> None:
        """Waits for a prefill and copies its results."""
        places, count = coming.places, len(coming.places)
        mask = np.asarray(coming.mask)[:count]
        length = mask.shape[1]
        # Masked positions are never read.
        self.mask[places, :length], self.mask[places, length:] = mask, False
        for pair, made in zip(self.keys_values, coming.keys_values, strict=True):
            for store, values in zip(pair, made, strict=True):
                store[places, :, :length] = np.asarray(values)[:count]


class NativeSources:
    """Sources of all prompts of an engine."""

    def __init__(self, model: EarlyExitModel, weights: Weights, slots: Slots) -> None:
        """Allocates the arrays."""
        self._model, self._weights, self._slots = model, weights, slots
        self._by_width = {
            width: SourcesOfWidth(model, width=width, places=places) for width, places in slots.sources.items()
        }
        self._prefixes = prefixes_by_width(model, weights, slots)
        self._index_of_width = np.zeros(max(slots.sources) + 1, np.int32)
        self._index_of_width[list(slots.sources)] = np.arange(len(slots.sources))
        # Prefills in the order in which XLA computes them, and the places that wait for one.
        self._coming: collections.deque[_Coming] = collections.deque()
        self._is_coming = np.zeros((len(slots.sources), max(slots.sources.values())), bool)
        self.of_slot = np.zeros(len(slots.places), np.int32)

    def prefill(self, width: int, source_tokens: np.ndarray, *, lengths: np.ndarray, places: np.ndarray) -> None:
        """Starts a prefill by XLA; does not wait for it."""
        here = places[places < self._slots.sources[width]]
        index = self._index_of_width[width]
        # The previous prompt of a place may have ended without a step, with its prefill still pending.
        self._take_over(index, here)
        keys_values, mask = steps.prefill(
            self._model,
            self._weights.all,
            source_tokens=source_tokens,
            lengths=lengths,
            prefix=self._prefixes.get(width, ()),
        )
        if not len(here):
            # Only padding, to compile the program: wait, so that a failure is raised here, and drop the results.
            jax.block_until_ready((keys_values, mask))
            return
        self._is_coming[index, here] = True
        self._coming.append(_Coming(width, here, keys_values, mask))

    def see(self, slots: np.ndarray) -> None:
        """Ensures that the sources of slots are available, waiting for their prefill."""
        self.of_slot[:] = self._index_of_width[self._slots.widths]
        self._take_over(self.of_slot[slots], self._slots.places[slots])

    def _take_over(self, widths: np.ndarray | np.int32, places: np.ndarray) -> None:
        """Takes over pending prefills in order until none is left for the given places, with indices of widths."""
        while self._coming and self._is_coming[widths, places].any():
            coming = self._coming[0]
            self._by_width[coming.width].take_over(coming)
            self._is_coming[self._index_of_width[coming.width], coming.places] = False
            self._coming.popleft()

    def as_seen(self) -> list[Any]:
        """Returns the sources as native code takes them: by layer, an array of `library.Sources` by width index."""
        of_width = [
            [
                library.Sources(keys.ctypes.data, values.ctypes.data, sources.mask.ctypes.data, width)
                for keys, values in sources.keys_values
            ]
            for width, sources in self._by_width.items()
        ]
        return [(library.Sources * len(of_width))(*of_layer) for of_layer in zip(*of_width, strict=True)]


# Most rows of a call of XLA, where it decides or measures.
_MOST_ROWS = 256


class NativeEngine:
    """See `Engine`."""

    def __init__(self, model: EarlyExitModel, branch_rules: Branches, *, weights: Weights, slots: Slots) -> None:
        """Allocates states and caches; arguments are those of `XlaEngine`, with weights packed for native code."""
        assert weights.native is not None, "see `engine_for`"
        config = model.config
        self._model, self._weights, self._decoder, self._slots = model, weights, weights.native, slots
        self._branch_rules = branch_rules
        self._sources = NativeSources(model, weights, slots)
        self._positions = np.zeros(len(slots.places), np.int32)
        inner = config.num_kv_heads * config.head_dim
        self._states = library.aligned((config.num_decoder_layers + 1, slots.total_branches, config.emb_dim))
        self._cache = [
            (library.aligned((slots.tree.capacity, inner)), library.aligned((slots.tree.capacity, inner)))
            for _ in range(config.num_decoder_layers)
        ]
        self._stack = self._stack_here()
        self._rows = whole_tiles(min(_MOST_ROWS, slots.total_branches))
        self._heads = HeadDecisions(model, branch_rules, weights=weights, rows=self._rows)
        self._decides_natively = not weights.is_certified and decides_natively(branch_rules.measures)
        # The measures as native code takes them, None where it does not have the measure.
        self._native_measures = [
            self._native_measure(rule.confidence, measure)
            for rule, measure in zip(branch_rules.rules, branch_rules.measures, strict=True)
        ]
        # A user's measure may also use the classifier's score.
        self._of_states = {
            index: self._native_measure("classifier", branch_rules.measures[index]) or self._native_measures[index]
            if branch_rules.measures[index].needs is Need.CLASSIFIER
            else self._native_measures[index]
            for index in branch_rules.indices(Need.STATES, Need.CLASSIFIER)
        }
        self._runs_steps = bool(
            slots.num_branches == 1 and self._decides_natively and self._native_measures[0] and self._stack.runs_steps
        )
        self._exit_heads = weights.native_heads(branch_rules.exit_layers)

    def _native_measure(self, name: str, measure: Measure) -> library.Measure | None:
        """Returns a measure as native code takes it; None if it has no measure of this name."""
        layers = self._branch_rules.layers
        is_by_layer = measure.needs is Need.LAYER
        return library.measure_of(
            name,
            vocab_size=self._model.config.vocab_size,
            classifier=self._decoder.classifier,
            by_layer=[measure.confidence(layer, layers) for layer in range(1, layers + 1)] if is_by_layer else (),
        )

    @property
    def whole_step(self) -> RunStep | None:
        """Runs a whole step in one call, where that is faster; else None."""
        # Not stored: a bound method refers to this engine, whose memory would wait for the garbage collector.
        return self._run_step if self._runs_steps else None

    def prefill(self, width: int, source_tokens: np.ndarray, *, lengths: np.ndarray, places: np.ndarray) -> None:
        """Prefills prompts and stores their keys and values at places."""
        self._sources.prefill(width, source_tokens, lengths=lengths, places=places)

    def grow(self, added: int) -> None:
        """Adds nodes to the store of every layer."""
        # The stack refers to the stores. Layer by layer, so that at most one store is held twice.
        del self._stack
        for layer, pair in enumerate(self._cache):
            wider = [library.aligned((len(values) + added, values.shape[1])) for values in pair]
            for new, old in zip(wider, pair, strict=True):
                new[: len(old)] = old
            self._cache[layer] = wider[0], wider[1]
        self._stack = self._stack_here()

    def _stack_here(self) -> library.Stack:
        """Returns the layers with the current addresses of their arrays."""
        slots = self._slots
        entries = [
            library.entries_of(
                inputs=self._states[index],
                outputs=self._states[index + 1],
                store=store,
                paths=slots.tree.all_paths(index + 1),
                prompt_branches=slots.num_branches,
                steps=slots.tree.step,
                positions=self._positions,
                source_of=self._sources.of_slot,
                places=slots.places,
            )
            for index, store in enumerate(self._cache)
        ]
        stack = library.Stack(self._decoder.layers, entries)
        stack.set_sources(self._sources.as_seen())
        return stack

    def embed(self, branches: np.ndarray, tokens: np.ndarray) -> None:
        """Writes the embeddings of tokens to entry 0."""
        self._states[0, branches] = self._decoder.embedded(tokens)
        # Every step begins here, so positions and turns are updated here.
        self._positions[:] = self._slots.lengths - 1 + self._slots.tree.step
        self._turns = self._decoder.turns(self._positions)
        self._sources.see(branches // self._slots.num_branches)
        if self._turns is not None:
            self._stack.set_turns(self._turns)

    def run_layers(self, layers: range, rows: Rows, *, below: np.ndarray) -> tuple[np.ndarray, Work]:
        """Runs layers for rows, and returns their confidences by measures of states."""
        self._stack.run(range(layers.start - 1, layers.stop - 1), below=below, branches=rows.branches, nodes=rows.nodes)
        return self._measured(layers, rows.branches, below), Work(layer_rows=len(layers) * len(rows.branches))

    def _run_step(
        self, rows: Rows, *, thresholds: np.ndarray, known_exits: np.ndarray | None, new: StepOutputs
    ) -> Work:
        (measure,) = self._native_measures
        assert measure, "see `whole_step`"
        asked = self._stack.run_step(
            self._exit_heads,
            measure=measure,
            branches=rows.branches,
            nodes=rows.nodes,
            thresholds=thresholds,
            known_exits=known_exits,
            new=vars(new),
        )
        return Work(layer_rows=int(new.exit_layers.sum()), projection_rows=asked)

    def decide(self, layers: np.ndarray, branches: np.ndarray, **compared: np.ndarray) -> tuple[list[Decisions], Work]:
        """Returns the heads' decisions for states, and the work counted."""
        if not self._decides_natively:
            return self._heads.of(self._look_up, layers=layers, branches=branches, **compared)
        tokens, facts = self._summarised(layers, self._where(layers, branches))
        confidences = [self._confidences(index, tokens, facts) for index in self._branch_rules.indices(Need.LOGITS)]
        is_finite = np.isfinite(facts[0])
        decided = [
            Decisions.exact(tokens, confidences=values, is_finite=is_finite)
            for values in confidences or [np.zeros(len(tokens), np.float32)]
        ]
        return decided, Work(projection_rows=len(branches))

    def _summarised(self, layers: np.ndarray, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns `library.summarise` of each state by the head of its layer, with the first measure's confidences."""
        asked = list(self._weights.heads_of(layers))
        measure = next((self._native_measures[index] for index in self._branch_rules.indices(Need.LOGITS)), None)
        made = []
        for head, rows in asked:
            assert head.native is not None, "made where no other form was chosen"
            made.append(library.summarise(head.native, states=self._states, entries=entries[rows], measure=measure))
        if len(made) == 1:
            return made[0]
        tokens, facts = np.empty(len(entries), np.int32), np.empty((5, len(entries)), np.float32)
        for (_, rows), (of_head, facts_of_head) in zip(asked, made, strict=True):
            tokens[rows], facts[:, rows] = of_head, facts_of_head
        return tokens, facts

    def _look_up(self, layers: np.ndarray, branches: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns only the states that are looked up, as a buffer of their own: XLA would copy the whole buffer."""
        some = _padded(self._states[layers, branches], size)
        branches = padded(np.arange(len(branches)), size, fill=size)
        return some[None], AskedRows(branches=branches, layers=np.zeros(size, np.int32)).joined()

    def _measured(self, layers: range, branches: np.ndarray, below: np.ndarray) -> np.ndarray:
        """Returns the confidences of rows at layers, (measures, layers, rows), by measures of states."""
        measured = np.zeros((len(self._branch_rules.measures), len(layers), len(branches)), np.float32)
        for index, of_states in self._of_states.items():
            if of_states:
                made = library.measure_states(of_states, layers, states=self._states, below=below, branches=branches)
                is_native = self._native_measures[index] is not None
                measured[index] = made if is_native else _quietly(self._branch_rules.measures[index].confidence, made)
                continue
            outputs = self._states[layers.start : layers.stop, branches]
            inputs = np.concatenate([self._states[layers.start - 1, below][None], outputs[:-1]])
            for of_layer, *each in zip(measured[index], layers, outputs, inputs, strict=True):
                of_layer[:] = self._measured_by_xla(index, *each)
        return measured

    def _measured_by_xla(self, index: int, layer: int, outputs: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        """Returns the confidences of a measure that native code does not have, computed by XLA."""
        name = self._branch_rules.rules[index].confidence
        measured = np.empty(len(outputs), np.float32)
        for part in parts_of(len(outputs), self._rows):
            output, below = (_padded(states[part], self._rows) for states in (outputs, inputs))
            confidences = steps.measure_states(name, output, below, np.int32(layer))
            measured[part] = np.asarray(confidences)[: len(measured[part])]
        return measured

    def _confidences(self, index: int, tokens: np.ndarray, facts: np.ndarray) -> np.ndarray:
        """Returns the confidences by a measure of logits, given the results of `_summarised`."""
        native = self._native_measures[index]
        if native is not None:
            is_first = index == self._branch_rules.indices(Need.LOGITS)[0]
            return facts[4] if is_first else library.measure_facts(native, facts)
        of_summary = self._branch_rules.measures[index].of_summary
        assert of_summary is not None, "see `decides_natively`"
        largest, second, total, weighted, _ = cast("tuple[Any, ...]", facts)
        summary = Summary(largest, cast("Any", tokens), second, total, weighted)
        return _quietly(of_summary, summary, self._model.config.vocab_size)

    def keep_skipped(self, layers: np.ndarray, branches: np.ndarray, nodes: np.ndarray) -> None:
        """Computes keys and values of skipped layers from states, and stores them at nodes."""
        self._stack.keep_skipped(
            range(1, len(self._cache)),
            capacity=self._slots.tree.capacity,
            states=self._states,
            which=self._where(layers, branches),
            nodes=nodes,
            branches=branches,
        )

    def copy_skipped(self, layers: np.ndarray, branches: np.ndarray, nodes: np.ndarray) -> None:
        """Copies the keys and values of each state's exit layer to nodes of skipped layers."""
        newest = self._slots.tree.newest(layers, branches)
        for kept in zip(*self._cache, strict=True):
            made = np.empty((len(branches), kept[0].shape[1]), np.float32)
            for layer in np.unique(layers).tolist():
                made[layers == layer] = kept[layer - 1][newest[layers == layer]]
            for index, store in enumerate(kept[1:]):
                is_skipped = nodes[index] < self._slots.tree.capacity
                store[nodes[index, is_skipped]] = made[is_skipped]

    def run_on_padding(self) -> None:
        """Compiles everything that XLA computes for prompts: confidences, and heads that are not native."""
        if not self._decides_natively:
            self._heads.run_on_padding(self._look_up)
        for index, of_states in self._of_states.items():
            if not of_states:
                self._measured_by_xla(index, 1, *np.zeros((2, 1, self._states.shape[2]), np.float32))

    def _where(self, layers: np.ndarray, branches: np.ndarray) -> np.ndarray:
        """Returns the flat indices of states in the buffer of all layers."""
        where: np.ndarray = layers.astype(np.int64) * self._states.shape[1] + branches
        return where


def _padded(states: np.ndarray, size: int) -> np.ndarray:
    """Returns states, (rows, width), padded with rows of 0 up to a size."""
    longer = np.zeros((size, states.shape[1]), np.float32)
    longer[: len(states)] = states
    return longer


def _quietly(confidence: Callable[..., Any], *arguments: Any) -> np.ndarray:
    """Returns the confidences by a user's function, which may use any library.

    The result may contain NaN; callers check.
    """
    with np.errstate(all="ignore"):
        return np.asarray(confidence(*arguments))
