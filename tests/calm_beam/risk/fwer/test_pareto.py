"""Tests of Pareto testing."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.fwer import fixed_sequence_test, pareto_path, pareto_test

_P = st.sampled_from([0.0, 0.01, 0.04, 0.5, 1.0])


@given(
    settings=st.lists(st.tuples(_P, _P, st.integers(0, 3)), max_size=8),
)
def test_path_is_the_pareto_front(settings: list[tuple[float, float, int]]) -> None:
    """By the definition: on the path are those that nothing dominates, one of each equal kind, by largest p-value."""
    table = np.array(settings, dtype=float).reshape(-1, 3)
    path = pareto_path(table[:, :2].T, costs=table[:, 2])
    front = {
        setting
        for setting in settings
        if not any(other != setting and all(a <= b for a, b in zip(other, setting, strict=True)) for other in settings)
    }
    assert {settings[place] for place in path} == front
    assert len(path) == len(front)
    largest = [max(settings[place][:2]) for place in path]
    assert largest == sorted(largest)


def test_safety_costs_along_the_path() -> None:
    """With one objective, the path goes from safe and dear to risky and cheap."""
    rng = np.random.default_rng(5)
    p_values, costs = rng.uniform(size=100), rng.uniform(1, 8, size=100)
    path = list(pareto_path(p_values, costs=costs))
    assert len(path) > 2
    assert (np.diff(p_values[path]) > 0).all()
    assert (np.diff(costs[path]) < 0).all()


@given(p_values=st.lists(_P, min_size=1, max_size=8), data=st.data())
def test_testing_follows_the_path(p_values: list[float], data: st.DataObject) -> None:
    """The result is that of a fixed sequence test of the reordered p-values, put back in place."""
    places = st.integers(0, len(p_values) - 1)
    path = data.draw(st.lists(places, unique=True))
    result = pareto_test(p_values, epsilon=0.05, path=path)
    along = fixed_sequence_test([p_values[place] for place in path], epsilon=0.05)
    assert result.rejected[path].tolist() == along.rejected.tolist()
    assert result.tested[path].tolist() == along.tested.tolist()
    off = [place for place in range(len(p_values)) if place not in path]
    assert not result.tested[off].any()
    assert not result.rejected[off].any()


@pytest.mark.parametrize(
    ("p_values", "costs", "message"),
    [
        ([0.1, 0.2], [1.0], "and costs (settings,), got (2,) and (1,)."),
        ([[[0.1]]], [1.0], "got (1, 1, 1) and (1,)."),
        ([0.1, 1.2], [1.0, 2.0], "p_values[1] must be in [0, 1], got 1.2."),
        ([0.1, math.nan], [1.0, 2.0], "p_values[1] must be in [0, 1], got nan."),
        ([0.1, 0.2], [1.0, math.inf], "costs[1] must be finite, got inf."),
    ],
)
def test_bad_settings_are_refused(p_values: list[float], costs: list[float], message: str) -> None:
    """Shapes have to fit, p-values lie in [0, 1], and costs are finite."""
    with pytest.raises(ValueError, match=re.escape(message)):
        pareto_path(p_values, costs=costs)


@pytest.mark.parametrize("path", [[0, 0], [2], [-1]])
def test_bad_paths_are_refused(path: list[int]) -> None:
    """A path goes through places of the grid, each once."""
    with pytest.raises(ValueError, match=re.escape(f"path must hold different places in [0, 2), got {path}.")):
        pareto_test([0.1, 0.1], epsilon=0.05, path=path)
