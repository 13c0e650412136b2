"""Nodes and paths of prompts of one branch."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from calm_beam.decoding.kv_cache import SingleBranches


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(seed=st.integers(0, 2**32), slots=st.integers(1, 5), steps=st.integers(1, 7))
def test_paths_are_kept_and_nodes_never_shared(seed: int, slots: int, steps: int) -> None:
    """Every branch attends to the nodes that it was given, which no other branch has, until it gives them back."""
    generator = np.random.default_rng(seed)
    branches = SingleBranches(slots=slots, steps=steps, capacity=1)
    given: dict[int, list[int]] = {}
    for _ in range(4 * steps):
        for slot in range(slots):
            if slot not in given and generator.random() < 0.6:
                branches.admit(np.array([slot]))
                given[slot] = []
        live = np.array(sorted(slot for slot in given if generator.random() < 0.9 or not given[slot]), int)
        while branches.room() < len(live):
            branches.grow(branches.capacity)
        rows = branches.take(live)
        assert rows.branches.tolist() == rows.slots.tolist() == live.tolist()
        assert rows.steps.tolist() == [len(given[slot]) for slot in live.tolist()]
        for slot, node in zip(live.tolist(), rows.nodes.tolist(), strict=True):
            given[slot].append(node)
        in_use = [node for nodes in given.values() for node in nodes]
        assert len(set(in_use)) == len(in_use)
        assert set(in_use) <= set(range(branches.capacity))
        assert branches.room() == branches.capacity - len(in_use)
        assert branches.newest(np.full(len(live), 2), live).tolist() == rows.nodes.tolist()
        for slot, nodes in given.items():
            for layer in (1, 3):
                assert branches.paths(layer, np.array([slot]), length=len(nodes))[0].tolist() == nodes
                assert branches.all_paths(layer)[slot, : len(nodes)].tolist() == nodes
        alive = np.zeros((slots, 1), bool)
        alive[live] = True
        branches.advance(np.zeros((slots, 1), int), np.ones((slots, 1), int), alive=alive)
        ended = [slot for slot, nodes in given.items() if len(nodes) == steps or generator.random() < 0.1]
        branches.release(ended)
        for slot in ended:
            del given[slot]
    branches.release(list(given))
    assert branches.room() == branches.capacity


def test_room_that_is_not_there_is_not_taken() -> None:
    """The caller makes room before a step."""
    branches = SingleBranches(slots=3, steps=2, capacity=2)
    branches.admit(np.arange(3))
    with pytest.raises(AssertionError, match="one node per live branch"):
        branches.take(np.arange(3))
