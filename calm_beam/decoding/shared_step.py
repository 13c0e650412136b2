"""A step of prompts whose lanes share what they have in common: a layer is run once for each group of lanes.

By a rule that needs the full model at every token (the oracle, the full cache, tokens of the last layer), every lane
goes through every layer. Where it has left is decided after the last one, and what the layers above have made of the
token is then replaced by what the rule has them keep.
"""

from collections.abc import Sequence

import numpy as np

from calm_beam.exits.measures import Need
from calm_beam.exits.propagations import PassedOn

from .branches import Branches
from .decisions import Decisions
from .engine import Engine
from .lanes import Groups, LaneTree
from .outputs import StepOutputs
from .step import Step


class SharedStep(Step):
    """See `Step`."""

    def __init__(self, branches: Branches, *, engine: Engine, paths: LaneTree, first_kept_step: int) -> None:
        """Prepares steps; arguments are those of `Step`."""
        super().__init__(branches, engine=engine, paths=paths, first_kept_step=first_kept_step)
        self._tree = paths
        # By lane of all slots.
        slots = len(paths.step)
        self._measure_of, self._asks_head = (np.tile(each, slots) for each in (branches.measure_of, branches.asks_head))
        self._may_exit = np.tile(branches.may_exit, slots)
        self._by_logits, self._by_tokens = branches.indices(Need.LOGITS), branches.indices(Need.TOKENS)
        self._is_compared = np.isin(self._measure_of, self._by_tokens)

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
        self._earlier = np.full((alive.size, self._branches.most_compared), -1, np.int32)
        at_layers: list[Decisions] = []
        for layer in range(1, self._layers + 1):
            groups = self._tree.groups(layer, alive)
            rows, members = groups.rows, groups.members
            if not len(rows.lanes):
                break
            if layer == 1:
                self._engine.embed(rows.lanes, previous.reshape(-1)[rows.lanes])
            below = rows.lanes if layer == 1 else self._groups[layer - 1, rows.lanes]
            measured = self._run_layers(range(layer, layer + 1), rows, below=below)[:, 0]
            self._groups[layer, members] = rows.lanes[groups.of_member]
            groups = self._that_may_exit(layer, groups)
            members = groups.members
            if not len(members):
                continue
            is_last, thresholds_here = layer == self._layers, of_lane[members]
            known = None if known_exits is None else known_exits.flat[members]
            decided = self._decide(layer, groups, thresholds=thresholds_here, known=known, measured=measured)
            if self._branches.decides_after_last_layer:
                at_layers.append(decided)
                continue
            leaves = (decided.low >= thresholds_here) | is_last
            if known is not None:
                leaves = np.where(known, known == layer, leaves)
            # Of those that stay, a layer above writes again.
            lanes.put(members, decided, layer=layer)
            stays = members[~leaves]
            lanes.max_rejected_confidence[stays] = np.fmax(lanes.max_rejected_confidence[stays], decided.high[~leaves])
            is_alive[members[leaves]] = False
        if at_layers:
            self._leave_afterwards(lanes, np.flatnonzero(live), at_layers=at_layers, thresholds=of_lane)
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
            if self._branches.decides_after_last_layer:
                others = np.setdiff1d(np.flatnonzero(goes_on), members[skips])
                self._tree.give_back_newest(layer, members[skips], others=others)
            place = np.cumsum(is_skipped) - 1
            nodes[layer - 2, is_skipped] = self._tree.keep(
                layer, lanes[is_skipped], members=members[skips], of_member=place[of_member[skips]]
            )
        self._keep(layers, lanes, nodes, is_skipped=nodes < self._tree.capacity)

    def _that_may_exit(self, layer: int, groups: Groups) -> Groups:
        """Returns the groups of a layer with those of their members alone that may leave there."""
        may_exit = self._may_exit[layer, groups.members]
        if may_exit.all():
            return groups
        return Groups(groups.rows, groups.members[may_exit], groups.of_member[may_exit])

    def _decide(
        self,
        layer: int,
        groups: Groups,
        *,
        thresholds: np.ndarray,
        known: np.ndarray | None,
        measured: np.ndarray,
    ) -> Decisions:
        """Returns what is decided of every lane that may exit; the tokens are 0 where logits do not decide.

        Args:
          layer: Which.
          groups: Of that layer.
          thresholds: Of each of these lanes.
          known: Where each leaves, if that is known already; else 0. None if none is.
          measured: Confidences of every row by measures that need no logits, (measures, rows).
        """
        members, of_member = groups.members, groups.of_member
        # [measures, rows]
        low, high = measured, measured
        tokens, is_finite = np.zeros(len(groups.rows.lanes), np.int32), np.ones(len(groups.rows.lanes), bool)
        asks = self._asks(members, thresholds, is_last=layer == self._layers, known=known)
        if asks is not None:
            low, high = measured.copy(), measured.copy()
            low[self._by_logits] = high[self._by_logits] = -np.inf
            self._ask(layer, groups, asks, thresholds=thresholds, made=(tokens, low, high, is_finite))
        measure = self._measure_of[members]
        decided = Decisions(
            tokens[of_member],
            low=low[measure, of_member],
            high=high[measure, of_member],
            is_finite=is_finite[of_member],
        )
        if self._by_tokens:
            self._compare_tokens(members, decided)
        return decided

    def _asks(
        self, members: np.ndarray, thresholds: np.ndarray, *, is_last: bool, known: np.ndarray | None
    ) -> np.ndarray | None:
        """Returns which lanes need the head's decision, given their thresholds and the exits that are known.

        The full model's lane asks at the last layer only, unless tokens of the layers below are compared. None if no
        lane's measure asks it.
        """
        if not self._asks_head.any():
            return None
        asks: np.ndarray = self._asks_head[members]
        if not is_last:
            asks = asks & (np.isfinite(thresholds) | self._is_compared[members])
        return asks if known is None else asks & (known == 0)

    def _ask(
        self, layer: int, groups: Groups, asks: np.ndarray, *, thresholds: np.ndarray, made: tuple[np.ndarray, ...]
    ) -> None:
        """Writes what heads decide of rows of asking lanes: tokens, ends of intervals of confidences, finiteness.

        The ends are of shape (measures, rows).
        """
        tokens, low, high, is_finite = made
        asking, is_asked = groups.of_member[asks], np.zeros(len(tokens), bool)
        is_asked[asking] = True
        asked, place = np.flatnonzero(is_asked), np.cumsum(is_asked) - 1
        if not len(asked):
            return
        decided = self._project(
            np.full(len(asked), layer),
            groups.rows.lanes[asked],
            # Lanes of a row may have different thresholds; what is open for one of them is for the row.
            of_threshold=place[asking],
            thresholds=thresholds[asks],
        )
        tokens[asked], is_finite[asked] = decided[0].tokens, decided[0].is_finite
        for index, of_measure in zip(self._by_logits, decided, strict=False):
            low[index, asked], high[index, asked] = of_measure.low, of_measure.high

    def _compare_tokens(self, members: np.ndarray, decided: Decisions) -> None:
        """Sets the confidences of lanes whose measure compares tokens, and puts these before those of layers below."""
        for index in self._by_tokens:
            of_measure = np.flatnonzero(self._measure_of[members] == index)
            lanes, tokens = members[of_measure], decided.tokens[of_measure]
            patience = self._branches.rules[index].patience
            assert patience is not None, "the measure has one"
            earlier = self._earlier[lanes]
            confidences = self._branches.measures[index].confidence(tokens, earlier[:, : patience - 1])
            decided.low[of_measure] = decided.high[of_measure] = confidences
            if self._earlier.size:
                self._earlier[lanes] = np.concatenate([tokens[:, None], earlier[:, :-1]], axis=1)

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
        (measure,) = self._branches.measures
        if measure.needs is Need.LAST_TOKEN:
            low = high = measure.confidence(tokens, tokens[-1])
        leaves = low >= thresholds[members]
        leaves[-1] = True
        first, each = leaves.argmax(axis=0), np.arange(len(members))
        predicting = np.full_like(first, len(at_layers) - 1) if self._branches.takes_last_token else first
        decided = Decisions(
            tokens[predicting, each],
            low=low[first, each],
            high=high[first, each],
            is_finite=is_finite[first, each] & is_finite[predicting, each],
        )
        lanes.put(members, decided, layer=np.array(self._branches.exit_layers)[first])
        is_below = np.arange(len(at_layers))[:, None] < first
        lanes.max_rejected_confidence[members] = np.fmax.reduce(np.where(is_below, high, -np.inf))

    def _read_tokens(self, new: StepOutputs, known_exits: np.ndarray | None) -> None:
        """Sets the tokens that are not known where logits do not decide, projecting the state of each exit once."""
        members = np.flatnonzero(self._is_read(new, known_exits).reshape(-1) & ~self._asks_head)
        if not len(members):
            return
        predicting = new.exit_layers.flat[members]
        if self._branches.takes_last_token:
            predicting = np.full_like(predicting, self._layers)
        layers, lanes, of_member = self._distinct(predicting, members)
        decided, *_ = self._project(layers, lanes)
        new.tokens.flat[members] = decided.tokens[of_member]
        new.is_finite.flat[members] &= decided.is_finite[of_member]

    def _distinct(self, layers: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns layer and group lane of the distinct states that lanes have at layers, by lane, and each lane's."""
        keys = self._groups[layers, members].astype(np.int64) * (self._layers + 1) + layers
        distinct, of_member = np.unique(keys, return_inverse=True)
        lanes, of_state = np.divmod(distinct, self._layers + 1)
        return of_state, lanes, of_member
