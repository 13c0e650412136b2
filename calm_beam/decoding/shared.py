"""The sweep with shared work: what several thresholds of a prompt have in common is computed once.

Prompts of one padded width occupy the slots of a batch, and all of them take one step at a time. At each layer, the
groups of lanes that are in one state (see `lanes`) are packed into rows, whichever prompt they belong to; lanes that
exit leave, and the others go on to the next layer. Logits are made only where a lane has to decide. A slot whose lanes
have all ended is given the next prompt.
"""

import collections
import logging
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.rule import ExitRule
from calm_beam.model import EarlyExitT5, T5Config
from calm_beam.vocabulary import EOS_ID

from . import device_steps
from .lanes import LaneTree, Rows
from .memory import Budget
from .result import SweepResult
from .widths import members_by_width
from .work import Work

_LOGGER = logging.getLogger(__name__)

# Slots are refilled once this share of them is free: each refill costs a call of the encoder of fixed shape.
_REFILL_SHARE = 4
_FEWEST_ROWS = 64
_FEWEST_STEPS = 16
_FEWEST_RANKS = 8
# Most bytes that attention gathers at a time.
_GATHERED_BYTES = 1 << 24


class SharedSweep:
    """Decodes prompts at all thresholds of a grid, sharing the work of lanes that are in the same state."""

    def __init__(
        self, checkpoint: Checkpoint, rule: ExitRule, thresholds: np.ndarray, *, max_input_length: int, budget: Budget
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          rule: How exits are decided; not one that needs the full model.
          thresholds: float32, shape (steps, lanes); +inf in a lane of the full model.
          max_input_length: Most tokens of a prompt.
          budget: What it may hold at a time. If the device has no room for that, it is halved.
        """
        assert not rule.needs_full_model()
        self._config = checkpoint.config
        self._rule = rule
        self._thresholds = thresholds
        self._max_input_length = max_input_length
        self._budget = budget
        self._weights = _Weights(checkpoint, steps=len(thresholds))
        self.work = Work()

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, SweepResult]]:
        """Yields the outputs of every prompt, with its index, in the order in which they end."""
        waiting = members_by_width(prompts, self._max_input_length)
        while waiting:
            left = {index for members in waiting.values() for index in members}
            try:
                for index, result in self._decode(prompts, waiting):
                    left.remove(index)
                    yield index, result
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or self._budget == self._budget.halved():
                    raise
                self._budget = self._budget.halved()
                _LOGGER.warning(
                    "the device has no memory left; going on with half the budget: %d prompts and %d tokens at a time",
                    self._budget.slots,
                    self._budget.tokens,
                )
            waiting = {width: kept for width, members in waiting.items() if (kept := [i for i in members if i in left])}

    def _decode(
        self, prompts: Sequence[Sequence[int]], members_by_width: Mapping[int, Sequence[int]]
    ) -> Iterator[tuple[int, SweepResult]]:
        """Yields the outputs of the given members of the prompts."""
        batch = _Batch(self._config, self._rule, self._weights, self._thresholds, self._budget, members_by_width)
        # Long prompts tend to have long outputs: begun first, they do not run alone at the end.
        waiting = {
            width: collections.deque(sorted(members, key=lambda index: -len(prompts[index])))
            for width, members in sorted(members_by_width.items(), reverse=True)
        }
        while any(waiting.values()) or batch.is_busy():
            batch.admit(waiting, prompts)
            for width, index in batch.make_room():
                waiting[width].appendleft(index)
            for index, result in batch.step():
                self.work += Work(prompts=1, tokens=int(result.lengths[0])) + batch.take_work()
                yield index, result
        self.work += batch.take_work()


class _Weights:
    """The model's weights on the device, in the parts that the steps take."""

    def __init__(self, checkpoint: Checkpoint, *, steps: int) -> None:
        tree = jax.device_put(checkpoint.parameters())
        decoder = tree["decoder"]
        config = checkpoint.config
        self.all = {"params": tree}
        self.embedding = tree["token_embedder"]["embedding"]
        self.layers = [decoder[f"layers_{index}"] for index in range(config.num_decoder_layers)]
        head = {"decoder_norm": decoder["decoder_norm"]}
        if config.tied_head:
            self.head = {"params": {"decoder": head, "token_embedder": tree["token_embedder"]}}
        else:
            self.head = {"params": {"decoder": {**head, "logits_dense": decoder["logits_dense"]}}}
        self.classifier = {"params": {"decoder": {"meta_cls": decoder["meta_cls"]}}} if config.exit_classifier else {}
        bias = EarlyExitT5(config).apply(self.all, steps, method="decoder_position_bias")
        # [heads, query, key], of the last query -> [heads, age]
        self.bias_by_age = bias[:, -1, ::-1]


class _Sources:
    """Keys and values of the sources of one padded width."""

    def __init__(self, config: T5Config, *, width: int, places: int) -> None:
        self.width = width
        shape = (places, config.num_heads, width, config.head_dim)
        # Two arrays a layer, not one twice: a buffer can only be given away once.
        self.cross = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_decoder_layers)]
        self.mask = jnp.zeros((places, width), bool)
        self.free = list(range(places))

    @property
    def places(self) -> int:
        """Sources that there is room for."""
        return self.mask.shape[0]


