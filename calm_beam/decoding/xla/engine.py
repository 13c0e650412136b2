"""The XLA engine: it computes any number of rows of a batch in tiles of one size, by one program for each step.

It also prefills the prompts of a batch. For decisions by logits, it asks certified heads first, and the exact heads for
rows that those leave open.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.decoding.branches import Branches
from calm_beam.decoding.compilation import padded, parts_of
from calm_beam.decoding.engine import Decisions, RunStep, Slots, Work
from calm_beam.decoding.engine_choice import NEARNESS
from calm_beam.decoding.kv_cache import Rows
from calm_beam.decoding.weights import Head, Weights, zeros
from calm_beam.exits.certified_head import FEW_ROWS
from calm_beam.exits.measures import Need
from calm_beam.exits.propagations import PassedOn
from calm_beam.model import ArrayType
from calm_beam.model.interface import EarlyExitModel, KeysValues

from . import steps
from .steps import AskedRows, CopiedRows, EmbeddedRows, LayerRows, SkippedRows
from .tiles import grouped, source_positions, whole_tiles

# Rounds in which certified heads are asked before the exact ones, which read four times as many bytes: whether each is
# thorough. The second round takes the rows left open: they are few, and eight in a call take a third of the exact
# head's time.
_CERTIFYING: tuple[bool, ...] = (False, True)

LookUp = Callable[[np.ndarray, np.ndarray, int], tuple[jax.Array | np.ndarray, np.ndarray]]
"""Takes layers and branches of states, and a size; returns an array of states, (entries, branches, width), and their
indices in it: `AskedRows`, padded to that size and joined."""


class HeadDecisions:
    """Asks the heads of a model about states."""

    def __init__(self, model: EarlyExitModel, branch_rules: Branches, *, weights: Weights, rows: int) -> None:
        """Prepares the measures that heads are asked for.

        Args:
          model: The network.
          branch_rules: How exits of each branch are decided.
          weights: The model's weights.
          rows: Padded number of states in a call: whole tiles.
        """
        self._model, self._weights, self._rows = model, weights, rows
        # Without a measure of logits, heads predict tokens alone.
        asking = branch_rules.indices(Need.LOGITS) or [0]
        self._measures = tuple(branch_rules.rules[index].confidence for index in asking)
        self._certifying = _CERTIFYING if weights.is_certified else ()

    def of(
        self,
        look_up: LookUp,
        *,
        layers: np.ndarray,
        branches: np.ndarray,
        of_threshold: np.ndarray | None = None,
        thresholds: np.ndarray | None = None,
    ) -> tuple[list[Decisions], Work]:
        """Returns the heads' decisions for states, given by layer and branch, as `Engine.decide` does.

        Args:
          look_up: Finds the states.
          layers: Layer of every state.
          branches: Branch of every state.
          of_threshold: Index of the state that each threshold is compared with; None if there are no thresholds.
          thresholds: Thresholds; confidences must be certain enough to compare with them.
        """
        count = len(branches)
        decided, *others = (Decisions.none(count, confidence=0.0) for _ in self._measures)
        assert not (others and self._certifying), "certified heads prove the intervals of one measure"
        left = np.arange(count)
        for is_thorough in self._certifying:
            if not len(left):
                break
            tokens, low, high, is_certain = self._ask(look_up, layers[left], branches[left], is_thorough=is_thorough)
            decided.put(left, Decisions(tokens, low=low, high=high, is_finite=is_certain))
            is_open = ~decided.is_finite
            if of_threshold is not None:
                low, high = decided.low[of_threshold], decided.high[of_threshold]
                # States near a threshold are open too, so that near ties have exact confidences and are counted.
                is_open[of_threshold[(low - NEARNESS <= thresholds) & (thresholds <= high + NEARNESS)]] = True
            left = np.flatnonzero(is_open)
        if len(left):
            tokens, confidences, is_finite = self._ask(look_up, layers[left], branches[left])
            for of_measure, values in zip((decided, *others), confidences, strict=True):
                of_measure.put(left, Decisions.exact(tokens, confidences=values, is_finite=is_finite))
        return [decided, *others], Work(certified_rows=count if self._certifying else 0, projection_rows=len(left))

    def run_on_padding(self, look_up: LookUp) -> None:
        """Compiles every program of the heads, by running it on padding only."""
        none = np.zeros(0, np.int32)
        for head, is_thorough in itertools.product(self._weights.programs(), (*self._certifying, None)):
            self._ask_part(look_up, head, layers=none, branches=none, is_thorough=is_thorough)

    def _ask(
        self, look_up: LookUp, layers: np.ndarray, branches: np.ndarray, *, is_thorough: bool | None = None
    ) -> list[np.ndarray]:
        """Returns the heads' results for states: arrays of a `Certificate`, or of `decide_rows`.

        Args:
          look_up: Finds the states.
          layers: Layer of every state.
          branches: Branch of every state.
          is_thorough: How certified heads are asked; None to ask exact ones.
        """
        most = FEW_ROWS if is_thorough else self._rows
        asked = [
            (head, chosen[part])
            for head, chosen in self._weights.heads_of(layers)
            for part in parts_of(len(chosen), most)
        ]
        # Start all calls before waiting for the first result.
        made = [
            self._ask_part(look_up, head, layers=layers[rows], branches=branches[rows], is_thorough=is_thorough)
            for head, rows in asked
        ]
        found = [np.empty((*values.shape[:-1], len(branches)), values.dtype) for values in made[0]]
        for (_, rows), of_part in zip(asked, made, strict=True):
            for result, values in zip(found, of_part, strict=True):
                result[..., rows] = np.asarray(values)[..., : len(rows)]
        return found

    def _ask_part(
        self, look_up: LookUp, head: Head, *, layers: np.ndarray, branches: np.ndarray, is_thorough: bool | None
    ) -> Sequence[jax.Array]:
        """Returns a head's results for states, padded."""
        states, rows = look_up(layers, branches, FEW_ROWS if is_thorough else self._rows)
        asked: dict[str, Any] = {
            "head_layer": head.layer,
            "parameters": head.parameters,
            "states": states,
            "rows": rows,
        }
        made: Sequence[jax.Array]
        if is_thorough is None:
            made = steps.decide_rows(self._model, self._measures, **asked)
        else:
            (measure,) = self._measures
            how = {"head": head.certified, "is_thorough": is_thorough}
            made = steps.certify_rows(self._model, measure, **how, **asked)
        return made


