"""The testing procedures: common properties, then each on short sequences that can be checked by reading."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.fwer import (
    PROCEDURES,
    Procedure,
    bonferroni_test,
    fallback_test,
    fixed_sequence_test,
    holm_test,
    multi_start_test,
    pareto_path,
    pareto_test,
)

_ANY_P = st.sampled_from([0.0, 0.01, 0.0125, 0.025, 0.05]) | st.floats(min_value=0.0, max_value=1.0)
_EACH = pytest.mark.parametrize("procedure", PROCEDURES.values(), ids=PROCEDURES.keys())
_UNIFORM_P = st.floats(min_value=0.0, max_value=1.0)
_FALLBACK_P = st.sampled_from([0.0, 0.01, 0.02, 0.04, 0.05, 0.5]) | st.floats(min_value=0.0, max_value=1.0)
_SEQUENCES = st.lists(_FALLBACK_P, min_size=1, max_size=9)
_HOLM_P = st.sampled_from([0.0, 0.01, 0.0125, 0.02, 0.025, 0.05, 0.5]) | st.floats(min_value=0.0, max_value=1.0)
_FEW_P = st.sampled_from([0.0, 0.01, 0.04, 0.5, 1.0])


@_EACH
@given(data=st.data())
def test_smaller_p_values_reject_no_less(procedure: Procedure, data: st.DataObject) -> None:
    """A rejected hypothesis stays rejected if any of the p-values fall."""
    p_values = np.array(data.draw(st.lists(_ANY_P, min_size=1, max_size=9)))
    factors = np.array(data.draw(st.lists(st.floats(0, 1), min_size=p_values.size, max_size=p_values.size)))
    before = procedure(p_values, epsilon=0.05).rejected
    assert not (before & ~procedure(p_values * factors, epsilon=0.05).rejected).any()


@_EACH
@given(p_values=st.lists(_ANY_P, max_size=9), low=st.floats(0.001, 0.999), high=st.floats(0.001, 0.999))
def test_a_larger_epsilon_rejects_no_less(procedure: Procedure, p_values: list[float], low: float, high: float) -> None:
    """A hypothesis rejected at epsilon is rejected at any larger one."""
    low, high = min(low, high), max(low, high)
    before = procedure(p_values, epsilon=low).rejected
    assert not (before & ~procedure(p_values, epsilon=high).rejected).any()


@_EACH
@given(p_values=st.lists(_ANY_P, max_size=9))
def test_rejected_means_tested_and_at_most_epsilon(procedure: Procedure, p_values: list[float]) -> None:
    """No hypothesis is rejected untested or above epsilon, and untested p-values have no effect."""
    result = procedure(p_values, epsilon=0.05)
    assert not (result.rejected & ~result.tested).any()
    assert not (result.rejected & (np.array(p_values) > 0.05)).any()
    for replacement in (0.0, 1.0):
        changed = np.where(result.tested, p_values, replacement)
        assert np.array_equal(procedure(changed, epsilon=0.05).rejected, result.rejected)


@_EACH
def test_leading_axes_are_separate_calibrations(procedure: Procedure) -> None:
    """A table of p-values gives the results of its rows alone."""
    p_values = np.random.default_rng(7).uniform(size=(3, 50, 6)) ** 4
    table = procedure(p_values, epsilon=0.05)
    assert table.last_rejected().shape == (3, 50)
    for place in np.ndindex(3, 50):
        row = procedure(p_values[place], epsilon=0.05)
        assert np.array_equal(table.rejected[place], row.rejected)
        assert np.array_equal(table.tested[place], row.tested)
        assert table.last_rejected()[place] == row.last_rejected()


@_EACH
def test_independent_uniform_p_values_are_rejected_at_most_at_epsilon(procedure: Procedure) -> None:
    """With every null true and the smallest valid p-values, any is rejected in a share epsilon of trials."""
    p_values = np.random.default_rng(11).uniform(size=(20_000, 8))
    misses = procedure(p_values, epsilon=0.1).rejected.any(axis=1).mean()
    assert misses < 0.1 + 3.3 * math.sqrt(0.1 * 0.9 / 20_000)
    assert misses > 0.05


@_EACH
@pytest.mark.parametrize("value", [math.nan, -0.1, 1.5])
def test_p_values_outside_are_refused(procedure: Procedure, value: float) -> None:
    """A p-value that is NaN or outside [0, 1] is refused, even behind the first failure."""
    with pytest.raises(ValueError, match=re.escape(f"p_values[2] must be in [0, 1], got {value}.")):
        procedure([0.01, 0.5, value], epsilon=0.05)
    with pytest.raises(ValueError, match=re.escape(f"p_values[1, 0] must be in [0, 1], got {value}.")):
        procedure([[0.01], [value]], epsilon=0.05)


@_EACH
@pytest.mark.parametrize("epsilon", [0, 1, 5, -0.05, math.nan])
def test_epsilon_outside_is_refused(procedure: Procedure, epsilon: float) -> None:
    """Epsilon has to lie strictly inside (0, 1)."""
    with pytest.raises(ValueError, match=re.escape(f"epsilon must be in (0, 1), got {epsilon}. It is a probability")):
        procedure([0.01], epsilon=epsilon)


@_EACH
def test_a_sequence_is_expected(procedure: Procedure) -> None:
    """A single number is refused; an empty sequence rejects nothing."""
    with pytest.raises(
        ValueError, match=re.escape("p_values must have shape (..., thresholds), got the single number")
    ):
        procedure(0.01, epsilon=0.05)
    empty = procedure([], epsilon=0.05)
    assert empty.rejected.shape == empty.tested.shape == (0,)
    assert empty.last_rejected() == -1


@pytest.mark.parametrize(
    ("p_values", "num_rejected", "num_tested"),
    [
        ([0.01, 0.02, 0.3, 0.01], 2, 3),
        ([0.3, 0.0, 0.0], 0, 1),
        ([0.0, 0.05, 0.05], 3, 3),
        ([0.05, math.nextafter(0.05, 1.0)], 1, 2),
        ([], 0, 0),
    ],
    ids=["stops at a failure", "first fails", "all rejected", "epsilon itself is enough", "no thresholds"],
)
def test_sequences(p_values: list[float], num_rejected: int, num_tested: int) -> None:
    """Hypotheses are rejected up to the first p-value above epsilon, which is the last one tested."""
    result = fixed_sequence_test(p_values, epsilon=0.05)
    places = range(len(p_values))
    assert result.rejected.tolist() == [place < num_rejected for place in places]
    assert result.tested.tolist() == [place < num_tested for place in places]
    assert result.last_rejected() == num_rejected - 1


@given(p_values=st.lists(_UNIFORM_P, max_size=8), epsilon=st.floats(min_value=0.001, max_value=0.999))
def test_agrees_with_the_algorithm_as_printed(p_values: list[float], epsilon: float) -> None:
    """The result is that of the paper's loop."""
    num_rejected = 0
    for p in p_values:
        if p > epsilon:
            break
        num_rejected += 1
    result = fixed_sequence_test(p_values, epsilon=epsilon)
    assert result.rejected.sum() == num_rejected == result.last_rejected() + 1
    assert result.tested.sum() == min(num_rejected + 1, len(p_values))


