"""Levels of joint promises, against the graph that defines them, and against Holm's procedure."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.fwer import fixed_sequence_test, holm_test
from calm_beam.risk.rules import joint_levels

_SEEDS = st.integers(0, 100_000)


def _drawn(seed: int) -> tuple[list[float], list[list[float]]]:
    """Returns the epsilons of a few promises, and the p-values of each, most of them small."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    epsilons = (rng.integers(1, 9, count) / 100).tolist()
    p_values = [(rng.uniform(size=int(rng.integers(1, 4))) ** 3 * 0.3).tolist() for _ in range(count)]
    return epsilons, p_values


def _levels(epsilons: list[float], p_values: list[list[float]]) -> list[float]:
    return joint_levels(epsilons, has_ended=lambda place, level: max(p_values[place]) <= level)


def _by_graph(epsilons: list[float], p_values: list[list[float]]) -> set[tuple[int, int]]:
    """Returns the graphical procedure's rejections, as promise and place: Bretz et al. (2009)."""
    nodes = [(promise, place) for promise, found in enumerate(p_values) for place in range(len(found))]
    alpha = {node: epsilons[node[0]] if node[1] == 0 else 0.0 for node in nodes}
    edges = {(one, other): 0.0 for one in nodes for other in nodes}
    for promise, found in enumerate(p_values):
        others = sum(epsilons) - epsilons[promise]
        for place in range(len(found) - 1):
            edges[(promise, place), (promise, place + 1)] = 1.0
        for beside in range(len(p_values)):
            if beside != promise:
                edges[(promise, len(found) - 1), (beside, 0)] = epsilons[beside] / others
    rejected: set[tuple[int, int]] = set()
    left = set(nodes)
    while found_now := [node for node in sorted(left) if p_values[node[0]][node[1]] <= alpha[node] + 1e-12]:
        gone = found_now[0]
        left.remove(gone)
        rejected.add(gone)
        before, weights = dict(edges), dict(alpha)
        for one in left:
            alpha[one] = weights[one] + weights[gone] * before[gone, one]
            for other in left - {one}:
                through = before[one, gone] * before[gone, one]
                if through < 1:
                    along = before[one, other] + before[one, gone] * before[gone, other]
                    edges[one, other] = along / (1 - through)
                else:
                    edges[one, other] = 0.0
    return rejected


@given(seed=_SEEDS)
def test_what_is_rejected_is_what_the_graph_rejects(seed: int) -> None:
    """Sequences at these levels reject what a graph of chains does, in which all ends point to all others."""
    epsilons, p_values = _drawn(seed)
    found = {
        (promise, place)
        for promise, (level, values) in enumerate(zip(_levels(epsilons, p_values), p_values, strict=True))
        for place in np.flatnonzero(fixed_sequence_test(values, epsilon=min(level, 1 - 1e-9)).rejected).tolist()
    }
    assert found == _by_graph(epsilons, p_values)


@given(seed=_SEEDS)
def test_single_tests_are_those_of_holm(seed: int) -> None:
    """If every promise has one test and the same epsilon, the result is Holm's procedure."""
    p_values = [found[0] for found in _drawn(seed)[1]]
    levels = _levels([0.1 / len(p_values)] * len(p_values), [[found] for found in p_values])
    holm = holm_test(p_values, epsilon=0.1).rejected
    assert [found <= level for found, level in zip(p_values, levels, strict=True)] == holm.tolist()


@given(seed=_SEEDS)
def test_levels_add_up_and_never_shrink(seed: int) -> None:
    """No level is below a promise's epsilon, and the promises that still test have at most the sum of all epsilons."""
    epsilons, p_values = _drawn(seed)
    levels = _levels(epsilons, p_values)
    assert all(level >= epsilon for level, epsilon in zip(levels, epsilons, strict=True))
    left = [level for level, found in zip(levels, p_values, strict=True) if max(found) > level]
    assert sum(left) <= sum(epsilons) * (1 + 1e-12)


def test_what_tests_nothing_leaves_its_epsilon() -> None:
    """A promise without tests leaves its epsilon and keeps it in name; if all or none remain, nothing moves."""
    assert joint_levels([0.05] * 4, has_begun=[True, False, True, False]) == [0.1, 0.05, 0.1, 0.05]
    assert joint_levels([0.02, 0.02, 0.06], has_begun=[True, False, True]) == pytest.approx([0.025, 0.02, 0.075])
    for has_begun in ([True] * 3, [False] * 3, None):
        assert joint_levels([0.05, 0.01, 0.04], has_begun=has_begun) == [0.05, 0.01, 0.04]
