"""Simulates many calibrations in every world, by every p-value and procedure, and counts the broken promises."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy import stats

from calm_beam.risk.fwer import PROCEDURES, FwerResult, pareto_path, pareto_test
from calm_beam.risk.pvalues import P_VALUES

from .methods import registered_p_values
from .worlds import World

SEED = 20220714
PARETO = "pareto"
# Losses drawn at a time, to stay within a few hundred MB.
_LOSSES_AT_A_TIME = 4_000_000
# Chance that a test that errs at exactly epsilon looks worse, half of it on either side.
_DOUBT = 0.001


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one combination in one world.

    Attributes:
      world: Name of the world.
      p_value: Name of the p-value.
      procedure: Name of the procedure.
      epsilon: Level of the test.
      replications: Number of calibrations.
      misses: Calibrations whose chosen threshold, the last one accepted, had a risk that is not below delta.
      false_rejections: Calibrations in which any such threshold was accepted; at least as many.
    """

    world: str
    p_value: str
    procedure: str
    epsilon: float
    replications: int
    misses: int
    false_rejections: int

    @property
    def is_valid(self) -> bool:
        """Whether chance explains the outcome."""
        return self.false_rejections <= most_misses(self.replications, self.epsilon)


def most_misses(replications: int, epsilon: float) -> int:
    """Returns the upper end of the two-sided 99.9 % interval for the misses of a test that errs at exactly epsilon."""
    return int(stats.binom.ppf(1 - _DOUBT / 2, replications, epsilon))


def count_misses(
    world: World, decide: Callable[[np.ndarray], FwerResult], *, replications: int, seed: int = SEED
) -> tuple[int, int]:
    """Returns misses and false rejections, as in `Outcome`, of one way of deciding.

    Args:
      world: World of the losses.
      decide: Takes losses of shape (n, replications, thresholds).
      replications: Number of calibrations.
      seed: Seed of the draws.
    """
    misses = false_rejections = 0
    for losses in draws(world, replications=replications, seed=seed):
        result = decide(losses)
        misses += _misses(world, result)
        false_rejections += _false_rejections(world, result)
    return misses, false_rejections


def draws(world: World, *, replications: int, seed: int = SEED) -> Iterator[np.ndarray]:
    """Yields the losses of many calibrations, some at a time; shape (n, some, thresholds)."""
    rng = np.random.default_rng(seed)
    at_a_time = max(1, _LOSSES_AT_A_TIME // (world.n * len(world.shares)))
    for start in range(0, replications, at_a_time):
        yield world.draw(rng, min(at_a_time, replications - start))


def run_world(world: World, *, replications: int) -> list[Outcome]:
    """Returns the outcomes of every combination that applies in a world."""
    counts: dict[tuple[str, str], np.ndarray] = {}
    for losses in draws(world, replications=replications):
        for name in P_VALUES:
            for procedure, result in _results(world, name, losses):
                counts.setdefault((name, procedure), np.zeros(2, int))
                counts[name, procedure] += _misses(world, result), _false_rejections(world, result)
    return [
        Outcome(
            world=world.name,
            p_value=name,
            procedure=procedure,
            epsilon=world.epsilon,
            replications=replications,
            misses=int(misses),
            false_rejections=int(false_rejections),
        )
        for (name, procedure), (misses, false_rejections) in counts.items()
    ]


def _results(world: World, name: str, losses: np.ndarray) -> Iterator[tuple[str, FwerResult]]:
    p_values = registered_p_values(name, losses, delta=world.delta, epsilon=world.epsilon)
    if p_values is None:
        return
    for procedure, test in PROCEDURES.items():
        yield procedure, test(p_values, epsilon=world.epsilon)
    half = world.n // 2
    if half:
        first = registered_p_values(name, losses[:half], delta=world.delta)
        second = registered_p_values(name, losses[half:], delta=world.delta)
        assert first is not None
        assert second is not None
        yield PARETO, pareto_tests(first, second, epsilon=world.epsilon)


def pareto_tests(first: np.ndarray, second: np.ndarray, *, epsilon: float) -> FwerResult:
    """Returns the results of Pareto testing in many calibrations; later thresholds are cheaper.

    Args:
      first: shape (replications, thresholds). P-values that choose the path.
      second: The same shape. P-values that are tested along it.
      epsilon: Level of the test.
    """
    costs = -np.arange(first.shape[-1])
    rejected, tested = np.zeros(second.shape, bool), np.zeros(second.shape, bool)
    # The path depends on the order of the p-values alone, so calibrations with the same order are processed together.
    orders, kinds = np.unique(stats.rankdata(first, method="dense", axis=-1), axis=0, return_inverse=True)
    # numpy 2.0 alone returns a column.
    kinds = kinds.ravel()
    for kind, members in enumerate(np.split(np.argsort(kinds, kind="stable"), np.cumsum(np.bincount(kinds))[:-1])):
        path = pareto_path(orders[kind] / (orders.shape[-1] + 1), costs=costs)
        result = pareto_test(second[members], epsilon=epsilon, path=path)
        rejected[members], tested[members] = result.rejected, result.tested
    return FwerResult(rejected=rejected, tested=tested)


def _misses(world: World, result: FwerResult) -> int:
    # The last place is "never exit", which is always safe.
    return int(np.append(world.is_null, False)[result.last_rejected()].sum())


def _false_rejections(world: World, result: FwerResult) -> int:
    return int((result.rejected & world.is_null).any(axis=-1).sum())


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns the shares of false rejections in per cent, as a Markdown table: worlds by p-values and procedures."""
    procedures = list(dict.fromkeys(outcome.procedure for outcome in outcomes))
    cells: dict[tuple[str, float], dict[str, dict[str, Outcome]]] = {}
    for outcome in outcomes:
        by_p_value = cells.setdefault((outcome.world, outcome.epsilon), {})
        by_p_value.setdefault(outcome.p_value, {})[outcome.procedure] = outcome
    lines = [
        f"| world | ε, % | p-value | {' | '.join(procedures)} |",
        f"|---|---:|---|{'---:|' * len(procedures)}",
    ]
    for (world, epsilon), by_p_value in cells.items():
        for p_value, by_procedure in by_p_value.items():
            shares = [_percent(by_procedure.get(procedure)) for procedure in procedures]
            lines.append(f"| {world} | {100 * epsilon:g} | {p_value} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Returns the largest share over the procedures in per cent, as a Markdown table: worlds by p-values."""
    p_values = list(dict.fromkeys(outcome.p_value for outcome in outcomes))
    worst: dict[tuple[str, float], dict[str, Outcome]] = {}
    for outcome in outcomes:
        row = worst.setdefault((outcome.world, outcome.epsilon), {})
        before = row.get(outcome.p_value, outcome)
        row[outcome.p_value] = max(before, outcome, key=lambda one: one.false_rejections)
    lines = [f"| world | ε, % | {' | '.join(p_values)} |", f"|---|---:|{'---:|' * len(p_values)}"]
    for (world, epsilon), row in worst.items():
        shares = [_percent(row.get(p_value)) for p_value in p_values]
        lines.append(f"| {world} | {100 * epsilon:g} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


def _percent(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    share = f"{100 * outcome.false_rejections / outcome.replications:.2f}"
    return share if outcome.is_valid else f"**{share}**"