@given(p_values=st.lists(_UNIFORM_P, min_size=1, max_size=8), replacement=_UNIFORM_P)
def test_what_follows_the_first_failure_is_never_looked_at(p_values: list[float], replacement: float) -> None:
    """Other p-values after the first failure change nothing."""
    result = fixed_sequence_test(p_values, epsilon=0.05)
    changed = np.where(result.tested, p_values, replacement)
    assert np.array_equal(fixed_sequence_test(changed, epsilon=0.05).rejected, result.rejected)


def test_passing_over_failures_breaks_the_level() -> None:
    """With uniform null p-values the sequence errs at epsilon; accepting any small p-value errs far more."""
    p_values = np.random.default_rng(20220714).uniform(size=(4000, 20))
    misses = fixed_sequence_test(p_values, epsilon=0.05).rejected.any(axis=1).mean()
    # Four standard errors of a share of 0.05 in 4,000.
    assert abs(misses - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 4000)
    assert np.mean(p_values.min(axis=1) <= 0.05) > 0.6


@st.composite
def _sequences_and_starts(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    p_values = draw(st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.04, 0.5]) | _UNIFORM_P, min_size=1, max_size=9))
    places = st.integers(min_value=0, max_value=len(p_values) - 1)
    return p_values, draw(st.lists(places, min_size=1, max_size=4, unique=True))


@given(case=_sequences_and_starts())
def test_multi_start_agrees_with_the_algorithm_as_printed(case: tuple[list[float], list[int]]) -> None:
    """The result is that of the source's loop: from each start down to its first failure."""
    p_values, starts = case
    rejected, tested = set(), set()
    for start in starts:
        for place in range(start, len(p_values)):
            tested.add(place)
            if p_values[place] > 0.05 / len(starts):
                break
            rejected.add(place)
    result = multi_start_test(p_values, epsilon=0.05, starts=starts)
    assert set(np.flatnonzero(result.rejected)) == rejected
    assert set(np.flatnonzero(result.tested)) == tested


