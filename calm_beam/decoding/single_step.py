"""A step of prompts that have one lane each, with layers run ahead of decisions.

Whoever asks after every layer who leaves there pays for that at every layer: a pass over the weights of the head, and
bookkeeping. For few rows that costs more than to take them through a layer or two that some of them would not have
needed. So several layers are run at once where few rows are expected to leave on the way, and are decided together. A
token leaves at the first layer that lets it out, as if it had been asked there; what layers above have made of it is
written over, or never looked at.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calm_beam.exits.measures import Need

from .branches import Branches
from .decisions import Decisions
from .engine import Engine
from .outputs import StepOutputs
from .paths import Rows
from .single_lanes import SingleLanes
from .step import Step
from .work import Work

# Rows of a layer that may be run for nothing, as expected, rather than to ask before it somebody who may stay.
_MOST_AHEAD = 8.0


class _Undecided(NamedTuple):
    """Rows that have not left yet.

    Attributes:
      rows: Which.
      thresholds: float32, shape (rows,).
      asks: bool, likewise. Whether a layer that is not the last asks the head about it.
      known_exits: int32, likewise; 0 where the exit is not known. None if none is.
      earlier: int32, shape (rows, patience - 1). What the layers below have predicted, the nearest first. None if it is
        not compared.
    """

    rows: Rows
    thresholds: np.ndarray
    asks: np.ndarray
    known_exits: np.ndarray | None
    earlier: np.ndarray | None

    def some(self, chosen: np.ndarray) -> "_Undecided":
        """Returns some of them."""
        rows, known, earlier = self.rows, self.known_exits, self.earlier
        lanes = rows.lanes[chosen]
        return _Undecided(
            Rows(lanes, lanes, rows.steps[chosen], rows.nodes[chosen]),
            self.thresholds[chosen],
            self.asks[chosen],
            None if known is None else known[chosen],
            None if earlier is None else earlier[chosen],
        )


class SingleStep(Step):
    """See `Step`; a lane is the number of its slot."""

    def __init__(self, branches: Branches, *, engine: Engine, paths: SingleLanes, first_kept_step: int) -> None:
        """Prepares steps; arguments are those of `Step`, with the branch of the one lane."""
        super().__init__(branches, engine=engine, paths=paths, first_kept_step=first_kept_step)
        layers = branches.layers
        (self._measure,), self._exit_layers = branches.measures, branches.exit_layers
        self._decides_by_logits = self._measure.needs.asks_head
        # How many rows heads are asked about at a time at most.
        self._paths, self._most_asked = paths, 2 * len(paths.step)
        # By layer: rows that came to where they might leave, and those of them that did.
        self._came, self._left = [0] * (layers + 1), [0] * (layers + 1)

    def run(
        self, live: np.ndarray, *, previous: np.ndarray, thresholds: np.ndarray, known_exits: np.ndarray | None
    ) -> StepOutputs:
        """Returns what a step gives lanes."""
        new = StepOutputs.none(live.shape)
        of_lane = new.by_lane()
        rows = self._paths.take(np.flatnonzero(live))
        self._engine.embed(rows.lanes, previous[rows.lanes, 0])
        if run_step := self._engine.whole_step:
            self._work += run_step(rows, thresholds=thresholds, known_exits=known_exits, new=new)
            return new
        undecided = self._undecided(rows, thresholds, known_exits)
        first = 1
        while len(undecided.rows.lanes):
            layers = self._run_before_asking(first, undecided)
            undecided = self._run(layers, undecided, of_lane)
            first = layers.stop
        if not self._decides_by_logits:
            lanes = np.flatnonzero(self._is_read(new, known_exits))
            (decided,) = self._project(of_lane.exit_layers[lanes], lanes)
            of_lane.tokens[lanes] = decided.tokens
            of_lane.is_finite[lanes] &= decided.is_finite
        return new

    def propagate(self, exit_layers: np.ndarray, goes_on: np.ndarray) -> None:
        """Gives the layers that tokens skipped what they keep of them."""
        lanes, exits, passed_on = self._to_propagate(exit_layers, goes_on)
        if not len(lanes):
            return
        is_skipped = exits < np.arange(2, self._layers + 1)[:, None]
        nodes = np.where(is_skipped, self._paths.newest(exits, lanes), np.int32(self._paths.capacity))
        self._keep(passed_on, lanes, nodes, is_skipped=is_skipped)

    def _undecided(self, rows: Rows, thresholds: np.ndarray, known_exits: np.ndarray | None) -> _Undecided:
        """Returns all rows of a step; what is given is by slot and lane."""
        at = thresholds[rows.lanes, 0]
        asks, known, earlier = np.isfinite(at), None, None
        if self._measure.needs is Need.TOKENS:
            # The full model's rows, too: tokens of the layers below are compared.
            asks[:] = True
            earlier = np.full((len(at), self._branches.most_compared), -1, np.int32)
        if known_exits is not None:
            known = known_exits[rows.lanes, 0]
            asks &= known == 0
        return _Undecided(rows, at, asks, known, earlier)

    def _run_before_asking(self, first: int, undecided: _Undecided) -> range:
        """Returns layers, from the first on, that are run before it is asked who has left; the last may be left at."""
        rows = len(undecided.asks)
        asking = rows if self._decides_by_logits and undecided.asks.any() else 0
        staying, asked = float(rows), 0
        for layer in self._exit_layers[:-1]:
            if layer < first:
                continue
            # Of what is not known yet, the worst is expected.
            staying *= 1 - (self._left[layer] + 1) / (self._came[layer] + 1)
            asked += asking
            # Where next to nobody stays, a question here is likely to be the last one.
            most_ahead = _MOST_AHEAD * min(1.0, staying)
            if rows - staying > most_ahead or asked + asking > self._most_asked:
                return range(first, layer + 1)
        return range(first, self._layers + 1)

    def _run(self, layers: range, undecided: _Undecided, new: StepOutputs) -> _Undecided:
        """Runs layers, writes what is decided there to `new`, by lane, and returns who goes on."""
        rows, count = undecided.rows, len(undecided.asks)
        (measured,) = self._run_layers(layers, rows, below=rows.lanes)
        exits = [layer for layer in self._exit_layers if layer in layers]
        asks = self._asks(exits, undecided)
        if self._decides_by_logits:
            decided = self._decide(np.array(exits), undecided, asks)
        else:
            decided = Decisions.measured(measured[np.array(exits) - layers.start].reshape(-1))
        if undecided.earlier is not None:
            undecided = undecided._replace(earlier=self._compare(decided, asks, undecided.earlier))
        leaves = self._leaves(exits, decided, undecided)
        stays = np.flatnonzero(~leaves.any(axis=0))
        # The first layer that lets a row out. Of those that stay, a layer above writes again.
        leaves[-1] = True
        at = leaves.argmax(axis=0)
        new.put(rows.lanes, decided.of_rows(at * count + np.arange(count)), layer=np.array(exits)[at])
        self._count(exits, at, stays)
        if len(layers) > 1:
            self._count_ahead(layers.stop - 1 - np.array(exits)[at], asks, at)
        at[stays] += 1
        passed = np.where(np.arange(len(exits))[:, None] < at, decided.high.reshape(leaves.shape), np.float32(-np.inf))
        rejected = new.max_rejected_confidence
        rejected[rows.lanes] = np.fmax(rejected[rows.lanes], np.fmax.reduce(passed, axis=0))
        return undecided.some(stays)

    def _leaves(self, exits: Sequence[int], decided: Decisions, undecided: _Undecided) -> np.ndarray:
        """Returns which rows a layer lets out, by what is decided there alone, (exits, rows)."""
        leaves: np.ndarray = decided.low.reshape(len(exits), -1) >= undecided.thresholds
        if exits[-1] == self._layers:
            leaves[-1] = True
        known = undecided.known_exits
        return leaves if known is None else np.where(known > 0, known == np.array(exits)[:, None], leaves)

    def _count(self, exits: Sequence[int], at: np.ndarray, stays: np.ndarray) -> None:
        """Counts who came to layers and left there, given the place of each among these; `stays` have not."""
        left = np.bincount(at, minlength=len(exits)).tolist()
        left[-1] -= len(stays)
        came = len(at)
        for layer, number in zip(exits, left, strict=True):
            self._came[layer] += came
            self._left[layer] += number
            came -= number

    def _count_ahead(self, layers_above: np.ndarray, asks: np.ndarray, at: np.ndarray) -> None:
        """Counts what was in vain: layers that were run above the one that rows left at, and what was asked there."""
        in_vain = int(layers_above.sum())
        if in_vain:
            asked = int((asks & (np.arange(len(asks))[:, None] > at)).sum()) if self._decides_by_logits else 0
            self._work += Work(ahead_rows=in_vain, ahead_decisions=asked)

    def _asks(self, exits: Sequence[int], undecided: _Undecided) -> np.ndarray:
        """Returns which rows the head is asked about at layers, (exits, rows), where logits decide."""
        asks = np.repeat(undecided.asks[None], len(exits), axis=0)
        if exits[-1] == self._layers:
            asks[-1] = True if undecided.known_exits is None else undecided.known_exits == 0
        return asks

    def _decide(self, exits: np.ndarray, undecided: _Undecided, asks: np.ndarray) -> Decisions:
        """Returns what heads decide of asking rows at every layer, one layer after the other."""
        lanes = undecided.rows.lanes
        layer, row = np.nonzero(asks)
        if not len(row):
            return Decisions.none(asks.size, confidence=-np.inf)
        thresholds = undecided.thresholds[row]
        (decided,) = self._project(exits[layer], lanes[row], of_threshold=np.arange(len(row)), thresholds=thresholds)
        return decided.among(layer * len(lanes) + row, asks.size)

    def _compare(self, decided: Decisions, asks: np.ndarray, earlier: np.ndarray) -> np.ndarray:
        """Sets the confidences that are made of tokens of asking rows, (layers, rows); returns the newest tokens."""
        for layer, of_rows in enumerate(asks):
            rows, here = np.flatnonzero(of_rows), layer * len(earlier)
            asking = here + rows
            tokens, confidences = (
                decided.tokens[asking],
                self._measure.confidence(decided.tokens[asking], earlier[rows]),
            )
            decided.put(asking, Decisions.exact(tokens, confidences=confidences, is_finite=decided.is_finite[asking]))
            newest = decided.tokens[here : here + len(earlier)]
            earlier = np.concatenate([newest[:, None], earlier], axis=1)[:, : earlier.shape[1]]
        return earlier
