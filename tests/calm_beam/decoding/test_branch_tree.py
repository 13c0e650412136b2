"""Groups, nodes and paths of branches, against what follows from each branch's whole history."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from calm_beam.decoding.kv_cache import BranchTree
from calm_beam.exits.propagations import PROPAGATIONS, Propagation

_FROM_EXIT = PROPAGATIONS["from_exit"]

# All that distinguishes the states from which a layer's keys and values of one token were computed.
Content = tuple[object, ...]


@dataclasses.dataclass
class _Branch:
    """The tokens of one branch, and the branch that made each layer's node of each of them."""

    prompt: int
    tokens: list[int]
    exits: list[int]
    nodes: dict[int, list[int]]

    def key(self, layer: int, *, separates_exit: bool) -> Content:
        """Returns all that the output of a layer at the next token depends on."""
        seen = layer if separates_exit else layer - 1
        return (self.prompt, *self.tokens, *(min(exit_layer, seen) for exit_layer in self.exits))

    def content(self, layer: int, step: int, *, separates_exit: bool) -> Content:
        """Returns what a layer keeps of an earlier token, computed from d^m, the highest state up to the layer below.

        If the exit shows, the layer copies from the exit layer instead, if that is below.
        """
        exits = self.exits[:step]
        if separates_exit:
            source = min(self.exits[step], layer)
            return (self.prompt, step, source, *self.tokens[:step], *(min(before, source) for before in exits))
        source = min(self.exits[step], layer - 1)
        # d^m was computed with keys and values that depend only on exits below m.
        return (self.prompt, step, source, *self.tokens[:step], *(min(before, max(source - 1, 0)) for before in exits))


def _propagation(*, separates_exit: bool) -> Propagation:
    return PROPAGATIONS["projected"] if separates_exit else _FROM_EXIT


