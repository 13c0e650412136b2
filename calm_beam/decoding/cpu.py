"""The native engine: it computes the rows of a batch in native code, which changes arrays in place.

It pads, compiles and copies nothing. It prefills prompts too: their tokens are rows, without any padding.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from calm_beam.decoding.branches import Branches
from calm_beam.decoding.compilation import padded, parts_of
from calm_beam.decoding.engine import Decisions, RunStep, Slots, StepOutputs, Work
from calm_beam.decoding.kv_cache import Rows
from calm_beam.decoding.weights import Weights, decides_natively
from calm_beam.decoding.xla import steps
from calm_beam.decoding.xla.engine import HeadDecisions
from calm_beam.decoding.xla.steps import AskedRows
from calm_beam.decoding.xla.tiles import whole_tiles
from calm_beam.exits.decision import Summary
from calm_beam.exits.measures import Measure, Need
from calm_beam.model import ModelConfig, architecture_of, native_decoder, parameter_shapes
from calm_beam.model.interface import EarlyExitModel
from calm_beam.model.native import library
from calm_beam.model.native_decoder import NativeDecoder

# Positions that are prefilled at a time, or those of one prompt of an encoder if it has more.
_MOST_POSITIONS = 1024


class SourcesOfWidth:
    """Sources of one padded width: keys and values of every layer, and the mask of each prompt's positions.

    Attributes:
      keys_values: Of every layer, each float32, shape (places, width, heads of keys * head_dim).
      mask: bool, shape (places, width).
    """

    def __init__(
        self, config: ModelConfig, decoder: NativeDecoder, *, width: int, places: int, prefix: Sequence[int] = ()
    ) -> None:
        """Allocates the arrays, and prefills the common prefix of all prompts, if there is one.

        Args:
          config: Sizes of the model.
          decoder: The model, packed for native code.
          width: Most tokens of a prompt.
          places: Number of sources.
          prefix: Tokens that all prompts begin with, to be prefilled once; only for models that share prefixes.
        """
        self._decoder, self._width, self._pad_id = decoder, width, architecture_of(config).pad_id
        shape = places, width, config.num_kv_heads * config.head_dim
        self.keys_values = [(library.aligned(shape), library.aligned(shape)) for _ in range(config.num_decoder_layers)]
        self.mask = np.zeros((places, width), bool)
        # Prompts that are prefilled at a time: each has `width` entries, one for each position.
        self._together = min(places, max(1, _MOST_POSITIONS // width))
        self._states = library.aligned((self._together * width, config.emb_dim))
        self._nodes = np.zeros((self._together, width), np.int32)
        self._is_encoder = decoder.rows_of_prompts == "of encoder"
        stores = [(keys.reshape(-1, shape[2]), values.reshape(-1, shape[2])) for keys, values in self.keys_values]
        if self._is_encoder:
            # Layers run one after the other, so they share one store.
            own = library.aligned((len(self._states), shape[2])), library.aligned((len(self._states), shape[2]))
            of_prompt_layers, of_source_layers = [own] * len(decoder.prompt_layers), stores
        else:
            of_prompt_layers, of_source_layers = stores[:-1], stores[-1:]
        self._prompt_layers = self._stack(decoder.prompt_layers, of_prompt_layers)
        self._source_layers = self._stack(decoder.source_layers, of_source_layers)
        self._shared = len(prefix)
        self._prefix: SourcesOfWidth | None = None
        if prefix:
            self._prefix = SourcesOfWidth(config, decoder, width=len(prefix), places=1)
            self._prefix.prefill(
                np.array([prefix], np.int32), lengths=np.array([len(prefix)], np.int32), places=np.zeros(1, np.int32)
            )

    def _stack(self, layers: Sequence[library.Layer], stores: Sequence[tuple[np.ndarray, np.ndarray]]) -> library.Stack:
        """Returns layers whose rows are tokens of prompts, which change the states in place."""
        nothing = np.zeros(self._together, np.int32)
        entries = [
            library.entries_of(
                inputs=self._states,
                outputs=self._states,
                store=store,
                paths=self._nodes,
                prompt_branches=self._width,
                rows_are=self._decoder.rows_of_prompts,
                **dict.fromkeys(library.BY_PROMPT, nothing),
            )
            for store in stores
        ]
        stack = library.Stack(layers, entries)
        turns = self._decoder.turns(np.arange(self._width))
        if turns is not None:
            stack.set_turns(turns)
        return stack

    def prefill(self, source_tokens: np.ndarray, *, lengths: np.ndarray, places: np.ndarray) -> None:
        """Computes the sources of prompts; arguments are those of `Engine.prefill`, without padding rows."""
        positions = np.arange(source_tokens.shape[1])
        is_token = positions < lengths[:, None]
        if self._pad_id is not None:
            is_token &= source_tokens != self._pad_id
        self.mask[places, : len(positions)], self.mask[places, len(positions) :] = is_token, False
        if self._prefix is not None:
            for pair, of_prefix in zip(self.keys_values, self._prefix.keys_values, strict=True):
                for kept, values in zip(pair, of_prefix, strict=True):
                    kept[places, : self._shared] = values
        for part in parts_of(len(places), self._together):
            self._prefill(source_tokens[part], is_token=is_token[part], places=places[part])

    def _prefill(self, source_tokens: np.ndarray, *, is_token: np.ndarray, places: np.ndarray) -> None:
        prompts, positions = np.nonzero(is_token)
        entries = (prompts * self._width + positions).astype(np.int32)
        nodes = (places[prompts] * self._width + positions).astype(np.int32)
        self._states[entries] = self._decoder.embedded(source_tokens[prompts, positions])
        own = entries if self._is_encoder else nodes
        self._nodes[:] = -1
        self._nodes[prompts, positions] = own
        rows = np.flatnonzero(positions >= self._shared)
        # Tokens of an encoder need all others of their prompt.
        for part in parts_of(len(rows), len(self._states) if self._is_encoder else _MOST_POSITIONS):
            some = rows[part]
            if self._decoder.prompt_layers:
                layers = range(len(self._decoder.prompt_layers))
                self._prompt_layers.run(layers, below=entries[some], branches=entries[some], nodes=own[some])
            self._source_layers.keep_skipped(
                range(len(self._decoder.source_layers)),
                capacity=self.mask.size,
                states=self._states,
                which=entries[some],
                nodes=np.broadcast_to(nodes[some], (len(self._decoder.source_layers), len(some))),
                branches=entries[some],
            )


class NativeSources:
    """Sources of all prompts of an engine."""

    def __init__(self, config: ModelConfig, decoder: NativeDecoder, slots: Slots) -> None:
        """Allocates the arrays."""
        self._slots = slots
        self._by_width = {
            width: SourcesOfWidth(config, decoder, width=width, places=places, prefix=slots.prefixes.get(width, ()))
            for width, places in slots.sources.items()
        }
        self._index_of_width = np.zeros(max(slots.sources) + 1, np.int32)
        self._index_of_width[list(slots.sources)] = np.arange(len(slots.sources))
        self.of_slot = np.zeros(len(slots.places), np.int32)

    def prefill(self, width: int, *, source_tokens: np.ndarray, lengths: np.ndarray, places: np.ndarray) -> None:
        """Computes the sources of prompts; arguments are those of `Engine.prefill`."""
        rows = np.flatnonzero(places < self._slots.sources[width])
        if len(rows):
            self._by_width[width].prefill(source_tokens[rows], lengths=lengths[rows], places=places[rows])

    def see(self) -> None:
        """Looks up the width of every slot's source."""
        self.of_slot[:] = self._index_of_width[self._slots.widths]

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
        self._sources = NativeSources(config, weights.native, slots)
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
            slots.num_branches == 1
            and self._decides_natively
            and self._native_measures[0]
            and native_decoder.runs_steps(parameter_shapes(config))
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
        self._sources.prefill(width, source_tokens=source_tokens, lengths=lengths, places=places)

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
        self._sources.see()
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

    def decode_alone(
        self, first: int, thresholds: np.ndarray, *, first_kept_step: int, passed_on: int
    ) -> tuple[StepOutputs, int]:
        """Takes all steps of the only slot's prompt in one call; its path must be the nodes 0, 1, 2 and so on.

        Args:
          first: The token that the decoder reads in the first step.
          thresholds: float32, shape (steps,).
          first_kept_step: First step that later ones attend to.
          passed_on: The layer whose state fills skipped layers; 0 for the layer of each exit.

        Returns:
          The outputs, (steps, 1), and the number of tokens.
        """
        (measure,), slots = self._native_measures, self._slots
        assert measure, "see `whole_step`"
        self._sources.see()
        new = StepOutputs.none((slots.steps, 1))
        length = int(slots.lengths[0])
        sizes = {
            "steps": slots.steps,
            "first_kept_step": first_kept_step,
            "length": length,
            "passed_on": passed_on,
            "embedding_factor": self._decoder.embedding_factor,
        }
        self._states[0, 0] = self._decoder.embedded(np.array([first]))
        output = library.output_of(
            sizes=sizes,
            embedding=self._decoder.embedding,
            turns=self._decoder.turns(length - 1 + np.arange(slots.steps)),
            states=self._states,
            ends=self._model.config.end_ids,
            step=slots.tree.step,
            position=self._positions,
        )
        tokens = self._stack.decode(self._exit_heads, output, measure=measure, thresholds=thresholds, new=vars(new))
        return new, tokens

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
