"""Simulates sequential calibrations: tested after every round, and stopped at the most favourable moment.

A replication counts as an error if at any look any threshold is accepted that must not be. So the count bounds every
way of stopping: at the first acceptance, at the most favourable look, or by any other use of the results.
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from calm_beam.risk.evidence import Evidence
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.losses import to_fixed_point, to_signed_fixed_point
from calm_beam.risk.pvalues import P_VALUES

from .suite import draws, most_misses
from .worlds import (
    World,
    beta_flat,
    beta_steep,
    bimodal,
    coin,
    constant,
    jackpot,
    rouge_like,
    signed_jackpot,
    signed_relief,
    signed_uniform,
    ternary,
    zero_inflated,
)

# The p-values that are valid at every look, and two for comparison that are valid at a fixed number of examples.
NAMES = (*(name for name, method in P_VALUES.items() if method.is_anytime), "hoeffding_bentkus", "wsr")
EVERY_EXAMPLE = "every example"
END = "end"
_RAGGED_ROUNDS = (1, 30, 2, 7, 90, 3)

_THEN_NULL = (0.0, 1.0, 1.3)
_ALL_NULL = (1.0,) * 4
_ALTERNATING = (0.0, 1.0) * 3

# Long enough for bets to reach their limit: a martingale that is monitored for ever errs at nearly epsilon.
WATCHED_WORLDS = (
    World(name="coin", n=500, delta=0.1, shares=_THEN_NULL, marginal=coin),
    World(name="coin, just above delta", n=500, delta=0.1, shares=(0, 1.001, 1.3), marginal=coin),
    World(name="coin, all at delta", n=500, delta=0.1, shares=_ALL_NULL, marginal=coin, correlation=0),
    World(name="coin, all at delta, correlated", n=500, delta=0.1, shares=_ALL_NULL, marginal=coin, correlation=0.8),
    World(name="coin, not monotone", n=300, delta=0.2, shares=_ALTERNATING, marginal=coin, correlation=0),
    World(name="coin, delta 0.02", n=1000, delta=0.02, shares=(0, 1, 1.3), marginal=coin),
    World(name="coin, delta 0.9", n=300, delta=0.9, shares=(0.2, 1, 1.05), marginal=coin),
    World(name="coin, 5,000 examples", n=5000, delta=0.1, shares=(1.0,), marginal=coin),
    World(name="coin, epsilon 0.2", n=300, delta=0.1, shares=_THEN_NULL, marginal=coin, epsilon=0.2),
    World(name="coin, epsilon 0.01", n=500, delta=0.1, shares=_THEN_NULL, marginal=coin, epsilon=0.01),
    World(name="beta, steep", n=500, delta=0.1, shares=_THEN_NULL, marginal=beta_steep),
    World(name="beta, flat, all at delta", n=500, delta=0.2, shares=_ALL_NULL, marginal=beta_flat, correlation=0.5),
    World(name="zero-inflated", n=500, delta=0.1, shares=_THEN_NULL, marginal=zero_inflated),
    World(name="bimodal, all at delta", n=300, delta=0.2, shares=_ALL_NULL, marginal=bimodal, correlation=0),
    World(name="ROUGE-like, not monotone", n=300, delta=0.1, shares=_ALTERNATING, marginal=rouge_like, correlation=0.5),
    World(name="constant", n=300, delta=0.1, shares=_THEN_NULL, marginal=constant),
    World(name="jackpot", n=500, delta=0.1, shares=_THEN_NULL, marginal=jackpot(0.02)),
    World(name="signed, ternary", n=500, delta=0.05, shares=_THEN_NULL, marginal=ternary(0.1), is_signed=True),
    World(
        name="signed, ternary, all at delta",
        n=500,
        delta=0.05,
        shares=_ALL_NULL,
        marginal=ternary(0.05),
        correlation=0,
        is_signed=True,
    ),
    World(name="signed, uniform", n=500, delta=0.1, shares=(-4, 1, 1.5), marginal=signed_uniform, is_signed=True),
    World(
        name="signed, jackpot", n=500, delta=0.02, shares=(-2, 1, 1.5), marginal=signed_jackpot(0.03), is_signed=True
    ),
    World(name="signed, relief", n=500, delta=0.05, shares=(-4, 1, 1.5), marginal=signed_relief(0.05), is_signed=True),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedOutcome:
    """The outcome of one combination in one world.

    Attributes:
      world: Name of the world.
      p_value: Name of the p-value.
      rounds: Name of the rounds; see `rounds_of`.
      procedure: Name of the procedure.
      epsilon: Level of the test.
      replications: Number of calibrations.
      errors: Calibrations in which, at any look, a threshold was accepted whose risk is not below delta.
    """

    world: str
    p_value: str
    rounds: str
    procedure: str
    epsilon: float
    replications: int
    errors: int

    @property
    def is_promised(self) -> bool:
        """Whether this p-value is valid at every look, or there is only one look."""
        return self.rounds == END or P_VALUES[self.p_value].is_anytime

    @property
    def is_valid(self) -> bool:
        """Whether chance explains the outcome."""
        return self.errors <= most_misses(self.replications, self.epsilon)

    @property
    def share(self) -> float:
        """Errors per replication."""
        return self.errors / self.replications


def rounds_of(name: str, n: int) -> dict[str, frozenset[int]]:
    """Returns the numbers of examples after which losses are tested, by name of the rounds.

    Args:
      name: A key of `P_VALUES`. One that reads every loss again at each look is not tested after every example: that
        takes long.
      n: Number of examples in all.
    """
    ragged = itertools.accumulate(itertools.cycle(_RAGGED_ROUNDS))
    rounds: dict[str, frozenset[int]] = {
        EVERY_EXAMPLE: frozenset(range(1, n + 1)),
        "n / 50": frozenset(range(n // 50, n + 1, n // 50)),
        "n / 5": frozenset(range(n // 5, n + 1, n // 5)),
        "ragged": frozenset([*itertools.takewhile(lambda look: look < n, ragged), n]),
        END: frozenset([n]),
    }
    if P_VALUES[name].needs_table:
        del rounds[EVERY_EXAMPLE], rounds["ragged"]
    return rounds


def running_p_values(
    name: str, losses: np.ndarray, *, delta: float, rounds: Mapping[str, Collection[int]]
) -> dict[str, np.ndarray]:
    """Returns the least p-value over all looks, from cumulative integer sums as in production.

    Args:
      name: A key of `P_VALUES`. One that takes no signed losses sees max(0, loss), as in the paper.
      losses: shape (n, ...), each in [-1, 1], in order of arrival.
      delta: Risk tolerance.
      rounds: By name, the numbers of examples after which losses are tested.

    Returns:
      Shape (...) by name of the rounds.
    """
    method = P_VALUES[name]
    fixed = to_signed_fixed_point(losses) if method.takes_signed else to_fixed_point(np.maximum(losses, 0))
    sums = {statistic: statistic.values(fixed).cumsum(axis=0) for statistic in method.statistics(delta)}
    least = {kind: np.ones(losses.shape[1:]) for kind in rounds}
    for look in sorted(set[int]().union(*rounds.values())):
        evidence = Evidence(
            n=look,
            sums={statistic: running[look - 1] for statistic, running in sums.items()},
            table=fixed[:look] if method.needs_table else None,
        )
        p_values = method.p_values(evidence, delta, 0.05)
        for kind, looks in rounds.items():
            if look in looks:
                least[kind] = np.minimum(least[kind], p_values)
    return least


def run_watched_world(
    world: World, *, replications: int, names: Sequence[str] = NAMES, procedures: Collection[str] = tuple(PROCEDURES)
) -> list[WatchedOutcome]:
    """Returns the outcomes of every combination in a world.

    An accepted threshold stays accepted, since running p-values fall and every procedure accepts more for smaller ones
    (tested): so the last look accepts all that any look did.
    """
    errors: dict[tuple[str, str, str], int] = {}
    for losses in draws(world, replications=replications):
        for name in names:
            rounds = rounds_of(name, world.n)
            for kind, p_values in running_p_values(name, losses, delta=world.delta, rounds=rounds).items():
                for procedure in procedures:
                    rejected = PROCEDURES[procedure](p_values, epsilon=world.epsilon).rejected
                    key = (name, kind, procedure)
                    errors[key] = errors.get(key, 0) + int((rejected & world.is_null).any(axis=-1).sum())
    return [
        WatchedOutcome(
            world=world.name,
            p_value=name,
            rounds=kind,
            procedure=procedure,
            epsilon=world.epsilon,
            replications=replications,
            errors=count,
        )
        for (name, kind, procedure), count in errors.items()
    ]


def watched_table(outcomes: Sequence[WatchedOutcome]) -> str:
    """Returns the largest share over the procedures in per cent, as a Markdown table: worlds by p-values and rounds."""
    columns = list(dict.fromkeys((outcome.p_value, outcome.rounds) for outcome in outcomes))
    worst: dict[tuple[str, float], dict[tuple[str, str], WatchedOutcome]] = {}
    for outcome in outcomes:
        row = worst.setdefault((outcome.world, outcome.epsilon), {})
        before = row.get((outcome.p_value, outcome.rounds), outcome)
        row[outcome.p_value, outcome.rounds] = max(before, outcome, key=lambda one: one.errors)
    names = [f"{p_value}, {rounds}" for p_value, rounds in columns]
    lines = [f"| world | ε, % | {' | '.join(names)} |", f"|---|---:|{'---:|' * len(names)}"]
    for (world, epsilon), row in worst.items():
        shares = [_percent(row[column]) for column in columns]
        lines.append(f"| {world} | {100 * epsilon:g} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


def _percent(outcome: WatchedOutcome) -> str:
    share = f"{100 * outcome.share:.2f}"
    return share if outcome.is_valid else f"**{share}**"