@given(p_values=st.lists(_UNIFORM_P, min_size=1, max_size=9))
def test_one_start_is_fixed_sequence_testing(p_values: list[float]) -> None:
    """Starting at the first hypothesis alone gives the plain fixed sequence test."""
    one, plain = multi_start_test(p_values, epsilon=0.05, starts=[0]), fixed_sequence_test(p_values, epsilon=0.05)
    assert np.array_equal(one.rejected, plain.rejected)
    assert np.array_equal(one.tested, plain.tested)


@pytest.mark.parametrize(("size", "starts"), [(1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (20, [0, 5, 10, 15])])
def test_default_starts_are_even(size: int, starts: list[int]) -> None:
    """Without starting points there are up to four, evenly spread, for any p-values."""
    p_values = np.random.default_rng(1).uniform(high=0.03, size=(200, size))
    expected = multi_start_test(p_values, epsilon=0.05, starts=starts).rejected
    assert np.array_equal(multi_start_test(p_values, epsilon=0.05).rejected, expected)


@pytest.mark.parametrize("starts", [[], [0, 0], [3], [-1]])
def test_bad_starts_are_refused(starts: list[int]) -> None:
    """Starting points are distinct places of the sequence."""
    with pytest.raises(
        ValueError, match=re.escape(f"starts must be one or more different places in [0, 3), got {starts}")
    ):
        multi_start_test([0.1, 0.1, 0.1], epsilon=0.05, starts=starts)


def test_fractional_starts_are_refused() -> None:
    """A place is a whole number."""
    with pytest.raises(TypeError, match="integer"):
        multi_start_test([0.1, 0.1], epsilon=0.05, starts=[0.5])  # type: ignore[list-item]


def test_rejected_hypotheses_hand_on_their_share() -> None:
    """Levels can be read off: .0125 and the shares handed on; after a failure the next starts at its own share."""
    result = fallback_test([0.0125, 0.025, 0.0376, 0.0125], epsilon=0.05)
    assert result.rejected.tolist() == [True, True, False, True]


@given(p_values=_SEQUENCES)
def test_all_weight_on_the_first_is_fixed_sequence_testing(p_values: list[float]) -> None:
    """With weights 1, 0, 0, ... both procedures reject and test the same."""
    weights = [1.0] + [0.0] * (len(p_values) - 1)
    result, plain = fallback_test(p_values, epsilon=0.05, weights=weights), fixed_sequence_test(p_values, epsilon=0.05)
    assert np.array_equal(result.rejected, plain.rejected)
    assert np.array_equal(result.tested, plain.tested)


@given(p_values=_SEQUENCES, data=st.data())
def test_rejects_what_several_starts_reject(p_values: list[float], data: st.DataObject) -> None:
    """With the weight spread over the starting points, everything `multi_start_test` rejects is rejected."""
    size = len(p_values)
    starts = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4, unique=True))
    weights = [1 / len(starts) if place in starts else 0.0 for place in range(size)]
    several = multi_start_test(p_values, epsilon=0.05, starts=starts).rejected
    assert not (several & ~fallback_test(p_values, epsilon=0.05, weights=weights).rejected).any()


@given(p_values=_SEQUENCES)
def test_rejects_what_bonferroni_rejects(p_values: list[float]) -> None:
    """With even weights, no hypothesis is tested below epsilon / K."""
    assert not (
        bonferroni_test(p_values, epsilon=0.05).rejected & ~fallback_test(p_values, epsilon=0.05).rejected
    ).any()


def test_a_weight_of_nothing_rejects_nothing() -> None:
    """A hypothesis with a level of 0 is not rejected even at p = 0, and not tested."""
    result = fallback_test([0.9, 0.0], epsilon=0.05, weights=[1, 0])
    assert result.rejected.tolist() == [False, False]
    assert result.tested.tolist() == [True, False]


