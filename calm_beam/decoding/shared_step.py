"""A step of prompts whose lanes share what they have in common: a layer is run once for each group of lanes."""

import numpy as np

from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule

from .decisions import Decisions
from .engine import Engine
from .lanes import Groups, LaneTree
from .outputs import StepOutputs
from .step import Step


class SharedStep(Step):
    """See `Step`."""

    def __init__(self, rule: ExitRule, *, layers: int, engine: Engine, paths: LaneTree, first_kept_step: int) -> None:
        """Prepares steps; arguments are those of `Step`."""
        super().__init__(rule, layers=layers, engine=engine, paths=paths, first_kept_step=first_kept_step)
        self._tree = paths

    def run(
        self, live: np.ndarray, *, previous: np.ndarray, thresholds: np.ndarray, known_exits: np.ndarray | None
    ) -> StepOutputs:
        """Returns what a step gives lanes."""
        new, alive = StepOutputs.none(live.shape), live.copy()
        # Views by lane of all slots.
        is_alive, of_lane = alive.reshape(-1), thresholds.reshape(-1)
        lanes = new.by_lane()
        # First lane of each lane's group, by layer: where the group's state stands.
        self._groups = np.zeros((self._layers + 1, alive.size), np.int32)
        # What each lane's layers below have predicted, the nearest first, for measures that compare it.
        self._earlier = np.full((alive.size, max(0, (self._rule.patience or 1) - 1)), -1, np.int32)
        for layer in range(1, self._layers + 1):
            groups = self._tree.groups(layer, alive)
            rows, members, of_member = groups.rows, groups.members, groups.of_member
            if not len(rows.lanes):
                break
            if layer == 1:
                self._engine.embed(rows.lanes, previous.reshape(-1)[rows.lanes])
            below = rows.lanes if layer == 1 else self._groups[layer - 1, rows.lanes]
            (measured,) = self._run_layers(range(layer, layer + 1), rows, below=below)
            self._groups[layer, members] = rows.lanes[of_member]
            if layer not in self._exit_layers:
                continue
            is_last, thresholds_here = layer == self._layers, of_lane[members]
            asks = np.isfinite(thresholds_here) | (is_last or self._measure.needs is Need.TOKENS)
            if known_exits is not None:
                known = known_exits.flat[members]
                asks &= known == 0
            decided = self._decide(layer, groups, asks=asks, thresholds=thresholds_here, measured=measured)
            if len(members) > len(rows.lanes):
                decided = decided.of_rows(of_member)
            self._remember(members, decided.tokens)
            leaves = (decided.low >= thresholds_here) | is_last
            if known_exits is not None:
                leaves = np.where(known, known == layer, leaves)
            # Of those that stay, a layer above writes again.
            lanes.put(members, decided, layer=layer)
            stays = members[~leaves]
            lanes.runner_ups[stays] = np.fmax(lanes.runner_ups[stays], decided.high[~leaves])
            is_alive[members[leaves]] = False
        if not self._decides_by_logits:
            self._read_tokens(new, known_exits)
        return new

    def propagate(self, exit_layers: np.ndarray, goes_on: np.ndarray) -> None:
        """Gives the layers that tokens skipped what they keep of them."""
        members, exits, passed_on = self._to_propagate(exit_layers, goes_on)
        if not len(members):
            return
        layers, lanes, of_member = self._distinct(passed_on, members)
        lowest = np.full(len(lanes), self._layers)
        np.minimum.at(lowest, of_member, exits)
        nodes = np.full((self._layers - 1, len(lanes)), self._tree.capacity, np.int32)
        for layer in range(2, self._layers + 1):
            is_skipped, skips = lowest < layer, exits < layer
            place = np.cumsum(is_skipped) - 1
            nodes[layer - 2, is_skipped] = self._tree.keep(
                layer, lanes[is_skipped], members=members[skips], of_member=place[of_member[skips]]
            )
        self._keep(layers, lanes, nodes, is_skipped=nodes < self._tree.capacity)

    def _remember(self, members: np.ndarray, tokens: np.ndarray) -> None:
        """Puts what lanes have predicted at a layer before what they have at those below."""
        if self._earlier.size:
            kept = self._earlier[members, :-1]
            self._earlier[members] = np.concatenate([tokens[:, None], kept], axis=1)

    def _decide(
        self,
        layer: int,
        groups: Groups,
        *,
        asks: np.ndarray,
        thresholds: np.ndarray,
        measured: np.ndarray,
    ) -> Decisions:
        """Returns what is decided of every row; the tokens are 0 if logits do not decide.

        Args:
          layer: Which.
          groups: Of that layer.
          asks: bool, for each lane that takes part, whether its decision depends on the confidence or the token here.
            The full model's lane asks at the last layer only, unless tokens of the layers below are compared.
          thresholds: Of each of these lanes.
          measured: Confidence of every row, if logits do not decide.
        """
        rows = groups.rows
        count = len(rows.lanes)
        if not self._decides_by_logits:
            return Decisions.measured(measured)
        if not asks.any():
            return Decisions.none(count, confidence=-np.inf)
        asking, is_asked = groups.of_member[asks], np.zeros(count, bool)
        is_asked[asking] = True
        asked, place = np.flatnonzero(is_asked), np.cumsum(is_asked) - 1
        decided = self._project(
            np.full(len(asked), layer),
            rows.lanes[asked],
            # Lanes of a row may have different thresholds; what is open for one of them is for the row.
            of_threshold=place[asking],
            thresholds=thresholds[asks],
        )
        decided = decided.among(asked, count)
        if self._measure.needs is Need.TOKENS:
            # The lanes of a row have all that is below in common.
            self._compare_tokens(decided, asked, self._earlier[rows.lanes[asked]])
        return decided

    def _read_tokens(self, new: StepOutputs, known_exits: np.ndarray | None) -> None:
        """Sets the tokens that are not known, projecting the state of each exit once."""
        members = np.flatnonzero(self._is_read(new, known_exits))
        layers, lanes, of_member = self._distinct(new.exit_layers.flat[members], members)
        decided = self._project(layers, lanes)
        new.tokens.flat[members] = decided.tokens[of_member]
        new.is_finite.flat[members] &= decided.is_finite[of_member]

    def _distinct(self, layers: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns layer and group lane of the distinct states that lanes have at layers, by lane, and each lane's."""
        keys = self._groups[layers, members].astype(np.int64) * (self._layers + 1) + layers
        distinct, of_member = np.unique(keys, return_inverse=True)
        lanes, of_state = np.divmod(distinct, self._layers + 1)
        return of_state, lanes, of_member