class _Simulation:
    """A tree driven with random tokens and exits, as a sweep drives it, with the histories of all branches."""

    def __init__(
        self,
        seed: int,
        *,
        slots: int,
        num_branches: int,
        layers: int,
        steps: int,
        separates_exit: bool,
        runs_every_layer: bool = False,
    ) -> None:
        self.generator = np.random.default_rng(seed)
        self.slots, self.num_branches, self.layers, self.steps = slots, num_branches, layers, steps
        self.separates_exit, self.runs_every_layer = separates_exit, runs_every_layer
        self.tree = BranchTree(
            slots=slots,
            num_branches=num_branches,
            steps=steps,
            layers=layers,
            propagation=_propagation(separates_exit=separates_exit),
            capacity=num_branches,
        )
        self.prompts = 0
        self.histories: dict[int, _Branch] = {}
        self.live = np.zeros((slots, num_branches), bool)
        # Prompt and content of every node in use, by layer.
        self.contents: list[dict[int, Content]] = [{} for _ in range(layers + 1)]
        self.rows_run = self.branches_run = 0

    def admit(self, slot: int) -> None:
        self.tree.admit(np.array([slot]))
        for branch in range(slot * self.num_branches, (slot + 1) * self.num_branches):
            self.histories[branch] = _Branch(self.prompts, [], [], {layer: [] for layer in range(1, self.layers + 1)})
        self.live[slot] = True
        self.prompts += 1

    def end(self, slot: int) -> None:
        (prompt,) = {self.histories[slot * self.num_branches + branch].prompt for branch in range(self.num_branches)}
        self.live[slot] = False
        self.tree.release([slot])
        for layer in range(1, self.layers + 1):
            kept = self.contents[layer].items()
            self.contents[layer] = {node: content for node, content in kept if content[0] != prompt}

    def step(self) -> None:
        """Runs one token of every live branch, and checks everything that the tree says on the way."""
        members = np.flatnonzero(self.live)
        while self.tree.room() < len(members):
            self.tree.grow(self.tree.capacity)
        room = self.tree.room()
        # Few values and long runs of them: branches stay together for a while, as they do in truth.
        exits = np.sort(self.generator.integers(1, self.layers + 1, (self.slots, self.num_branches)))[:, ::-1]
        exits[self.generator.random((self.slots, self.num_branches)) < 0.05] = self.generator.integers(
            1, self.layers + 1
        )
        tokens = np.where(self.generator.random((self.slots, self.num_branches)) < 0.03, 3, 2)
        exits, tokens = np.where(self.live, exits, 0), np.where(self.live, tokens, 0)
        for branch in members.tolist():
            self.histories[branch].exits.append(int(exits.flat[branch]))
            self.histories[branch].tokens.append(int(tokens.flat[branch]))
        groups = np.full((self.layers + 1, self.live.size), -1)
        for layer in range(1, self.layers + 1):
            self.run_layer(layer, exits, groups)
        goes_on = self.live & (self.generator.random(self.live.shape) > 0.04)
        self.keep(exits, goes_on, groups)
        self.check_paths(goes_on)
        assert self.tree.room() >= room - len(members)
        assert self.tree.room() == self.tree.capacity - max(map(len, self.contents))
        self.tree.advance(tokens, exits, alive=self.live)
        busy = self.live.any(axis=1)
        self.live = goes_on
        for slot in np.flatnonzero(busy & ~goes_on.any(axis=1)).tolist():
            self.end(slot)

    def run_layer(self, layer: int, exits: np.ndarray, groups: np.ndarray) -> None:
        alive = self.live & ((exits >= layer) | self.runs_every_layer)
        groups_here = self.tree.groups(layer, alive)
        rows, row_of = groups_here.rows, groups_here.of_member
        members = np.flatnonzero(alive)
        assert groups_here.members.tolist() == members.tolist()
        assert set(row_of.tolist()) == set(range(len(rows.branches)))
        before = {branch: self.before(branch) for branch in members.tolist()}
        keys = {branch: before[branch].key(layer, separates_exit=self.separates_exit) for branch in members.tolist()}
        for branch, row in zip(members.tolist(), row_of.tolist(), strict=True):
            first = int(rows.branches[row])
            assert first <= branch
            assert rows.slots[row] == branch // self.num_branches
            assert rows.steps[row] == len(before[branch].tokens)
            # Soundness: a row's branches are in one state, and what the first of them attends to is what they all do.
            assert keys[first] == keys[branch]
            seen = self.tree.paths(layer, np.array([first]), length=self.steps)[
                0, : len(before[branch].tokens)
            ].tolist()
            assert [self.contents[layer][node] for node in seen] == [
                self.histories[branch].content(layer, step, separates_exit=self.separates_exit)
                for step in range(len(before[branch].tokens))
            ]
        # Sharing: what is in one state is not computed twice.
        assert len(rows.branches) == len(set(keys.values()))
        assert (np.diff(rows.branches) > 0).all()
        self.make(layer, rows.nodes, rows.branches, [self.layers] * len(rows.branches))
        for branch, row in zip(members.tolist(), row_of.tolist(), strict=True):
            self.histories[branch].nodes[layer].append(int(rows.nodes[row]))
        groups[layer, members] = rows.branches[row_of]
        self.rows_run += len(rows.branches)
        self.branches_run += len(members)

    def keep(self, exits: np.ndarray, goes_on: np.ndarray, groups: np.ndarray) -> None:
        members = np.flatnonzero(goes_on & (exits < self.layers))
        sources = [(int(groups[exits.flat[branch], branch]), int(exits.flat[branch])) for branch in members]
        if members.size:
            branches, layers = (np.array(values) for values in zip(*sources, strict=True))
            newest = self.tree.newest(layers, branches)
            assert newest.tolist() == [self.histories[branch].nodes[layer][-1] for branch, layer in sources]
        for layer in range(2, self.layers + 1):
            skips = [place for place, branch in enumerate(members) if exits.flat[branch] < layer]
            if self.runs_every_layer:
                self.give_back(layer, members[skips], np.setdiff1d(np.flatnonzero(goes_on), members[skips]))
            states = sorted({sources[place] for place in skips})
            of_member = np.array([states.index(sources[place]) for place in skips], int)
            firsts = np.array([first for first, _ in states], int)
            nodes = self.tree.keep(layer, firsts, members=members[skips], of_member=of_member)
            self.make(layer, nodes, firsts, [exit_layer for _, exit_layer in states])
            for place, state in zip(skips, of_member.tolist(), strict=True):
                self.histories[int(members[place])].nodes[layer].append(int(nodes[state]))

    def give_back(self, layer: int, members: np.ndarray, others: np.ndarray) -> None:
        """Frees this token's nodes at a layer for branches that skip it, unless another branch attends to them."""
        self.tree.give_back_newest(layer, members, others=others)
        kept = {self.histories[branch].nodes[layer][-1] for branch in others.tolist()}
        made = {self.histories[branch].nodes[layer].pop() for branch in members.tolist()}
        for node in made - kept:
            del self.contents[layer][node]

    def make(self, layer: int, nodes: np.ndarray, branches: np.ndarray, exits: list[int]) -> None:
        """Notes what new nodes hold, which must have been free: what the branches had if they went up to `exits`."""
        assert len(set(nodes.tolist())) == len(nodes)
        for node, branch, exit_layer in zip(nodes.tolist(), branches.tolist(), exits, strict=True):
            assert 0 <= node < self.tree.capacity
            assert node not in self.contents[layer]
            before = self.before(branch)
            made = dataclasses.replace(before, exits=[*before.exits, exit_layer])
            content = made.content(layer, len(before.tokens), separates_exit=self.separates_exit)
            self.contents[layer][node] = content

    def check_paths(self, goes_on: np.ndarray) -> None:
        """Every branch that goes on attends to the nodes that it was given, which still hold what is its own."""
        for branch in np.flatnonzero(goes_on).tolist():
            history = self.histories[branch]
            for layer in range(1, self.layers + 1):
                path = self.tree.paths(layer, np.array([branch]), length=len(history.tokens))[0].tolist()
                assert path == history.nodes[layer]
                assert [self.contents[layer][node] for node in path] == [
                    history.content(layer, step, separates_exit=self.separates_exit) for step in range(len(path))
                ]

    def before(self, branch: int) -> _Branch:
        """Returns a branch's history without the token that is being made."""
        history = self.histories[branch]
        return dataclasses.replace(history, tokens=history.tokens[:-1], exits=history.exits[:-1])


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 3),
    num_branches=st.integers(1, 7),
    layers=st.integers(1, 5),
    steps=st.integers(1, 7),
    separates_exit=st.booleans(),
    runs_every_layer=st.booleans(),
)
def test_groups_and_paths_are_those_of_the_histories(
    seed: int, slots: int, num_branches: int, layers: int, steps: int, separates_exit: bool, runs_every_layer: bool
) -> None:
    """Rows never mix states and never part branches in one; paths name what a branch has kept; nodes never alias."""
    simulation = _Simulation(
        seed,
        slots=slots,
        num_branches=num_branches,
        layers=layers,
        steps=steps,
        separates_exit=separates_exit,
        runs_every_layer=runs_every_layer,
    )
    for _ in range(3 * steps):
        for slot in np.flatnonzero(~simulation.live.any(axis=1)).tolist():
            # Prompts start at different times.
            if simulation.generator.random() < 0.6:
                simulation.admit(slot)
        for slot in np.flatnonzero(simulation.live.any(axis=1) & (simulation.tree.step == steps)).tolist():
            simulation.end(slot)
        simulation.step()
    for slot in np.flatnonzero(simulation.live.any(axis=1)).tolist():
        simulation.end(slot)
    assert simulation.tree.room() == simulation.tree.capacity


