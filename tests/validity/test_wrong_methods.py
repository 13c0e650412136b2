"""The suite detects the errors of careless calibrations, the twins of the valid methods.

Each test counts, in a world of its own or of the suite, how often a mistaken method accepts a threshold whose risk is
not below delta, and shows that the right method passes.
"""

import numpy as np
import pytest
from scipy import stats

from calm_beam.risk.fwer import FwerResult, fixed_sequence_test, pareto_path, pareto_test
from calm_beam.risk.pvalues import exact_binomial_p_value

from .methods import registered_p_values
from .suite import count_misses, draws, most_misses
from .worlds import WORLDS, World, beta_flat, coin, jackpot, rouge_like

pytestmark = pytest.mark.slow

_REPLICATIONS = 2000
_EPSILON = 0.05
_MOST = most_misses(_REPLICATIONS, _EPSILON)
_BY_NAME = {world.name: world for world in WORLDS}
# One threshold at delta, where the behaviour of a valid test is well known.
_ONE = World(name="one coin", n=1000, delta=0.1, shares=(1.0,), marginal=coin)
_EIGHT = World(name="eight coins", n=200, delta=0.1, shares=(1.0,) * 8, marginal=coin, correlation=0)


def _fixed_sequence(p_values: np.ndarray | None) -> FwerResult:
    assert p_values is not None
    return fixed_sequence_test(p_values, epsilon=_EPSILON)


def _clt_p_value(losses: np.ndarray, delta: float) -> np.ndarray:
    """Returns the p-value of a normal approximation."""
    scale = losses.std(axis=0, ddof=1) / np.sqrt(len(losses))
    # Without spread the approximation is certain of itself.
    gap = losses.mean(axis=0) - delta
    z = np.divide(gap, scale, out=np.where(gap < 0, -np.inf, np.inf), where=scale > 0)
    return np.asarray(stats.norm.cdf(z))


@pytest.mark.parametrize(
    "world",
    [
        World(name="coin", n=100, delta=0.02, shares=(0, 0, 1, 1.2), marginal=coin),
        World(name="jackpot", n=100, delta=0.1, shares=(0, 0, 1, 1.2), marginal=jackpot(0.01)),
        World(name="ROUGE-like", n=100, delta=0.02, shares=(0, 0, 1, 1.2), marginal=rouge_like),
    ],
    ids=lambda world: world.name,
)
def test_normal_approximation_is_caught(world: World) -> None:
    """At n = 100 a CLT p-value errs in 14 to 37 % of all calibrations instead of 5."""
    misses, _ = count_misses(
        world, lambda losses: _fixed_sequence(_clt_p_value(losses, world.delta)), replications=_REPLICATIONS
    )
    assert misses > 2 * _MOST


def test_dropped_failures_are_caught() -> None:
    """Leaving out the examples that failed, instead of counting them with loss 1, errs in most calibrations."""
    delta, share_failing, n = 0.1, 0.04, 500
    rng = np.random.default_rng(1)
    failed = rng.uniform(size=(n, _REPLICATIONS)) < share_failing
    # Together with the failures, whose loss is 1, the risk is exactly delta.
    losses = rng.uniform(size=failed.shape) < (delta - share_failing) / (1 - share_failing)
    kept = exact_binomial_p_value((losses | failed).sum(axis=0), n=n, delta=delta)
    assert (kept <= _EPSILON).sum() <= _MOST
    sums, counts = (losses & ~failed).sum(axis=0), (~failed).sum(axis=0)
    p_values = [
        exact_binomial_p_value(total, n=int(count), delta=delta) for total, count in zip(sums, counts, strict=True)
    ]
    assert np.mean(np.array(p_values) <= _EPSILON) > 0.5


