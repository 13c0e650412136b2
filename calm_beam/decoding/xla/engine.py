"""Rows of a batch, computed by XLA: whatever the number, in tiles of one size, and so by one program of each step.

It makes keys and values of the prompts of a batch, too. What the heads decide of packed rows is asked of certified
heads first, and of exact ones where those leave it open.
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
from calm_beam.decoding.weights import Head, Weights, prefixes_by_width, zeros
from calm_beam.exits.certified_head import FEW_ROWS
from calm_beam.exits.measures import Need
from calm_beam.exits.propagations import PassedOn
from calm_beam.model import ArrayType
from calm_beam.model.interface import EarlyExitModel, KeysValues

from . import steps
from .steps import AskedRows, CopiedRows, EmbeddedRows, LayerRows, SkippedRows
from .tiles import grouped, source_positions, whole_tiles

# How certified heads are asked, whether thoroughly, before the exact ones, which read four times as many bytes. What
# they leave open is put to them again: few rows are open, and eight in a call take a third of the exact head's time.
_CERTIFYING: tuple[bool, ...] = (False, True)

LookUp = Callable[[np.ndarray, np.ndarray, int], tuple[jax.Array | np.ndarray, np.ndarray]]
"""Takes layers and lanes of states, and a size; returns an array of states, (entries, lanes, width), and where they are
in it: `AskedRows`, padded to that size and joined."""


class HeadDecisions:
    """Asks the heads of a model about states."""

    def __init__(self, model: EarlyExitModel, branches: Branches, *, weights: Weights, rows: int) -> None:
        """Prepares what is asked.

        Args:
          model: The network.
          branches: How exits of each lane are decided.
          weights: Of the model.
          rows: What states that are asked about together are padded to: whole tiles.
        """
        self._model, self._weights, self._rows = model, weights, rows
        # By one that needs no logits, heads predict tokens alone.
        asking = branches.indices(Need.LOGITS) or [0]
        self._measures = tuple(branches.rules[index].confidence for index in asking)
        self._certifying = _CERTIFYING if weights.is_certified else ()

    def of(
        self,
        look_up: LookUp,
        *,
        layers: np.ndarray,
        lanes: np.ndarray,
        of_threshold: np.ndarray | None = None,
        thresholds: np.ndarray | None = None,
    ) -> tuple[list[Decisions], Work]:
        """Returns what the heads decide of states, given by layer and lane, as `Engine.decide` does.

        Args:
          look_up: Where they are.
          layers: Of every state.
          lanes: Likewise.
          of_threshold: Which state each threshold is compared with; None if none is.
          thresholds: Those that the confidence must be told from.
        """
        count = len(lanes)
        decided, *others = (Decisions.none(count, confidence=0.0) for _ in self._measures)
        assert not (others and self._certifying), "certified heads prove the intervals of one measure"
        left = np.arange(count)
        for is_thorough in self._certifying:
            if not len(left):
                break
            tokens, low, high, is_certain = self._ask(look_up, layers[left], lanes[left], is_thorough=is_thorough)
            decided.put(left, Decisions(tokens, low=low, high=high, is_finite=is_certain))
            is_open = ~decided.is_finite
            if of_threshold is not None:
                low, high = decided.low[of_threshold], decided.high[of_threshold]
                # What is nearly at a threshold is open too: confidences of near ties are then exact, and counted.
                is_open[of_threshold[(low - NEARNESS <= thresholds) & (thresholds <= high + NEARNESS)]] = True
            left = np.flatnonzero(is_open)
        if len(left):
            tokens, confidences, is_finite = self._ask(look_up, layers[left], lanes[left])
            for of_measure, values in zip((decided, *others), confidences, strict=True):
                of_measure.put(left, Decisions.exact(tokens, confidences=values, is_finite=is_finite))
        return [decided, *others], Work(certified_rows=count if self._certifying else 0, projection_rows=len(left))

    def run_on_padding(self, look_up: LookUp) -> None:
        """Asks all that may be asked, on padding only, so that it is compiled."""
        none = np.zeros(0, np.int32)
        for head, is_thorough in itertools.product(self._weights.programs(), (*self._certifying, None)):
            self._ask_part(look_up, head, layers=none, lanes=none, is_thorough=is_thorough)

    def _ask(
        self, look_up: LookUp, layers: np.ndarray, lanes: np.ndarray, *, is_thorough: bool | None = None
    ) -> list[np.ndarray]:
        """Returns what heads make of states, given by layer and lane: what they certify, or what they decide.

        Args:
          look_up: Where the states are.
          layers: Of every state.
          lanes: Likewise.
          is_thorough: How certified heads are asked; None to ask exact ones.
        """
        most = FEW_ROWS if is_thorough else self._rows
        asked = [
            (head, chosen[part])
            for head, chosen in self._weights.heads_of(layers)
            for part in parts_of(len(chosen), most)
        ]
        # All are asked before the first answer is waited for.
        made = [
            self._ask_part(look_up, head, layers=layers[rows], lanes=lanes[rows], is_thorough=is_thorough)
            for head, rows in asked
        ]
        found = [np.empty((*values.shape[:-1], len(lanes)), values.dtype) for values in made[0]]
        for (_, rows), of_part in zip(asked, made, strict=True):
            for result, values in zip(found, of_part, strict=True):
                result[..., rows] = np.asarray(values)[..., : len(rows)]
        return found

    def _ask_part(
        self, look_up: LookUp, head: Head, *, layers: np.ndarray, lanes: np.ndarray, is_thorough: bool | None
    ) -> Sequence[jax.Array]:
        """Returns what a head makes of states, padded."""
        states, rows = look_up(layers, lanes, FEW_ROWS if is_thorough else self._rows)
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
        """Makes room.

        Args:
          model: The network.
          width: Of all.
          places: How many.
          prefix: Keys and values of what all prompts begin with, as of `steps.admit`.
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
        """Sources that there is room for."""
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
        """Gives places keys and values of prompts; arguments are those of `Engine.prefill`."""
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
    """Returns room for the sources of each width."""
    prefixes = prefixes_by_width(model, weights, slots)
    return {
        width: Sources(model, width=width, places=count, prefix=prefixes.get(width, ()))
        for width, count in slots.sources.items()
    }


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