@pytest.mark.parametrize("separates_exit", [False, True])
def test_work_is_shared(separates_exit: bool) -> None:
    """Over many steps, far fewer rows are run than there are branches: the properties above are not empty."""
    simulation = _Simulation(0, slots=2, num_branches=12, layers=4, steps=12, separates_exit=separates_exit)
    for _ in range(24):
        for slot in np.flatnonzero(~simulation.live.any(axis=1) | (simulation.tree.step == 12)).tolist():
            if simulation.live[slot].any():
                simulation.end(slot)
            simulation.admit(slot)
        simulation.step()
    assert simulation.rows_run < 0.6 * simulation.branches_run
    assert simulation.prompts >= 4


def _step(tree: BranchTree, exits: list[int], tokens: list[int] | None = None) -> list[list[int]]:
    """Runs a token of a single prompt, and returns the first branch of each row, by layer."""
    at = np.array([exits])
    rows = [tree.groups(layer, at >= layer).rows.branches.tolist() for layer in (1, 2, 3)]
    tree.advance(np.array([tokens or [2] * len(exits)]), at, alive=at > 0)
    return rows


def _tree(*, propagation: Propagation = _FROM_EXIT, num_branches: int = 4) -> BranchTree:
    tree = BranchTree(slots=1, num_branches=num_branches, steps=8, layers=3, propagation=propagation, capacity=64)
    tree.admit(np.array([0]))
    return tree


