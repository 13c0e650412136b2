"""A step of prompts whose lanes share what they have in common: a layer is run once for each group of lanes.

By a rule that needs the full model at every token (the oracle, the full cache, tokens of the last layer), every lane
goes through every layer. Where it has left is decided after the last one, and what the layers above have made of the
token is then replaced by what the rule has them keep.
"""

from collections.abc import Sequence

import numpy as np

from calm_beam.exits.measures import Need
from calm_beam.exits.propagations import PassedOn
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
        self._decides_after_last_layer = rule.needs_full_model()
        self._takes_last_token = rule.token_from == "last_layer"

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
        at_layers: list[Decisions] = []
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
            known = None if known_exits is None else known_exits.flat[members]
            asks = self._asks(thresholds_here, is_last=is_last, known=known)
            decided = self._decide(layer, groups, asks=asks, thresholds=thresholds_here, measured=measured)
            if len(members) > len(rows.lanes):
                decided = decided.of_rows(of_member)
            self._remember(members, decided.tokens)
            if self._decides_after_last_layer:
                at_layers.append(decided)
                continue
            leaves = (decided.low >= thresholds_here) | is_last
            if known is not None:
                leaves = np.where(known, known == layer, leaves)
            # Of those that stay, a layer above writes again.
            lanes.put(members, decided, layer=layer)
            stays = members[~leaves]
            lanes.runner_ups[stays] = np.fmax(lanes.runner_ups[stays], decided.high[~leaves])
            is_alive[members[leaves]] = False
        if at_layers:
            self._leave_afterwards(lanes, np.flatnonzero(live), at_layers=at_layers, thresholds=of_lane)
        if not self._decides_by_logits:
            self._read_tokens(new, known_exits)
        return new

    def propagate(self, exit_layers: np.ndarray, goes_on: np.ndarray) -> None:
        """Gives the layers that tokens skipped what they keep of them."""
        members, exits, passed_on = self._to_propagate(exit_layers, goes_on)
        if not len(members) or self._passed_on is PassedOn.NOTHING:
            return
        layers, lanes, of_member = self._distinct(passed_on, members)
        lowest = np.full(len(lanes), self._layers)
        np.minimum.at(lowest, of_member, exits)
        nodes = np.full((self._layers - 1, len(lanes)), self._tree.capacity, np.int32)
        for layer in range(2, self._layers + 1):
            is_skipped, skips = lowest < layer, exits < layer
            if self._decides_after_last_layer:
                others = np.setdiff1d(np.flatnonzero(goes_on), members[skips])
                self._tree.give_back_newest(layer, members[skips], others=others)
            place = np.cumsum(is_skipped) - 1
            nodes[layer - 2, is_skipped] = self._tree.keep(
                layer, lanes[is_skipped], members=members[skips], of_member=place[of_member[skips]]
            )
        self._keep(layers, lanes, nodes, is_skipped=nodes < self._tree.capacity)

    def _asks(self, thresholds: np.ndarray, *, is_last: bool, known: np.ndarray | None) -> np.ndarray:
        """Returns which lanes a layer's decision is needed for, given their thresholds and the exits that are known.

        The full model's lane asks at the last layer only, unless tokens of the layers below are compared.
        """
        asks: np.ndarray = np.isfinite(thresholds) | (is_last or self._measure.needs is Need.TOKENS)
        return asks if known is None else asks & (known == 0)

    def _leave_afterwards(
        self, lanes: StepOutputs, members: np.ndarray, *, at_layers: Sequence[Decisions], thresholds: np.ndarray
    ) -> None:
        """Writes where lanes have left, once all of them have been through the last layer.

        Args:
          lanes: As of `StepOutputs.by_lane`.
          members: Those that generate.
          at_layers: What is decided of each of these at every layer that may exit, ascending.
          thresholds: Of all lanes.
        """
        tokens = np.stack([decided.tokens for decided in at_layers])
        low, high = (np.stack([getattr(decided, name) for decided in at_layers]) for name in ("low", "high"))
        is_finite = np.stack([decided.is_finite for decided in at_layers])
        if self._measure.needs is Need.LAST_TOKEN:
            low = high = self._measure.confidence(tokens, tokens[-1])
        leaves = low >= thresholds[members]
        leaves[-1] = True
        first, each = leaves.argmax(axis=0), np.arange(len(members))
        predicting = np.full_like(first, len(at_layers) - 1) if self._takes_last_token else first
        decided = Decisions(
            tokens[predicting, each],
            low=low[first, each],
            high=high[first, each],
            is_finite=is_finite[first, each] & is_finite[predicting, each],
        )
        lanes.put(members, decided, layer=np.array(self._exit_layers)[first])
        is_below = np.arange(len(at_layers))[:, None] < first
        lanes.runner_ups[members] = np.fmax.reduce(np.where(is_below, high, -np.inf))

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
        predicting = new.exit_layers.flat[members]
        if self._takes_last_token:
            predicting = np.full_like(predicting, self._layers)
        layers, lanes, of_member = self._distinct(predicting, members)
        decided = self._project(layers, lanes)
        new.tokens.flat[members] = decided.tokens[of_member]
        new.is_finite.flat[members] &= decided.is_finite[of_member]

    def _distinct(self, layers: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns layer and group lane of the distinct states that lanes have at layers, by lane, and each lane's."""
        keys = self._groups[layers, members].astype(np.int64) * (self._layers + 1) + layers
        distinct, of_member = np.unique(keys, return_inverse=True)
        lanes, of_state = np.divmod(distinct, self._layers + 1)
        return of_state, lanes, of_member