def test_repeated_examples_are_caught() -> None:
    """Counting each example four times, as when prompts repeat, makes the evidence look stronger than it is."""
    world = _BY_NAME["coin, 1,000 examples"]

    def decide(losses: np.ndarray) -> FwerResult:
        few = losses[: world.n // 4]
        return _fixed_sequence(registered_p_values("hoeffding_bentkus", np.tile(few, (4, 1, 1)), delta=world.delta))

    assert count_misses(world, decide, replications=_REPLICATIONS)[0] > 2 * _MOST


@pytest.mark.parametrize(("tries", "at_least"), [(1, 0.0), (2, 1.0), (10, 3.0)])
def test_the_least_of_several_p_values_is_caught(tries: int, at_least: float) -> None:
    """The lesser of two betting p-values, from two orders of the same losses, is not valid; ten are far from it."""
    rng = np.random.default_rng(2)

    def decide(losses: np.ndarray) -> FwerResult:
        p_values = [registered_p_values("wsr", rng.permutation(losses), delta=_ONE.delta) for _ in range(tries)]
        return _fixed_sequence(np.min(np.array(p_values), axis=0))

    misses = count_misses(_ONE, decide, replications=_REPLICATIONS)[0]
    assert misses > at_least * _MOST if tries > 1 else misses <= _MOST


def test_an_order_chosen_by_the_data_is_caught() -> None:
    """Testing thresholds from the least empirical risk up accepts a bad one in a third of all calibrations."""

    def decide(losses: np.ndarray) -> FwerResult:
        p_values = registered_p_values("exact_binomial", losses, delta=_EIGHT.delta)
        assert p_values is not None
        order = np.argsort(losses.mean(axis=0), axis=-1)
        return _fixed_sequence(np.take_along_axis(p_values, order, axis=-1))

    # Every threshold is bad here, so the order does not matter.
    assert count_misses(_EIGHT, decide, replications=_REPLICATIONS)[1] > 3 * _MOST


def test_a_pareto_path_from_the_tested_losses_is_caught() -> None:
    """Pareto testing needs the split: a path from the tested losses errs too often, one from others does not."""
    errors = {"same": 0, "other": 0}
    for losses in draws(_EIGHT, replications=_REPLICATIONS):
        half = _EIGHT.n // 2
        first = registered_p_values("exact_binomial", losses[:half], delta=_EIGHT.delta)
        second = registered_p_values("exact_binomial", losses[half:], delta=_EIGHT.delta)
        assert first is not None
        assert second is not None
        for kind, chooser in (("same", second), ("other", first)):
            for chosen_by, tested in zip(chooser, second, strict=True):
                path = pareto_path(chosen_by, costs=np.arange(8))
                errors[kind] += bool(pareto_test(tested, epsilon=_EPSILON, path=path).rejected.any())
    assert errors["same"] > 2 * _MOST
    assert errors["other"] <= _MOST


def test_going_on_after_a_failure_is_caught() -> None:
    """Accepting the lowest threshold with a small p-value, however many were tried, errs in a third of all."""

    def decide(losses: np.ndarray) -> FwerResult:
        p_values = registered_p_values("exact_binomial", losses, delta=_EIGHT.delta)
        assert p_values is not None
        rejected = p_values <= _EPSILON
        return FwerResult(rejected=rejected, tested=np.ones_like(rejected))

    assert count_misses(_EIGHT, decide, replications=_REPLICATIONS)[0] > 3 * _MOST


def test_peeking_is_caught() -> None:
    """Testing after every 50 examples and stopping at the first success breaks a binomial test, but no betting one."""
    looks = range(50, _ONE.n + 1, 50)
    accepted = {"exact_binomial": 0, "wsr": 0}
    for losses in draws(_ONE, replications=_REPLICATIONS):
        for name in accepted:
            # The betting p-value at the end is that of its best moment, so it is valid when peeking.
            moments = looks if name == "exact_binomial" else looks[-1:]
            tests = [_fixed_sequence(registered_p_values(name, losses[:count], delta=_ONE.delta)) for count in moments]
            accepted[name] += int(np.any([test.rejected for test in tests], axis=0).sum())
    assert accepted["exact_binomial"] > 2 * _MOST
    assert accepted["wsr"] <= _MOST


def test_bets_that_have_seen_their_loss_are_caught() -> None:
    """The same betting p-value with bets made one example too late errs twice as often as it may."""
    world = _BY_NAME["coin, 1,000 examples"]

    def decide(losses: np.ndarray) -> FwerResult:
        n, delta = world.n, world.delta
        seen = np.arange(2, n + 2)[:, None, None]
        means = (delta + losses.cumsum(axis=0)) / seen
        # Each includes the loss that is being bet on.
        variances = (delta * (1 - delta) + ((losses - means) ** 2).cumsum(axis=0)) / seen
        bets = np.minimum(np.sqrt(-2 * np.log(0.05) / (n * variances)), 0.75 / (1 - delta))
        log_wealth = np.log1p(bets * (delta - losses)).cumsum(axis=0).max(axis=0)
        return _fixed_sequence(np.exp(-np.maximum(0, log_wealth)))

    assert count_misses(world, decide, replications=_REPLICATIONS)[0] > 1.5 * _MOST


def test_a_bernstein_bound_without_its_linear_term_is_caught() -> None:
    """The sample variance does not show rare large losses not yet seen, so the bound without its linear term errs."""
    world = _BY_NAME["jackpot, rare"]

    def decide(losses: np.ndarray) -> FwerResult:
        slack = np.maximum(0, world.delta - losses.mean(axis=0))
        variances = np.maximum(losses.var(axis=0, ddof=1), 1e-12)
        return _fixed_sequence(np.minimum(1, 2 * np.exp(-(slack**2) * world.n / (2 * variances))))

    assert count_misses(world, decide, replications=_REPLICATIONS)[0] > 2 * _MOST


def test_valid_tests_have_power() -> None:
    """Valid tests also accept: a risk of 0.6 delta is mostly found at n = 1000."""
    world = World(name="power", n=1000, delta=0.1, shares=(0.0, 0.25, 0.6, 1.0, 1.2), marginal=beta_flat)
    for name in ("hoeffding_bentkus", "wsr"):
        chosen = [
            _fixed_sequence(registered_p_values(name, losses, delta=world.delta)).last_rejected()
            for losses in draws(world, replications=300)
        ]
        assert np.mean(np.concatenate(chosen) == 2) > 0.9