def test_branches_that_part_at_an_upper_layer_share_the_lower_ones() -> None:
    """Exits at 3, 3, 2 and 1 leave all in one row at layer 1, and part layer 3 only where the key says so."""
    tree = _tree()
    assert _step(tree, [3, 3, 2, 1]) == [[0], [0], [0]]
    # min(exit, 0), min(exit, 1) and min(exit, 2): equal, equal, and 2, 2, 2, 1.
    assert _step(tree, [3, 3, 3, 3]) == [[0], [0], [0, 3]]


def test_an_exit_right_below_shows_where_it_must() -> None:
    """If a skipped layer keeps values of its own, exits at i - 1 and above split layer i already."""
    tree = _tree(propagation=_propagation(separates_exit=True))
    _step(tree, [3, 3, 2, 1])
    assert _step(tree, [3, 3, 3, 3]) == [[0], [0, 3], [0, 2, 3]]


def test_where_nothing_is_skipped_exits_part_no_branches() -> None:
    """With the full cache, every layer keeps the same of a token wherever that has left."""
    tree = _tree(propagation=PROPAGATIONS["full_cache"])
    _step(tree, [3, 3, 2, 1])
    assert _step(tree, [3, 3, 3, 3]) == [[0], [0], [0]]


def test_other_tokens_part_every_layer() -> None:
    """Branches with different tokens share nothing any more, also if later tokens are equal."""
    tree = _tree()
    _step(tree, [3, 3, 3, 3], [2, 2, 5, 5])
    for _ in range(2):
        assert _step(tree, [3, 3, 3, 3]) == [[0, 2], [0, 2], [0, 2]]


def test_a_new_prompt_starts_together() -> None:
    """A reused slot has no state of its last prompt: one row a layer, from step 0."""
    tree = _tree()
    _step(tree, [3, 2, 1, 1], [2, 3, 4, 5])
    tree.release([0])
    assert tree.room() == 64
    tree.admit(np.array([0]))
    assert tree.step.tolist() == [0]
    assert _step(tree, [3, 3, 3, 3]) == [[0], [0], [0]]


def test_a_free_slot_does_not_advance() -> None:
    """Steps count for slots with live branches only."""
    tree = BranchTree(slots=2, num_branches=2, steps=8, layers=1, propagation=_FROM_EXIT, capacity=8)
    tree.admit(np.array([1]))
    alive = np.array([[False, False], [True, True]])
    rows = tree.groups(1, alive).rows
    assert (rows.branches.tolist(), rows.slots.tolist(), rows.steps.tolist()) == ([2], [1], [0])
    tree.advance(np.full((2, 2), 2), np.ones((2, 2), int), alive=alive)
    assert tree.step.tolist() == [0, 1]


def test_room_shrinks_by_the_rows_of_the_fullest_layer() -> None:
    """Free nodes are counted for the layer that has fewest; growing adds to every layer."""
    tree = BranchTree(slots=1, num_branches=3, steps=8, layers=2, propagation=_FROM_EXIT, capacity=5)
    tree.admit(np.array([0]))
    tree.groups(1, np.ones((1, 3), bool))
    assert tree.room() == 4
    tree.keep(2, np.array([0, 1, 2]), members=np.arange(3), of_member=np.arange(3))
    assert tree.room() == 2
    tree.grow(10)
    assert (tree.room(), tree.capacity) == (12, 15)
    tree.release([0])
    assert tree.room() == 15