def test_the_level_never_exceeds_epsilon() -> None:
    """Shares that add up to 1 only almost never test a hypothesis above epsilon."""
    epsilon, size = 0.05, 20
    p_values = [0.0] * (size - 1) + [math.nextafter(epsilon, 1)]
    assert not fallback_test(p_values, epsilon=epsilon).rejected[-1]
    p_values[-1] = epsilon
    assert fallback_test(p_values, epsilon=epsilon, weights=[1 / 4] * 4 + [0] * (size - 4)).rejected[-1]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.5], "weights must have one entry per threshold, shape (3,), got (2,)."),
        ([0.5, 0.5, 0.5], "weights must be at least 0 and add up to at most 1, got [0.5, 0.5, 0.5]."),
        ([1.5, -0.5, 0], "weights must be at least 0 and add up to at most 1, got [1.5, -0.5, 0.0]."),
        ([math.nan, 0, 0], "weights must be at least 0 and add up to at most 1, got [nan, 0.0, 0.0]."),
    ],
)
def test_bad_weights_are_refused(weights: list[float], message: str) -> None:
    """Weights are shares of epsilon, one per hypothesis."""
    with pytest.raises(ValueError, match=re.escape(message)):
        fallback_test([0.1, 0.1, 0.1], epsilon=0.05, weights=weights)


@given(p_values=st.lists(_HOLM_P, max_size=6))
def test_holm_closes_bonferroni(p_values: list[float]) -> None:
    """Holm rejects exactly if Bonferroni rejects every subset with the hypothesis, by the closed testing principle."""
    size = len(p_values)
    subsets = [subset for length in range(1, size + 1) for subset in itertools.combinations(range(size), length)]
    passing = {subset for subset in subsets if min(p_values[place] for place in subset) <= 0.05 / len(subset)}
    expected = [all(subset in passing for subset in subsets if place in subset) for place in range(size)]
    assert holm_test(p_values, epsilon=0.05).rejected.tolist() == expected


@given(p_values=st.lists(_HOLM_P, max_size=9))
def test_holm_dominates_bonferroni(p_values: list[float]) -> None:
    """Every hypothesis that Bonferroni rejects is rejected by Holm."""
    assert not (bonferroni_test(p_values, epsilon=0.05).rejected & ~holm_test(p_values, epsilon=0.05).rejected).any()


def test_holm_rejects_more() -> None:
    """Holm rejects some that Bonferroni does not."""
    assert bonferroni_test([0.02, 0.03], epsilon=0.05).rejected.tolist() == [True, False]
    assert holm_test([0.02, 0.03], epsilon=0.05).rejected.tolist() == [True, True]


@given(p_values=st.lists(_HOLM_P, min_size=1, max_size=9))
def test_bonferroni_compares_with_its_share(p_values: list[float]) -> None:
    """Each hypothesis is rejected by its own p-value alone, at epsilon / K."""
    expected = [p <= 0.05 / len(p_values) for p in p_values]
    assert bonferroni_test(p_values, epsilon=0.05).rejected.tolist() == expected


@pytest.mark.parametrize("procedure", [holm_test, bonferroni_test])
@given(data=st.data())
def test_order_does_not_matter(procedure: Procedure, data: st.DataObject) -> None:
    """Shuffling the hypotheses shuffles the result, and nothing else."""
    p_values = np.array(data.draw(st.lists(_HOLM_P, min_size=1, max_size=8)))
    order = data.draw(st.permutations(range(p_values.size)))
    shuffled = procedure(p_values[order], epsilon=0.05)
    assert np.array_equal(shuffled.rejected, procedure(p_values, epsilon=0.05).rejected[order])
    assert shuffled.tested.all()


@given(
    settings=st.lists(st.tuples(_FEW_P, _FEW_P, st.integers(0, 3)), max_size=8),
)
def test_path_is_the_pareto_front(settings: list[tuple[float, float, int]]) -> None:
    """The path has the undominated places, one of each equal kind, by largest p-value."""
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
    """With one objective, the path goes from safe and expensive to risky and cheap."""
    rng = np.random.default_rng(5)
    p_values, costs = rng.uniform(size=100), rng.uniform(1, 8, size=100)
    path = list(pareto_path(p_values, costs=costs))
    assert len(path) > 2
    assert (np.diff(p_values[path]) > 0).all()
    assert (np.diff(costs[path]) < 0).all()


@given(p_values=st.lists(_FEW_P, min_size=1, max_size=8), data=st.data())
def test_testing_follows_the_path(p_values: list[float], data: st.DataObject) -> None:
    """The result is that of a fixed sequence test of the reordered p-values, in the original order."""
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
    """Shapes must fit, p-values must be in [0, 1], and costs must be finite."""
    with pytest.raises(ValueError, match=re.escape(message)):
        pareto_path(p_values, costs=costs)


@pytest.mark.parametrize("path", [[0, 0], [2], [-1]])
def test_bad_paths_are_refused(path: list[int]) -> None:
    """A path goes through places of the grid, each once."""
    with pytest.raises(ValueError, match=re.escape(f"path must hold different places in [0, 2), got {path}.")):
        pareto_test([0.1, 0.1], epsilon=0.05, path=path)
