"""Choosing and testing a path through a grid without an order."""

import hashlib
from typing import Any

import numpy as np
import pytest
from scipy import stats

from calm_beam.calibration.pareto import ParetoChoice, pareto_calibration
from calm_beam.risk.pvalues import exact_binomial_p_value

_ASKED: dict[str, Any] = {"delta": 0.1, "epsilon": 0.05, "p_value": "exact_binomial", "salt": "calm-beam/0"}
# Thresholds and temperatures make a grid; dearer settings are not always safer.
_RISKS = (0.0, 0.02, 0.3, 0.05, 0.5, 0.04)
_COSTS = (8.0, 6.0, 5.5, 4.0, 3.0, 7.0)


def _losses(units: int, *, seed: int = 0, risks: tuple[float, ...] = _RISKS) -> np.ndarray:
    return (np.random.default_rng(seed).uniform(size=(units, len(risks))) < np.array(risks)).astype(np.float64)


def _keys(units: int) -> list[str]:
    return [f"example-{number}" for number in range(units)]


def _choose(losses: np.ndarray, **changes: Any) -> ParetoChoice:
    costs = np.broadcast_to(np.array(_COSTS)[: losses.shape[1]], losses.shape)
    return pareto_calibration(losses, costs, keys=_keys(len(losses)), **{**_ASKED, **changes})


def test_the_cheapest_safe_setting_is_found() -> None:
    """With plenty of examples the path leaves out what another setting beats, and ends at the cheapest that is safe."""
    choice = _choose(_losses(4000))
    assert choice.chosen == 3
    assert choice.path[:2] == (0, 1) or set(choice.path[:3]) == {0, 1, 3}
    # Setting 5 is dearer and riskier than setting 1.
    assert 5 not in choice.path
    assert (choice.num_choosing, choice.num_testing) == (2000, 2000)


def test_the_split_depends_on_keys_alone() -> None:
    """Units in another order, and other losses, are split alike; another salt splits otherwise."""
    losses = _losses(400)
    choice = _choose(losses, choosing_share=0.25)
    assert (choice.num_choosing, choice.num_testing) == (100, 300)
    shuffled = np.random.default_rng(3).permutation(400)
    costs = np.broadcast_to(np.array(_COSTS), losses.shape)
    keys = [_keys(400)[place] for place in shuffled]
    again = pareto_calibration(losses[shuffled], costs, keys=keys, choosing_share=0.25, **_ASKED)
    assert (again.chosen, again.path) == (choice.chosen, choice.path)
    np.testing.assert_array_equal(again.test.rejected, choice.test.rejected)


def test_those_who_choose_do_not_test() -> None:
    """A setting that failed on every unit that chose is accepted if it never does on the others, and conversely."""
    keys = _keys(400)
    chooses = np.isin(np.arange(400), _choosing_units(keys))
    losses = np.zeros((400, 2))
    losses[chooses, 1] = 1.0
    choice = _choose(losses)
    assert choice.path == (0, 1)
    assert choice.chosen == 1
    # The other way round it seems to beat the other setting, is tested, and refused.
    losses[:, 1] = ~chooses
    choice = _choose(losses)
    assert choice.path == (1,)
    assert choice.chosen is None


def _choosing_units(keys: list[str]) -> list[int]:
    """Returns the half whose salted hashes are least, computed anew."""
    digests = [hashlib.sha256(f"{_ASKED['salt']}\n{key}".encode()).digest() for key in keys]
    return sorted(range(len(keys)), key=digests.__getitem__)[: len(keys) // 2]


def test_never_exit_is_a_result() -> None:
    """Where nothing can be proved safe, nothing is chosen."""
    choice = _choose(np.ones((40, 6)))
    assert choice.chosen is None
    assert not choice.test.rejected.any()


@pytest.mark.slow
def test_bad_settings_are_seldom_chosen() -> None:
    """With every risk at delta, a setting is chosen in at most a share epsilon of 2,000 calibrations."""
    replications, wrong = 2000, 0
    for seed in range(replications):
        wrong += _choose(_losses(200, seed=seed, risks=(0.1,) * 6), salt=str(seed)).chosen is not None
    assert wrong <= stats.binom.ppf(0.9995, replications, 0.05)
    # Choosing and testing with the same examples would err more often.
    wrong = 0
    for seed in range(replications):
        losses = _losses(100, seed=seed, risks=(0.1,) * 6)
        wrong += bool(exact_binomial_p_value(losses.sum(axis=0), n=100, delta=0.1).min() <= 0.05)
    assert wrong > 1.5 * stats.binom.ppf(0.9995, replications, 0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": np.zeros(4)}, r"must both have shape \(units, settings\)"),
        ({"costs": np.zeros((4, 3))}, r"got \(4, 2\), \(4, 3\) and 4 keys"),
        ({"keys": ["a", "b", "c"]}, "and 3 keys"),
        ({"keys": ["a", "b", "c", "a"]}, "keys must be distinct"),
        ({"choosing_share": 1.0}, r"choosing_share must be in \(0, 1\), got 1\.0"),
        ({"choosing_share": 0.01}, "4 units leave a part empty at choosing_share 0.01"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    """Every argument that does not fit is named."""
    arguments = {"losses": np.zeros((4, 2)), "costs": np.zeros((4, 2)), "keys": ["a", "b", "c", "d"], **_ASKED}
    with pytest.raises(ValueError, match=message):
        pareto_calibration(**{**arguments, **changes})
