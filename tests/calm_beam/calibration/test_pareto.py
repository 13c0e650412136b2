"""Choosing and testing a path through a grid without an order."""

import hashlib
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import stats

from calm_beam.calibration.pareto import CHOOSING, ParetoChoice, pareto_calibration, part_of
from calm_beam.risk.pvalues import exact_binomial_p_value

_ASKED: dict[str, Any] = {"delta": 0.1, "epsilon": 0.05, "p_value": "exact_binomial", "salt": "calm-beam/0"}
# Thresholds and temperatures make a grid; more expensive places are not always safer.
_RISKS = (0.0, 0.02, 0.3, 0.05, 0.5, 0.04)
_COSTS = (8.0, 6.0, 5.5, 4.0, 3.0, 7.0)


def _losses(units: int, *, seed: int = 0, risks: tuple[float, ...] = _RISKS) -> np.ndarray:
    return (np.random.default_rng(seed).uniform(size=(units, len(risks))) < np.array(risks)).astype(np.float64)


def _keys(units: int) -> list[str]:
    return [f"example-{number}" for number in range(units)]


def _choose(losses: np.ndarray, **changes: Any) -> ParetoChoice:
    costs = np.broadcast_to(np.array(_COSTS)[: losses.shape[1]], losses.shape)
    return pareto_calibration(losses, **{"costs": costs, "keys": _keys(len(losses)), **_ASKED, **changes})


def test_the_cheapest_safe_place_is_found() -> None:
    """With many examples the path leaves out dominated places, and ends at the cheapest safe one."""
    choice = _choose(_losses(4000))
    assert choice.chosen == 3
    assert choice.path[:2] == (0, 1) or set(choice.path[:3]) == {0, 1, 3}
    # Place 5 costs more and is riskier than place 1.
    assert 5 not in choice.path


def test_the_split_depends_on_names_alone() -> None:
    """Each unit is assigned by a hash of salt and name, whatever other units there are; another salt changes that."""
    expected = [
        int(hashlib.sha256(f"s/pareto\n{key}".encode()).hexdigest(), 16) < Fraction("0.25") * 2**256
        for key in _keys(400)
    ]
    assert [_is_choosing(key, "s", 0.25) for key in _keys(400)] == expected
    assert 75 <= sum(expected) <= 125
    assert [_is_choosing(key, "t", 0.25) for key in _keys(400)] != expected
    # A larger share keeps the units that selected already.
    assert all(_is_choosing(key, "s", 0.5) for key, chose in zip(_keys(400), expected, strict=True) if chose)


def test_order_of_units_does_not_matter() -> None:
    """Shuffled units come to the same path and the same choice."""
    losses = _losses(400)
    choice = _choose(losses)
    shuffled = np.random.default_rng(3).permutation(400)
    costs = np.broadcast_to(np.array(_COSTS), losses.shape)
    keys = [_keys(400)[place] for place in shuffled]
    again = pareto_calibration(losses[shuffled], costs, keys=keys, **_ASKED)
    assert (again.chosen, again.path) == (choice.chosen, choice.path)
    np.testing.assert_array_equal(again.test.rejected, choice.test.rejected)


def test_those_who_choose_do_not_test() -> None:
    """A place that failed on every selecting unit is accepted if it never fails on the others, and conversely."""
    chooses = np.array([_is_choosing(key, str(_ASKED["salt"]), 0.5) for key in _keys(400)])
    losses = np.zeros((400, 2))
    losses[chooses, 1] = 1.0
    choice = _choose(losses)
    assert choice.path == (0, 1)
    assert choice.chosen == 1
    # The other way round it seems to dominate the other place, is tested, and refused.
    losses[:, 1] = ~chooses
    choice = _choose(losses)
    assert choice.path == (1,)
    assert choice.chosen is None


def test_costs_are_counted_by_sizes() -> None:
    """Layers of all tokens are divided by their number, not averaged over outputs."""
    losses = np.zeros((200, 2))
    costs = np.tile([6.0, 8.0], (200, 1))
    assert _choose(losses, costs=costs).path == (0,)
    assert _choose(losses, costs=costs, sizes=np.tile([1.0, 2.0], (200, 1))).path == (1,)


def _is_choosing(key: str, salt: str, share: float) -> bool:
    return part_of(key, salt=salt, selection_share=share) == CHOOSING


def test_never_exit_is_a_result() -> None:
    """If nothing can be proved safe, nothing is chosen."""
    choice = _choose(np.ones((40, 6)))
    assert choice.chosen is None
    assert not choice.test.rejected.any()


@pytest.mark.slow
def test_bad_places_are_seldom_chosen() -> None:
    """With every risk at delta, a place is chosen in at most a share epsilon of 2,000 calibrations."""
    replications, wrong = 2000, 0
    for seed in range(replications):
        wrong += _choose(_losses(200, seed=seed, risks=(0.1,) * 6), salt=str(seed)).chosen is not None
    assert wrong <= stats.binom.ppf(0.9995, replications, 0.05)
    # Selection and tests on the same examples would err more often.
    wrong = 0
    for seed in range(replications):
        losses = _losses(100, seed=seed, risks=(0.1,) * 6)
        wrong += bool(exact_binomial_p_value(losses.sum(axis=0), n=100, delta=0.1).min() <= 0.05)
    assert wrong > 1.5 * stats.binom.ppf(0.9995, replications, 0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": np.zeros(4)}, r"must have shape \(units, places\)"),
        ({"costs": np.zeros((4, 3))}, r"got \(4, 2\), \(4, 3\), \(4, 3\) and 4 keys"),
        ({"p_value": "wsr"}, "p_value wsr bets on single losses in an order"),
        ({"keys": ["a", "b", "c"]}, "and 3 keys"),
        ({"keys": ["a", "b", "c", "a"]}, "keys must be distinct"),
        ({"selection_share": 1.0}, r"selection_share must be in \(0, 1\), got 1\.0"),
        ({"selection_share": 0.01}, "of 4 units, 0 were drawn to choose what the other 4 test"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    """Every invalid argument is named."""
    arguments = {"losses": np.zeros((4, 2)), "costs": np.zeros((4, 2)), "keys": ["a", "b", "c", "d"], **_ASKED}
    with pytest.raises(ValueError, match=message):
        pareto_calibration(**{**arguments, **changes})
