"""One step of all branches of a batch: the layers they run, their exits, and the cache of skipped layers.

Where prompts have several branches (`SharedStep`), a layer is run once for each group of branches that share their
state. With a rule that needs the full model at every token (the oracle, the full cache, tokens of the last layer),
every branch runs every layer. Its exit is decided after the last layer, and the cache of the layers above the exit is
then replaced as the rule's state propagation demands.

Where prompts have one branch each (`SingleStep`), layers run ahead of decisions. Testing for exits after every layer
costs bookkeeping and a head projection per layer. For few rows, that costs more than running a layer or two that some
of the rows would not have needed. So several layers run at once where few rows are expected to exit on the way, and
their exits are decided together. A token exits at the first layer whose confidence reaches its threshold, as if it had
been tested there; results of layers above are overwritten, or never read.
"""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calm_beam.exits.measures import Need
from calm_beam.exits.propagations import PassedOn

from .branches import Branches
from .engine import Decisions, Engine, StepOutputs, Work
from .kv_cache import BranchTree, Groups, Paths, Rows, SingleBranches


class Step(abc.ABC):
    """One step of all branches of a batch: the common part of `SharedStep` and `SingleStep`."""

    def __init__(self, branch_rules: Branches, *, engine: Engine, paths: Paths, first_kept_step: int) -> None:
        """Prepares steps.

        Args:
          branch_rules: How exits of each branch are decided.
          engine: The engine that computes rows.
          paths: Paths and nodes of the branches.
          first_kept_step: First step that later ones attend to.
        """
        self._branch_rules, self._engine, self._layers = branch_rules, engine, branch_rules.layers
        self._passed_on = branch_rules.passed_on
        self._step, self._first_kept_step = paths.step, first_kept_step
        self._work = Work()

    @abc.abstractmethod
    def run(
        self, live: np.ndarray, *, previous: np.ndarray, thresholds: np.ndarray, known_exits: np.ndarray | None
    ) -> StepOutputs:
        """Runs the layers of a step, and returns the new token of every branch with its exit layer and confidences.

        Args:
          live: bool, shape (slots, branches). Branches that generate.
          previous: int32, shape (slots, branches). The last token of each branch.
          thresholds: float32, shape (slots, branches). +inf in a branch of the full model.
          known_exits: int32, shape (slots, branches). Known exit layers, 0 where not known; None if none is known. The
            caller fills in the other outputs of branches with a known exit.
        """

    @abc.abstractmethod
    def propagate(self, exit_layers: np.ndarray, goes_on: np.ndarray) -> None:
        """Fills the KV cache of the layers that tokens skipped (CALM, "State propagation").

        Args:
          exit_layers: int32, shape (slots, branches). Exit layer of each token.
          goes_on: bool, shape (slots, branches). Branches that will attend to it.
        """

    def take_work(self) -> Work:
        """Returns the work counted since the last call."""
        taken, self._work = self._work, Work()
        return taken

    def _run_layers(self, layers: range, rows: Rows, *, below: np.ndarray) -> np.ndarray:
        """Runs layers for rows, and returns confidences by measures without logits, (measures, layers, rows)."""
        measured, work = self._engine.run_layers(layers, rows, below=below)
        self._work += work
        for index in self._branch_rules.indices(Need.LAYER):
            for of_layer, layer in zip(measured[index], layers, strict=True):
                of_layer[:] = self._branch_rules.measures[index].confidence(layer, self._layers)
        return measured

    def _project(self, layers: np.ndarray, branches: np.ndarray, **compared: np.ndarray) -> list[Decisions]:
        """Returns the heads' decisions for states, given by layer and branch, as `Engine.decide` does."""
        decided, work = self._engine.decide(layers, branches, **compared)
        self._work += work
        return decided

    def _is_read(self, new: StepOutputs, known_exits: np.ndarray | None) -> np.ndarray:
        """Returns which branches have exited and still need a token from the head, if logits did not decide."""
        has_left: np.ndarray = new.exit_layers > 0
        return has_left if known_exits is None else has_left & (known_exits == 0)

    def _to_propagate(self, exit_layers: np.ndarray, goes_on: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the branches whose skipped layers need filling, their exit layers, and the layers to fill from."""
        is_kept = (self._step >= self._first_kept_step)[:, None]
        members = np.flatnonzero((exit_layers < self._layers) & goes_on & is_kept)
        exits = exit_layers.flat[members]
        is_first = self._passed_on is PassedOn.FIRST_STATE
        return members, exits, np.full_like(exits, self._branch_rules.first_exit) if is_first else exits

    def _keep(self, layers: np.ndarray, branches: np.ndarray, nodes: np.ndarray, *, is_skipped: np.ndarray) -> None:
        """Fills nodes of skipped layers, (layers - 1, states), from states."""
        if self._passed_on is PassedOn.KEYS_VALUES:
            self._engine.copy_skipped(layers, branches, nodes)
        else:
            self._work += Work(fill_rows=int(is_skipped.sum()))
            self._engine.keep_skipped(layers, branches, nodes)


class SharedStep(Step):
    """The `Step` of prompts with several branches."""

    def __init__(self, branch_rules: Branches, *, engine: Engine, paths: BranchTree, first_kept_step: int) -> None:
        """Prepares steps; arguments are those of `Step`."""
        super().__init__(branch_rules, engine=engine, paths=paths, first_kept_step=first_kept_step)
        self._tree = paths
        # Indexed by the branches of all slots.
        slots = len(paths.step)
        self._measure_of, self._asks_head = (
            np.tile(each, slots) for each in (branch_rules.measure_of, branch_rules.asks_head)
        )
        self._may_exit = np.tile(branch_rules.may_exit, slots)
        self._by_logits, self._by_tokens = branch_rules.indices(Need.LOGITS), branch_rules.indices(Need.TOKENS)
        self._is_compared = np.isin(self._measure_of, self._by_tokens)

    def run(
        self, live: np.ndarray, *, previous: np.ndarray, thresholds: np.ndarray, known_exits: np.ndarray | None
    ) -> StepOutputs:
        """Runs the layers of a step, and returns its outputs."""
        new, alive = StepOutputs.none(live.shape), live.copy()
        # Views, indexed by the branches of all slots.
        is_alive, of_branch = alive.reshape(-1), thresholds.reshape(-1)
        by_branch = new.by_branch()
        # First branch of each branch's group, by layer: the index of the group's state.
        self._groups = np.zeros((self._layers + 1, alive.size), np.int32)
        # Predictions of the layers below for each branch, the nearest first, for measures that compare them.
        self._earlier = np.full((alive.size, self._branch_rules.most_compared), -1, np.int32)
        at_layers: list[Decisions] = []
        for layer in range(1, self._layers + 1):
            groups = self._tree.groups(layer, alive)
            rows, members = groups.rows, groups.members
            if not len(rows.branches):
                break
            if layer == 1:
                self._engine.embed(rows.branches, previous.reshape(-1)[rows.branches])
            below = rows.branches if layer == 1 else self._groups[layer - 1, rows.branches]
            measured = self._run_layers(range(layer, layer + 1), rows, below=below)[:, 0]
            self._groups[layer, members] = rows.branches[groups.of_member]
            groups = self._that_may_exit(layer, groups)
            members = groups.members
            if not len(members):
                continue
            is_last, thresholds_here = layer == self._layers, of_branch[members]
            known = None if known_exits is None else known_exits.flat[members]
            decided = self._decide(layer, groups, thresholds=thresholds_here, known=known, measured=measured)
            if self._branch_rules.decides_after_last_layer:
                at_layers.append(decided)
                continue
            leaves = (decided.low >= thresholds_here) | is_last
            if known is not None:
                leaves = np.where(known, known == layer, leaves)
            # Rows that stay are written again by a layer above.
            by_branch.put(members, decided, layer=layer)
            stays = members[~leaves]
            by_branch.max_rejected_confidence[stays] = np.fmax(
                by_branch.max_rejected_confidence[stays], decided.high[~leaves]
            )
            is_alive[members[leaves]] = False
        if at_layers:
            self._leave_afterwards(by_branch, np.flatnonzero(live), at_layers=at_layers, thresholds=of_branch)
        self._read_tokens(new, known_exits)
        return new

    def propagate(self, exit_layers: np.ndarray, goes_on: np.ndarray) -> None:
        """Fills the KV cache of the layers that tokens skipped."""
        members, exits, passed_on = self._to_propagate(exit_layers, goes_on)
        if not len(members) or self._passed_on is PassedOn.NOTHING:
            return
        layers, branches, of_member = self._distinct(passed_on, members)
        lowest = np.full(len(branches), self._layers)
        np.minimum.at(lowest, of_member, exits)
        nodes = np.full((self._layers - 1, len(branches)), self._tree.capacity, np.int32)
        for layer in range(2, self._layers + 1):
            is_skipped, skips = lowest < layer, exits < layer
            if self._branch_rules.decides_after_last_layer:
                others = np.setdiff1d(np.flatnonzero(goes_on), members[skips])
                self._tree.give_back_newest(layer, members[skips], others=others)
            place = np.cumsum(is_skipped) - 1
            nodes[layer - 2, is_skipped] = self._tree.keep(
                layer, branches[is_skipped], members=members[skips], of_member=place[of_member[skips]]
            )
        self._keep(layers, branches, nodes, is_skipped=nodes < self._tree.capacity)

    def _that_may_exit(self, layer: int, groups: Groups) -> Groups:
        """Returns the groups of a layer, with only the members that may exit there."""
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
        """Returns the decisions for every branch that may exit; the tokens are 0 where logits do not decide.

        Args:
          layer: The layer that was run.
          groups: Its groups, with the members that may exit.
          thresholds: Threshold of each member.
          known: Known exit layer of each member, 0 where not known; None if none is known.
          measured: Confidences of every row by measures that need no logits, (measures, rows).
        """
        members, of_member = groups.members, groups.of_member
        # [measures, rows]
        low, high = measured, measured
        tokens, is_finite = np.zeros(len(groups.rows.branches), np.int32), np.ones(len(groups.rows.branches), bool)
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
        """Returns which branches ask the head, given their thresholds and known exits; None if no measure does.

        The full model's branch asks at the last layer only, unless tokens of the layers below are compared.
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
        """Writes the heads' decisions for the rows of asking branches to `made`.

        That has tokens, both ends of the intervals of confidences, each of shape (measures, rows), and finiteness.
        """
        tokens, low, high, is_finite = made
        asking, is_asked = groups.of_member[asks], np.zeros(len(tokens), bool)
        is_asked[asking] = True
        asked, place = np.flatnonzero(is_asked), np.cumsum(is_asked) - 1
        if not len(asked):
            return
        decided = self._project(
            np.full(len(asked), layer),
            groups.rows.branches[asked],
            # Branches of a row may have different thresholds; a row that is open for one of them is open for all.
            of_threshold=place[asking],
            thresholds=thresholds[asks],
        )
        tokens[asked], is_finite[asked] = decided[0].tokens, decided[0].is_finite
        for index, of_measure in zip(self._by_logits, decided, strict=False):
            low[index, asked], high[index, asked] = of_measure.low, of_measure.high

    def _compare_tokens(self, members: np.ndarray, decided: Decisions) -> None:
        """Sets the confidences of branches whose measure compares tokens, and records these for the layers above."""
        for index in self._by_tokens:
            of_measure = np.flatnonzero(self._measure_of[members] == index)
            branches, tokens = members[of_measure], decided.tokens[of_measure]
            patience = self._branch_rules.rules[index].patience
            assert patience is not None, "the measure has one"
            earlier = self._earlier[branches]
            confidences = self._branch_rules.measures[index].confidence(tokens, earlier[:, : patience - 1])
            decided.low[of_measure] = decided.high[of_measure] = confidences
            if self._earlier.size:
                self._earlier[branches] = np.concatenate([tokens[:, None], earlier[:, :-1]], axis=1)

    def _leave_afterwards(
        self, by_branch: StepOutputs, members: np.ndarray, *, at_layers: Sequence[Decisions], thresholds: np.ndarray
    ) -> None:
        """Writes the exits of branches, once all of them have run the last layer.

        Args:
          by_branch: Outputs, as `StepOutputs.by_branch` returns them.
          members: Branches that generate.
          at_layers: Decisions for each of these branches at every exit layer, ascending.
          thresholds: Thresholds of all branches.
        """
        tokens = np.stack([decided.tokens for decided in at_layers])
        low, high = (np.stack([getattr(decided, name) for decided in at_layers]) for name in ("low", "high"))
        is_finite = np.stack([decided.is_finite for decided in at_layers])
        (measure,) = self._branch_rules.measures
        if measure.needs is Need.LAST_TOKEN:
            low = high = measure.confidence(tokens, tokens[-1])
        leaves = low >= thresholds[members]
        leaves[-1] = True
        first, each = leaves.argmax(axis=0), np.arange(len(members))
        predicting = np.full_like(first, len(at_layers) - 1) if self._branch_rules.takes_last_token else first
        decided = Decisions(
            tokens[predicting, each],
            low=low[first, each],
            high=high[first, each],
            is_finite=is_finite[first, each] & is_finite[predicting, each],
        )
        by_branch.put(members, decided, layer=np.array(self._branch_rules.exit_layers)[first])
        is_below = np.arange(len(at_layers))[:, None] < first
        by_branch.max_rejected_confidence[members] = np.fmax.reduce(np.where(is_below, high, -np.inf))

    def _read_tokens(self, new: StepOutputs, known_exits: np.ndarray | None) -> None:
        """Sets the tokens of branches whose exit was decided without logits, projecting each distinct state once."""
        members = np.flatnonzero(self._is_read(new, known_exits).reshape(-1) & ~self._asks_head)
        if not len(members):
            return
        predicting = new.exit_layers.flat[members]
        if self._branch_rules.takes_last_token:
            predicting = np.full_like(predicting, self._layers)
        layers, branches, of_member = self._distinct(predicting, members)
        decided, *_ = self._project(layers, branches)
        new.tokens.flat[members] = decided.tokens[of_member]
        new.is_finite.flat[members] &= decided.is_finite[of_member]

    def _distinct(self, layers: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns layers and branches of the distinct states of members at layers, and the index of each one's state.

        The states are ordered by branch.
        """
        keys = self._groups[layers, members].astype(np.int64) * (self._layers + 1) + layers
        distinct, of_member = np.unique(keys, return_inverse=True)
        branches, of_state = np.divmod(distinct, self._layers + 1)
        return of_state, branches, of_member


# Expected number of wasted layer runs of rows that we accept to save one exit test.
_MOST_AHEAD = 8.0


class _Undecided(NamedTuple):
    """Rows that have not exited yet.

    Attributes:
      rows: The rows.
      thresholds: float32, shape (rows,).
      asks: bool, shape (rows,). Whether a layer that is not the last asks the head about the row.
      known_exits: int32, shape (rows,). Known exit layers, 0 where not known; None if none is known.
      earlier: int32, shape (rows, patience - 1). Predictions of the layers below, the nearest first; None if they are
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
        branches = rows.branches[chosen]
        return _Undecided(
            Rows(branches, branches, rows.steps[chosen], rows.nodes[chosen]),
            self.thresholds[chosen],
            self.asks[chosen],
            None if known is None else known[chosen],
            None if earlier is None else earlier[chosen],
        )


class SingleStep(Step):
    """See `Step`; a branch is the number of its slot."""

    def __init__(self, branch_rules: Branches, *, engine: Engine, paths: SingleBranches, first_kept_step: int) -> None:
        """Prepares steps; arguments are those of `Step`, with the rule of the one branch."""
        super().__init__(branch_rules, engine=engine, paths=paths, first_kept_step=first_kept_step)
        layers = branch_rules.layers
        (self._measure,), self._exit_layers = branch_rules.measures, branch_rules.exit_layers
        self._decides_by_logits = self._measure.needs.asks_head
        # Most rows that heads are asked about in one call.
        self._paths, self._most_asked = paths, 2 * len(paths.step)
        # By exit layer: rows that reached it, and rows that exited there.
        self._came, self._left = [0] * (layers + 1), [0] * (layers + 1)

    def run(
        self, live: np.ndarray, *, previous: np.ndarray, thresholds: np.ndarray, known_exits: np.ndarray | None
    ) -> StepOutputs:
        """Runs the layers of a step, and returns its outputs."""
        new = StepOutputs.none(live.shape)
        of_branch = new.by_branch()
        rows = self._paths.take(np.flatnonzero(live))
        self._engine.embed(rows.branches, previous[rows.branches, 0])
        if run_step := self._engine.whole_step:
            self._work += run_step(rows, thresholds=thresholds, known_exits=known_exits, new=new)
            return new
        undecided = self._undecided(rows, thresholds, known_exits)
        first = 1
        while len(undecided.rows.branches):
            layers = self._run_before_asking(first, undecided)
            undecided = self._run(layers, undecided, of_branch)
            first = layers.stop
        if not self._decides_by_logits:
            branches = np.flatnonzero(self._is_read(new, known_exits))
            (decided,) = self._project(of_branch.exit_layers[branches], branches)
            of_branch.tokens[branches] = decided.tokens
            of_branch.is_finite[branches] &= decided.is_finite
        return new

    def propagate(self, exit_layers: np.ndarray, goes_on: np.ndarray) -> None:
        """Fills the KV cache of the layers that tokens skipped."""
        branches, exits, passed_on = self._to_propagate(exit_layers, goes_on)
        if not len(branches):
            return
        is_skipped = exits < np.arange(2, self._layers + 1)[:, None]
        nodes = np.where(is_skipped, self._paths.newest(exits, branches), np.int32(self._paths.capacity))
        self._keep(passed_on, branches, nodes, is_skipped=is_skipped)

    def _undecided(self, rows: Rows, thresholds: np.ndarray, known_exits: np.ndarray | None) -> _Undecided:
        """Returns all rows of a step, as undecided; `thresholds` and `known_exits` are by slot and branch."""
        at = thresholds[rows.branches, 0]
        asks, known, earlier = np.isfinite(at), None, None
        if self._measure.needs is Need.TOKENS:
            # The full model's rows ask too, since tokens of the layers below are compared.
            asks[:] = True
            earlier = np.full((len(at), self._branch_rules.most_compared), -1, np.int32)
        if known_exits is not None:
            known = known_exits[rows.branches, 0]
            asks &= known == 0
        return _Undecided(rows, at, asks, known, earlier)

    def _run_before_asking(self, first: int, undecided: _Undecided) -> range:
        """Returns the layers, from `first`, to run before the next exit test, which is after the last of them."""
        rows = len(undecided.asks)
        asking = rows if self._decides_by_logits and undecided.asks.any() else 0
        staying, asked = float(rows), 0
        for layer in self._exit_layers[:-1]:
            if layer < first:
                continue
            # An exit layer without counts is expected to let every row exit.
            staying *= 1 - (self._left[layer] + 1) / (self._came[layer] + 1)
            asked += asking
            # If hardly any row stays, a test here is likely to be the last one.
            most_ahead = _MOST_AHEAD * min(1.0, staying)
            if rows - staying > most_ahead or asked + asking > self._most_asked:
                return range(first, layer + 1)
        return range(first, self._layers + 1)

    def _run(self, layers: range, undecided: _Undecided, new: StepOutputs) -> _Undecided:
        """Runs layers, writes their decisions to `new`, by branch, and returns the rows that go on."""
        rows, count = undecided.rows, len(undecided.asks)
        (measured,) = self._run_layers(layers, rows, below=rows.branches)
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
        # The layer where each row exits. Rows that stay are written again by a layer above.
        leaves[-1] = True
        at = leaves.argmax(axis=0)
        new.put(rows.branches, decided.of_rows(at * count + np.arange(count)), layer=np.array(exits)[at])
        self._count(exits, at, stays)
        if len(layers) > 1:
            self._count_ahead(layers.stop - 1 - np.array(exits)[at], asks, at)
        at[stays] += 1
        passed = np.where(np.arange(len(exits))[:, None] < at, decided.high.reshape(leaves.shape), np.float32(-np.inf))
        rejected = new.max_rejected_confidence
        rejected[rows.branches] = np.fmax(rejected[rows.branches], np.fmax.reduce(passed, axis=0))
        return undecided.some(stays)

    def _leaves(self, exits: Sequence[int], decided: Decisions, undecided: _Undecided) -> np.ndarray:
        """Returns which rows may exit at each layer, by its own decision alone, (exits, rows)."""
        leaves: np.ndarray = decided.low.reshape(len(exits), -1) >= undecided.thresholds
        if exits[-1] == self._layers:
            leaves[-1] = True
        known = undecided.known_exits
        return leaves if known is None else np.where(known > 0, known == np.array(exits)[:, None], leaves)

    def _count(self, exits: Sequence[int], at: np.ndarray, stays: np.ndarray) -> None:
        """Counts the rows that reached each exit layer and exited there, given the index of each row's exit.

        Rows in `stays` have not exited.
        """
        left = np.bincount(at, minlength=len(exits)).tolist()
        left[-1] -= len(stays)
        came = len(at)
        for layer, number in zip(exits, left, strict=True):
            self._came[layer] += came
            self._left[layer] += number
            came -= number

    def _count_ahead(self, layers_above: np.ndarray, asks: np.ndarray, at: np.ndarray) -> None:
        """Counts wasted work: layers that ran above the exits of rows, and head decisions there."""
        wasted = int(layers_above.sum())
        if wasted:
            asked = int((asks & (np.arange(len(asks))[:, None] > at)).sum()) if self._decides_by_logits else 0
            self._work += Work(ahead_rows=wasted, ahead_decisions=asked)

    def _asks(self, exits: Sequence[int], undecided: _Undecided) -> np.ndarray:
        """Returns the rows whose logits are computed at each exit layer, (exits, rows), where logits decide."""
        asks = np.repeat(undecided.asks[None], len(exits), axis=0)
        if exits[-1] == self._layers:
            asks[-1] = True if undecided.known_exits is None else undecided.known_exits == 0
        return asks

    def _decide(self, exits: np.ndarray, undecided: _Undecided, asks: np.ndarray) -> Decisions:
        """Returns the heads' decisions for asking rows at every exit layer, one layer after the other."""
        branches = undecided.rows.branches
        layer, row = np.nonzero(asks)
        if not len(row):
            return Decisions.none(asks.size, confidence=-np.inf)
        thresholds = undecided.thresholds[row]
        (decided,) = self._project(exits[layer], branches[row], of_threshold=np.arange(len(row)), thresholds=thresholds)
        return decided.among(layer * len(branches) + row, asks.size)

    def _compare(self, decided: Decisions, asks: np.ndarray, earlier: np.ndarray) -> np.ndarray:
        """Sets confidences by compared tokens for asking rows, (layers, rows); returns the newest tokens of rows."""
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