class _Batch:
    """Slots of prompts, with what their lanes have generated."""

    def __init__(
        self,
        config: T5Config,
        rule: ExitRule,
        weights: _Weights,
        thresholds: np.ndarray,
        budget: Budget,
        members_by_width: Mapping[int, Sequence[int]],
    ) -> None:
        self._work = Work()
        self._config, self._rule, self._weights, self._thresholds = config, rule, weights, thresholds
        self._layers = config.num_decoder_layers
        self._exit_layers = frozenset(rule.exit_layers(self._layers))
        steps, lanes = thresholds.shape
        self._lanes = lanes
        slots = min(budget.slots, sum(len(members) for members in members_by_width.values()))
        # A third of the tokens for sources, each width at a time; there is always room for one prompt.
        places = {
            width: max(1, min(slots, len(members), budget.tokens // (3 * width)))
            for width, members in members_by_width.items()
        }
        self._most_nodes = max(lanes * steps, budget.tokens - sum(width * count for width, count in places.items()))
        self._tree = LaneTree(
            slots=slots,
            lanes=lanes,
            steps=steps,
            layers=self._layers,
            separates_exit=rule.state_propagation != "from_exit",
            capacity=min(slots * max(lanes, 2 * steps), self._most_nodes),
        )
        self._sources = {width: _Sources(config, width=width, places=count) for width, count in places.items()}
        self._is_crowded = False
        self._slots = slots
        self._owners = np.full(slots, -1)
        self._widths = np.zeros(slots, np.int32)
        self._places = np.zeros(slots, np.int32)
        self._live = np.zeros((slots, lanes), bool)
        self._previous = np.zeros((slots, lanes), np.int32)
        self._is_finite = np.ones(slots, bool)
        self._tokens = np.zeros((slots, lanes, steps), np.int32)
        self._exits = np.zeros((slots, lanes, steps), np.int32)
        self._confidences = np.zeros((slots, lanes, steps), np.float32)
        store = (self._tree.capacity, config.num_heads * config.head_dim)
        self._cache = [(jnp.zeros(store), jnp.zeros(store)) for _ in range(self._layers)]
        self._states = jnp.zeros((self._layers + 1, slots * lanes, config.emb_dim))

    def take_work(self) -> Work:
        """Returns what was counted since the last call."""
        taken, self._work = self._work, Work()
        return taken

    def is_busy(self) -> bool:
        """Returns whether any slot holds a prompt."""
        return bool((self._owners >= 0).any())

    def admit(self, waiting: Mapping[int, collections.deque[int]], prompts: Sequence[Sequence[int]]) -> None:
        """Moves waiting prompts into free slots, once enough are free."""
        if self._is_crowded:
            return
        for width, queue in waiting.items():
            sources = self._sources[width]
            chunk = max(1, sources.places // _REFILL_SHARE)
            while queue:
                free = np.flatnonzero(self._owners < 0)
                count = min(chunk, len(queue))
                if len(free) < count or len(sources.free) < count:
                    # In order, so that widths follow each other and are not all in use at once.
                    return
                slots = free[:count]
                source_tokens = np.zeros((chunk, width), np.int32)
                for row, slot in enumerate(slots):
                    self._owners[slot] = index = queue.popleft()
                    self._widths[slot], self._places[slot] = width, sources.free.pop()
                    source_tokens[row, : len(prompts[index])] = prompts[index]
                sources.cross, sources.mask = device_steps.admit(
                    self._config,
                    self._weights.all,
                    sources.cross,
                    sources.mask,
                    source_tokens,
                    _padded(self._places[slots], chunk, fill=sources.places),
                )
                self._tree.admit(slots)
                self._live[slots] = True
                self._is_finite[slots] = True
                for values in (self._previous, self._tokens, self._exits, self._confidences):
                    values[slots] = 0

    def step(self) -> Iterator[tuple[int, SweepResult]]:
        """Generates one token in every live lane, and yields the prompts that have ended."""
        live = self._live
        exits, tokens, confidences, is_finite = self._run_layers()
        goes_on = live & (tokens != EOS_ID) & (self._tree.step < len(self._thresholds) - 1)[:, None]
        self._propagate(exits, goes_on)
        step = np.broadcast_to(self._tree.step[:, None], live.shape)[live]
        slot, lane = np.nonzero(live)
        self._tokens[slot, lane, step] = tokens[live]
        self._exits[slot, lane, step] = exits[live]
        self._confidences[slot, lane, step] = confidences[live]
        self._is_finite &= (is_finite | ~live).all(axis=1)
        self._tree.advance(tokens, exits, live)
        self._previous, self._live = tokens, goes_on
        for ended in np.flatnonzero((self._owners >= 0) & ~goes_on.any(axis=1)).tolist():
            _, index = self._vacate(ended)
            self._is_crowded = False
            exit_layers = self._exits[ended].copy()
            yield (
                index,
                SweepResult(
                    tokens=self._tokens[ended].copy(),
                    exit_layers=exit_layers,
                    confidences=self._confidences[ended].copy(),
                    lengths=(exit_layers > 0).sum(axis=1),
                    is_finite=bool(self._is_finite[ended]),
                ),
            )

    def make_room(self) -> Iterator[tuple[int, int]]:
        """Sees that every layer has a free node for each live lane, and yields the prompts that had to leave for it.

        Stores are widened as far as the budget goes. Beyond that the youngest prompts give way, by width and index, and
        start again later; until a prompt has ended, none is admitted.
        """
        while self._tree.room() < self._live.sum():
            added = min(self._tree.capacity, self._most_nodes - self._tree.capacity)
            if added:
                self._tree.grow(added)
                wider = ((0, added), (0, 0))
                self._cache = [(jnp.pad(keys, wider), jnp.pad(values, wider)) for keys, values in self._cache]
                continue
            busy = np.flatnonzero(self._owners >= 0)
            assert len(busy) > 1, "the budget has room for one prompt"
            youngest = busy.tolist()[int(np.argmin(self._tree.step[busy]))]
            self._live[youngest] = False
            self._is_crowded = True
            yield self._vacate(youngest)

    def _vacate(self, slot: int) -> tuple[int, int]:
        """Frees a slot, and returns width and index of its prompt."""
        width, index = int(self._widths[slot]), int(self._owners[slot])
        self._owners[slot] = -1
        self._sources[width].free.append(int(self._places[slot]))
        self._tree.release(slot)
        return width, index

    def _run_layers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns exit layer, token, confidence and finiteness of every lane, each (slots, lanes)."""
        shape = self._live.shape
        exits, tokens = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        confidences, is_finite = np.zeros(shape, np.float32), np.ones(shape, bool)
        thresholds = self._thresholds[np.minimum(self._tree.step, len(self._thresholds) - 1)]
        alive = self._live.copy()
        # First lane of each lane's group, by layer: where the group's state stands.
        self._groups = np.zeros((self._layers + 1, alive.size), np.int32)
        for layer in range(1, self._layers + 1):
            rows = self._tree.rows(layer, alive)
            if not len(rows.lanes):
                break
            if layer == 1:
                self._embed(rows)
            measured = self._run_layer(layer, rows)
            members = np.flatnonzero(alive)
            of_member = rows.of_lane[members]
            self._groups[layer, members] = rows.lanes[of_member]
            if layer not in self._exit_layers:
                continue
            row_tokens, row_confidences, row_finite = self._decide(
                layer, rows, of_member, np.isfinite(thresholds.flat[members]), measured
            )
            leaves = (row_confidences[of_member] >= thresholds.flat[members]) | (layer == self._layers)
            leaving, row = members[leaves], of_member[leaves]
            exits.flat[leaving] = layer
            tokens.flat[leaving] = row_tokens[row]
            confidences.flat[leaving] = row_confidences[row]
            is_finite.flat[leaving] = row_finite[row]
            alive.flat[leaving] = False
        if not self._decides_by_logits():
            tokens, made_of_numbers = self._tokens_at(exits)
            is_finite &= made_of_numbers
        return exits, tokens, confidences, is_finite

    def _decides_by_logits(self) -> bool:
        return self._rule.confidence in ("softmax", "softmax_max")

    def _embed(self, rows: Rows) -> None:
        size = _row_bucket(len(rows.lanes))
        self._states = device_steps.embed(
            self._weights.embedding,
            self._states,
            _padded(self._previous.flat[rows.lanes], size),
            _padded(rows.lanes, size, fill=self._live.size),
        )

    def _run_layer(self, layer: int, rows: Rows) -> np.ndarray:
        """Runs a layer for its rows, and returns the confidence of each that needs no logits."""
        below = rows.lanes if layer == 1 else self._groups[layer - 1, rows.lanes]
        weights = self._weights.layers[layer - 1]
        for chosen, length in self._by_length(rows.steps):
            size = _row_bucket(len(chosen))
            self._states, self._cache[layer - 1] = device_steps.attend_to_output(
                self._config,
                weights,
                self._states,
                self._cache[layer - 1],
                self._weights.bias_by_age,
                np.int32(layer),
                _padded(below[chosen], size),
                _padded(rows.lanes[chosen], size, fill=self._live.size),
                _padded(rows.nodes[chosen], size, fill=self._tree.capacity),
                _padded(self._tree.paths(layer, rows.lanes[chosen], length), size),
                _padded(rows.steps[chosen], size),
            )
        parameters = {"layer": weights}
        if self._rule.confidence == "classifier":
            parameters["classifier"] = self._weights.classifier
        measured = np.full(len(rows.lanes), layer / self._layers, np.float32)
        widths = self._widths[rows.slots]
        # Rows are ordered by slot: how many of the same slot stand before each.
        ranks = np.arange(len(rows.slots)) - np.searchsorted(rows.slots, rows.slots)
        for width in np.unique(widths).tolist():
            chosen, sources = np.flatnonzero(widths == width), self._sources[width]
            size = _row_bucket(len(chosen))
            self._work += Work(layer_rows=len(chosen), padded_rows=size - len(chosen))
            self._states, confidences = device_steps.finish_layer(
                self._config,
                self._rule.confidence,
                _rank_bucket(int(ranks[chosen].max()) + 1),
                parameters,
                self._states,
                sources.cross[layer - 1],
                sources.mask,
                np.int32(layer),
                _padded(below[chosen], size),
                _padded(rows.lanes[chosen], size, fill=self._live.size),
                _padded(self._places[rows.slots[chosen]], size, fill=sources.places),
                _padded(ranks[chosen], size),
            )
            if self._rule.confidence in ("state", "classifier"):
                measured[chosen] = np.asarray(confidences)[: len(chosen)]
        return measured

    def _by_length(self, steps: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """Yields rows that are run together, and the length of path that covers their steps."""
        lengths = np.full(len(steps), _FEWEST_STEPS)
        while (short := lengths <= steps).any():
            lengths[short] *= 2
        for length in np.unique(lengths).tolist():
            chosen = np.flatnonzero(lengths == length)
            most = _most_rows(_GATHERED_BYTES // (4 * length * self._config.num_heads * self._config.head_dim))
            for start in range(0, len(chosen), most):
                yield chosen[start : start + most], min(length, len(self._thresholds))

    def _decide(
        self, layer: int, rows: Rows, of_member: np.ndarray, may_leave: np.ndarray, measured: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns token, confidence and finiteness of every row; the tokens are 0 if logits do not decide."""
        count = len(rows.lanes)
        tokens = np.zeros(count, np.int32)
        if not self._decides_by_logits():
            return tokens, measured, np.isfinite(measured)
        # Rows whose lanes no confidence lets out, such as the full model's, decide nothing below the last layer.
        is_asked = np.bincount(of_member, weights=may_leave, minlength=count) > 0
        asked = np.flatnonzero(is_asked | (layer == self._layers))
        confidences, is_finite = np.full(count, -np.inf, np.float32), np.ones(count, bool)
        tokens[asked], confidences[asked], is_finite[asked] = self._project(
            np.full(len(asked), layer), rows.lanes[asked], self._rule.confidence
        )
        return tokens, confidences, is_finite & np.isfinite(confidences)

    def _tokens_at(self, exits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns token and finiteness of every lane, projecting the state of each exit once."""
        tokens, is_finite = np.zeros(exits.shape, np.int32), np.ones(exits.shape, bool)
        members = np.flatnonzero(exits)
        layers, lanes, of_member = self._distinct(exits.flat[members], members)
        row_tokens, _, row_finite = self._project(layers, lanes, self._rule.confidence)
        tokens.flat[members], is_finite.flat[members] = row_tokens[of_member], row_finite[of_member]
        return tokens, is_finite

    def _project(self, layers: np.ndarray, lanes: np.ndarray, measure: str) -> tuple[np.ndarray, ...]:
        """Returns token, confidence and finiteness that the head makes of states."""
        count = len(lanes)
        if not count:
            return np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, bool)
        self._work += Work(projection_rows=count)
        size = _row_bucket(count)
        made = device_steps.decide_rows(
            self._config,
            measure,
            self._weights.head,
            self._states,
            _padded(layers, size),
            _padded(lanes, size),
        )
        return tuple(np.asarray(values)[:count] for values in made)

    def _distinct(self, layers: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns layer and group lane of the distinct states that lanes have at layers, by lane, and each lane's."""
        keys = self._groups[layers, members].astype(np.int64) * (self._layers + 1) + layers
        distinct, of_member = np.unique(keys, return_inverse=True)
        lanes, of_state = np.divmod(distinct, self._layers + 1)
        return of_state, lanes, of_member

    def _propagate(self, exits: np.ndarray, goes_on: np.ndarray) -> None:
        """Gives the layers that tokens skipped what they keep of them (CALM, "State propagation")."""
        members = np.flatnonzero((exits < self._layers) & goes_on)
        if not len(members):
            return
        exits = exits.flat[members]
        first = min(self._exit_layers)
        sources = np.full_like(exits, first) if self._rule.state_propagation == "from_first_exit" else exits
        layers, lanes, of_member = self._distinct(sources, members)
        lowest = np.full(len(lanes), self._layers)
        np.minimum.at(lowest, of_member, exits)
        size = _row_bucket(len(lanes))
        nodes = np.full((self._layers - 1, size), self._tree.capacity, np.int32)
        for layer in range(2, self._layers + 1):
            skipped = np.flatnonzero(lowest < layer)
            place = np.cumsum(lowest < layer) - 1
            skips = exits < layer
            nodes[layer - 2, skipped] = self._tree.keep(layer, lanes[skipped], members[skips], place[of_member[skips]])
        if self._rule.state_propagation == "projected":
            source_nodes = self._tree.newest(layers, lanes)
            self._cache = device_steps.copy_skipped(
                self._cache, _padded(layers, size), _padded(source_nodes, size), nodes
            )
            return
        self._work += Work(fill_rows=int((nodes < self._tree.capacity).sum()))
        self._cache[1:] = device_steps.fill_skipped(
            self._config,
            self._weights.layers[1:],
            self._cache[1:],
            self._states,
            _padded(layers, size),
            _padded(lanes, size),
            nodes,
        )


def _padded(values: np.ndarray, size: int, *, fill: int = 0) -> np.ndarray:
    padded = np.full((size, *values.shape[1:]), fill, np.int32)
    padded[: len(values)] = values
    return padded


def _row_bucket(count: int) -> int:
    """Returns the next of 64, 128, 192, 256, 384, 512, ...: few shapes, and at most a third of a batch is padding."""
    size = _FEWEST_ROWS
    while size < count:
        is_power = size & (size - 1) == 0
        size = size * 2 if size == _FEWEST_ROWS else size * 3 // 2 if is_power else size * 4 // 3
    return size


def _most_rows(count: int) -> int:
    """Returns the largest size of `_row_bucket` up to a count, and at least the smallest."""
    size = _FEWEST_ROWS
    while _row_bucket(size + 1) <= count:
        size = _row_bucket(size + 1)
    return size


def _rank_bucket(count: int) -> int:
    """Returns the next of 8, 32, 128, ...."""
    size = _FEWEST_RANKS
    while size < count:
        size *= 4
    return size