class Sources:
    """Keys and values of the sources of one padded width."""

    def __init__(self, model: EarlyExitModel, *, width: int, places: int, prefix: Sequence[KeysValues] = ()) -> None:
        """Allocates the arrays.

        Args:
          model: The network.
          width: Padded width of the sources.
          places: Number of sources.
          prefix: Keys and values of the common prefix of all prompts; see `steps.admit`.
        """
        config = model.config
        self._prefix = prefix
        self.width = width
        positions = source_positions(width)
        shape = (places, config.num_kv_heads, positions, config.head_dim)
        # Two arrays a layer, not one twice: a buffer can only be given away once.
        kept = ArrayType(shape, model.precision.dtype)
        made = zeros((kept,) * (2 * config.num_decoder_layers), axis=1, of=config.num_kv_heads)
        self.keys_values = list(zip(made[::2], made[1::2], strict=True))
        self.mask = jnp.zeros((places, positions), bool)

    @property
    def places(self) -> int:
        """Number of sources that there is room for."""
        return self.mask.shape[0]

    def admit(
        self,
        model: EarlyExitModel,
        weights: Weights,
        source_tokens: np.ndarray,
        *,
        lengths: np.ndarray,
        places: np.ndarray,
    ) -> None:
        """Prefills prompts and stores their keys and values at places; arguments are those of `Engine.prefill`."""
        self.keys_values, self.mask = steps.admit(
            model,
            weights.all,
            keys_values=self.keys_values,
            source_mask=self.mask,
            source_tokens=source_tokens,
            lengths=lengths,
            places=places,
            prefix=self._prefix,
        )


def sources_by_width(model: EarlyExitModel, weights: Weights, slots: Slots) -> dict[int, Sources]:
    """Returns empty sources of each width."""
    prefixes = {
        width: steps.prefill_prefix(model, weights.all, np.array(tokens, np.int32))
        for width, tokens in slots.prefixes.items()
    }
    return {
        width: Sources(model, width=width, places=count, prefix=prefixes.get(width, ()))
        for width, count in slots.sources.items()
    }


# Most rows of a call: beyond that, the arguments of each call get large themselves.
_MOST_ROWS = 4096


class XlaEngine:
    """The `Engine` that XLA compiles."""

    whole_step: RunStep | None = None

    def __init__(self, model: EarlyExitModel, branch_rules: Branches, *, weights: Weights, slots: Slots) -> None:
        """Allocates states, sources and stores.

        Args:
          model: The network.
          branch_rules: How exits of each branch are decided.
          weights: The model's weights.
          slots: The slots of the batch.
        """
        self._model, self._branch_rules, self._weights, self._slots = model, branch_rules, weights, slots
        of_states = branch_rules.indices(Need.STATES, Need.CLASSIFIER)
        self._of_states = {index: branch_rules.rules[index].confidence for index in of_states}
        config, dtype = model.config, model.precision.dtype
        self._layers = config.num_decoder_layers
        # Layer numbers are kept on the device: sending it one number takes as long as sending all rows.
        self._numbers = [jnp.int32(layer) for layer in range(self._layers + 1)]
        inner = config.num_kv_heads * config.head_dim
        self._rows = whole_tiles(min(_MOST_ROWS, slots.total_branches))
        self._sources = sources_by_width(model, weights, slots)
        self._heads = HeadDecisions(model, branch_rules, weights=weights, rows=self._rows)
        states = ArrayType((self._layers + 1, slots.total_branches, config.emb_dim), dtype)
        (self._states,) = zeros((states,))
        store = ArrayType((slots.tree.capacity, inner), dtype)
        stores = zeros((store,) * (2 * self._layers), axis=1, of=config.num_kv_heads)
        self._cache = list(zip(stores[::2], stores[1::2], strict=True))

    def prefill(self, width: int, source_tokens: np.ndarray, *, lengths: np.ndarray, places: np.ndarray) -> None:
        """Prefills prompts and stores their keys and values at places."""
        self._sources[width].admit(self._model, self._weights, source_tokens, lengths=lengths, places=places)

    def grow(self, added: int) -> None:
        """Adds nodes to the store of every layer."""
        wider = ((0, added), (0, 0))
        # Layer by layer, so that at most one store is held twice.
        for layer, (keys, values) in enumerate(self._cache):
            self._cache[layer] = jnp.pad(keys, wider), jnp.pad(values, wider)

    def embed(self, branches: np.ndarray, tokens: np.ndarray) -> None:
        """Writes the embeddings of tokens to entry 0."""
        for part in parts_of(len(branches), self._rows):
            self._states = steps.embed(
                self._model,
                self._weights.embedding,
                states=self._states,
                rows=EmbeddedRows(
                    branches=self._padded_branches(branches[part]), tokens=padded(tokens[part], self._rows)
                ).joined(),
            )

    def run_layers(self, layers: range, rows: Rows, *, below: np.ndarray) -> tuple[np.ndarray, Work]:
        """Runs layers for rows, and returns their confidences by measures of states."""
        measured = np.zeros((len(self._branch_rules.measures), len(layers), len(rows.branches)), np.float32)
        work = Work()
        # Start all parts before waiting for the first.
        parts = [
            (layer, chosen, self._run(layer, rows, chosen=chosen, width=width, below=inputs))
            for layer in layers
            for inputs in [below if layer == layers.start else rows.branches]
            for width, chosen in self._by_width(rows)
        ]
        for layer, chosen, confidences in parts:
            count = len(chosen)
            work += Work(layer_rows=count, padded_rows=whole_tiles(count) - count)
            # Where logits decide, do not wait for the layer.
            made = np.asarray(confidences) if self._of_states else ()
            for index, values in zip(self._of_states, made, strict=True):
                measured[index, layer - layers.start, chosen] = values[:count]
        return measured, work

    def decide(self, layers: np.ndarray, branches: np.ndarray, **compared: np.ndarray) -> tuple[list[Decisions], Work]:
        """Returns the heads' decisions for states, and the work counted."""
        return self._heads.of(self._look_up, layers=layers, branches=branches, **compared)

    def _look_up(self, layers: np.ndarray, branches: np.ndarray, size: int) -> tuple[jax.Array, np.ndarray]:
        beyond = self._slots.total_branches
        asked = AskedRows(branches=padded(branches, size, fill=beyond), layers=padded(layers, size))
        return self._states, asked.joined()

    def keep_skipped(self, layers: np.ndarray, branches: np.ndarray, nodes: np.ndarray) -> None:
        """Computes keys and values of skipped layers from states, and stores them at nodes."""
        for part in parts_of(len(branches), self._rows):
            self._keep_part(layers[part], branches[part], nodes[:, part])

    def _keep_part(self, layers: np.ndarray, branches: np.ndarray, nodes: np.ndarray) -> None:
        self._cache[1:] = steps.fill_skipped(
            self._model,
            self._weights.layers[1:],
            terms=[self._weights.path_terms(layer) for layer in range(2, len(self._cache) + 1)],
            cache=self._cache[1:],
            states=self._states,
            rows=SkippedRows(
                branches=self._padded_branches(branches),
                layers=padded(layers, self._rows),
                **self._position(branches // self._slots.num_branches),
                nodes=self._padded_nodes(nodes),
            ).joined(),
        )

    def copy_skipped(self, layers: np.ndarray, branches: np.ndarray, nodes: np.ndarray) -> None:
        """Copies keys and values of each state's own layer to nodes of skipped layers."""
        for part in parts_of(len(branches), self._rows):
            self._copy_part(layers[part], branches[part], nodes[:, part])

    def _copy_part(self, layers: np.ndarray, branches: np.ndarray, nodes: np.ndarray) -> None:
        self._cache = steps.copy_skipped(
            self._model,
            self._cache,
            rows=CopiedRows(
                layers=padded(layers, self._rows),
                source_nodes=padded(self._slots.tree.newest(layers, branches), self._rows),
                nodes=self._padded_nodes(nodes),
            ).joined(),
        )

    def _padded_nodes(self, nodes: np.ndarray) -> np.ndarray:
        """Returns nodes, given by layer and row, by row and layer and padded."""
        return padded(nodes.T, self._rows, fill=self._slots.tree.capacity)

    def _padded_branches(self, branches: np.ndarray) -> np.ndarray:
        return padded(branches, self._rows, fill=self._slots.total_branches)

    def run_on_padding(self) -> None:
        """Compiles everything that prompts may need."""
        none = np.zeros(0, np.int32)
        rows = Rows(none, none, steps=none, nodes=none)
        self.embed(np.full(1, self._slots.total_branches), np.zeros(1, np.int32))
        skipped = none, none, np.zeros((self._layers - 1, 0), np.int32)
        if self._branch_rules.passed_on is PassedOn.KEYS_VALUES:
            self._copy_part(*skipped)
        else:
            self._keep_part(*skipped)
        self._heads.run_on_padding(self._look_up)
        for width in self._sources:
            self._run(1, rows, chosen=none, width=width, below=none)
        jax.block_until_ready(self._states)

    def _layer_parameters(self, layer: int) -> dict[str, Any]:
        """Returns the parameters of a layer, and of the exit classifier if a measure uses it."""
        parameters = {"layer": self._weights.layers[layer - 1]}
        if self._branch_rules.indices(Need.CLASSIFIER):
            parameters["classifier"] = self._weights.classifier
        return parameters

    def _run(self, layer: int, rows: Rows, *, chosen: np.ndarray, width: int, below: np.ndarray) -> jax.Array:
        """Runs a layer for chosen rows, and returns their confidences by each measure of states, padded.

        Args:
          layer: The layer to run.
          rows: All rows of that layer.
          chosen: Indices of some of them, as many as go into a call.
          width: Padded width of their sources.
          below: For all rows, the branch of their input in the entry below.
        """
        sources, slots, size = self._sources[width], self._slots, self._rows
        of_slot, branches = rows.slots[chosen], rows.branches[chosen]
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
                branches=self._padded_branches(branches),
                below=padded(below[chosen], size),
                nodes=padded(rows.nodes[chosen], size, fill=slots.tree.capacity),
                paths=padded(slots.tree.paths(layer, branches, length=slots.steps), size),
                **self._position(of_slot),
                **grouped(slots.places[of_slot], size),
            ).joined(),
        )
        return confidences

    def _position(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the positions of the newest tokens of slots, padded."""
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
