"""Worlds whose risks are known in closed form, most of them close to the hardest for a test at level epsilon.

A world is a distribution of the losses of `n` examples at a few thresholds. In most the first thresholds are safe
beyond doubt and the next ones have a risk of exactly delta, where a valid test errs most; in others every threshold is
at delta, the case for which corrections for multiple tests are made. A risk of exactly delta counts as too high here:
that is stricter than the promise, and results there also hold just above it.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import special

# Takes uniform numbers of any shape and a risk; returns losses of the same shape whose mean is that risk, larger ones
# for larger numbers.
Marginal = Callable[[np.ndarray, float], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """A distribution of losses.

    Attributes:
      name: Name in the table.
      n: Examples in a calibration set.
      delta: Risk tolerance.
      shares: Risk at each threshold, in testing order, in multiples of delta.
      marginal: How a loss is distributed, given its risk.
      correlation: Of the Gaussian copula between the thresholds of one example; at 1 a single number decides all.
      is_signed: Whether losses may be negative.
      epsilon: Level of the test.
    """

    name: str
    n: int
    delta: float
    shares: tuple[float, ...]
    marginal: Marginal
    correlation: float = 1.0
    is_signed: bool = False
    epsilon: float = 0.05

    @property
    def risks(self) -> np.ndarray:
        """The risk at each threshold."""
        return self.delta * np.array(self.shares)

    @property
    def is_null(self) -> np.ndarray:
        """Which thresholds must not be accepted: those whose risk is not below delta."""
        return np.array(self.shares) >= 1

    def draw(self, rng: np.random.Generator, replications: int) -> np.ndarray:
        """Returns the losses of many calibration sets, shape (n, replications, thresholds)."""
        uniforms = self._uniforms(rng, (self.n, replications))
        columns = [
            self.marginal(uniforms[..., place % uniforms.shape[-1]], risk) for place, risk in enumerate(self.risks)
        ]
        return np.stack(columns, axis=-1)

    def _uniforms(self, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        if self.correlation == 1:
            return rng.uniform(size=(*shape, 1))
        if self.correlation == 0:
            return rng.uniform(size=(*shape, len(self.shares)))
        common, own = rng.standard_normal((*shape, 1)), rng.standard_normal((*shape, len(self.shares)))
        return special.ndtr(np.sqrt(self.correlation) * common + np.sqrt(1 - self.correlation) * own)


def coin(u: np.ndarray, risk: float) -> np.ndarray:
    """0 or 1, as exact match gives."""
    return (u > 1 - risk).astype(np.float64)


def beta_steep(u: np.ndarray, risk: float) -> np.ndarray:
    """Beta(risk / (1 - risk), 1): most losses tiny, some close to 1."""
    return np.zeros_like(u) if risk == 0 else u ** (1 / risk - 1)


def beta_flat(u: np.ndarray, risk: float) -> np.ndarray:
    """Beta(1, 1 / risk - 1): falls off like an exponential distribution."""
    return np.zeros_like(u) if risk == 0 else 1 - (1 - u) ** (risk / (1 - risk))


def zero_inflated(u: np.ndarray, risk: float) -> np.ndarray:
    """0 for most examples, uniform on (0, 1) for the others."""
    return np.maximum(0.0, 1 - (1 - u) / (2 * risk)) if risk else np.zeros_like(u)


def bimodal(u: np.ndarray, risk: float) -> np.ndarray:
    """Uniform on (0, 0.1) or on (0.8, 1)."""
    high = (risk - 0.05) / 0.85
    low = 1 - high
    return np.where(u < low, 0.1 * u / low, 0.8 + 0.2 * (u - low) / high)


# Losses such as 1 - ROUGE-L has between short texts: fractions with small denominators.
_FRACTIONS = np.array([1 / 9, 1 / 7, 1 / 5, 2 / 9, 1 / 4, 1 / 3, 2 / 5, 1 / 2, 3 / 5, 2 / 3, 1.0])


def rouge_like(u: np.ndarray, risk: float) -> np.ndarray:
    """0, or one of a few fractions, each as likely as the others."""
    changed = risk / _FRACTIONS.mean()
    rank = np.floor((u - (1 - changed)) / changed * _FRACTIONS.size) if changed else np.full_like(u, -1)
    return np.where(rank < 0, 0.0, _FRACTIONS[np.clip(rank, 0, _FRACTIONS.size - 1).astype(int)])


def constant(u: np.ndarray, risk: float) -> np.ndarray:
    """The risk itself, on every example: no spread at all."""
    return np.full_like(u, risk)


def almost_constant(u: np.ndarray, risk: float) -> np.ndarray:
    """Uniform within a tenth of the risk: so little spread that bets grow as large as they may."""
    return risk * (0.9 + 0.2 * u)


def relief(rate: float) -> Marginal:
    """Returns a marginal that is 0 at a small rate, and else a constant above the risk: rare losses look safe."""

    def marginal(u: np.ndarray, risk: float) -> np.ndarray:
        return np.where(u < rate, 0.0, risk / (1 - rate))

    return marginal


def cluster_means(u: np.ndarray, risk: float) -> np.ndarray:
    """The mean of three coins of one page, two of which are equal: the default's view of clusters of 0 and 1."""
    return np.where(u > 1 - risk / 2, 1.0, np.where(u > 1 - 5 * risk / 4, 2 / 3, 0.0))


def jackpot(rate: float) -> Marginal:
    """Returns a marginal that is 1 at a small rate, and else a constant below the risk: it looks safe for long."""

    def marginal(u: np.ndarray, risk: float) -> np.ndarray:
        usual = max(0.0, risk - rate) / (1 - rate)
        return np.where(u > 1 - min(rate, risk), 1.0, usual)

    return marginal


def ternary(worse: float) -> Marginal:
    """Returns a marginal that is -1 at a rate and +1 at that rate plus the risk: exact match, with its sign."""

    def marginal(u: np.ndarray, risk: float) -> np.ndarray:
        return (u > 1 - worse - risk).astype(np.float64) - (u < worse)

    return marginal


def signed_uniform(u: np.ndarray, risk: float) -> np.ndarray:
    """Uniform on (risk - 0.5, risk + 0.5)."""
    return risk + u - 0.5


def signed_jackpot(rate: float) -> Marginal:
    """Returns a marginal that is +1 at a small rate, and else a little better than the full model."""

    def marginal(u: np.ndarray, risk: float) -> np.ndarray:
        return np.where(u > 1 - rate, 1.0, (risk - rate) / (1 - rate))

    return marginal


def signed_relief(rate: float) -> Marginal:
    """Returns a marginal that is -1 at a small rate, and else a little worse than the full model."""

    def marginal(u: np.ndarray, risk: float) -> np.ndarray:
        return np.where(u < rate, -1.0, (risk + rate) / (1 - rate))

    return marginal


_THEN_NULL = (0.0, 0.0, 1.0, 1.0, 1.3, 2.0)
_ALL_NULL = (1.0,) * 8
_ALTERNATING = (0.0, 1.0) * 4

# Sample sizes such as 59 for delta 0.05 are those at which a calibration set without any loss is just enough: there
# the binomial test errs at almost exactly epsilon, and so does Hoeffding-Bentkus. At 99 that holds for an eighth of
# epsilon, at 86 for a quarter, at 118 for either half of the data, and at 93 for a single loss.
WORLDS = (
    World(name="coin", n=59, delta=0.05, shares=_THEN_NULL, marginal=coin),
    World(name="coin, just above delta", n=59, delta=0.05, shares=(0, 0, 1.001, 1.001, 1.3), marginal=coin),
    World(name="coin, all at delta", n=99, delta=0.05, shares=_ALL_NULL, marginal=coin, correlation=0),
    World(name="coin, all at delta, correlated", n=99, delta=0.05, shares=_ALL_NULL, marginal=coin, correlation=0.8),
    World(name="coin, all at delta, in halves", n=118, delta=0.05, shares=_ALL_NULL, marginal=coin, correlation=0),
    World(name="coin, last at delta", n=93, delta=0.05, shares=(0, 0, 0, 0, 1), marginal=coin),
    World(name="coin, not monotone", n=86, delta=0.05, shares=_ALTERNATING, marginal=coin, correlation=0),
    World(name="coin, not monotone, common", n=86, delta=0.05, shares=_ALTERNATING, marginal=coin),
    World(name="coin, 40 thresholds", n=59, delta=0.05, shares=(0.0,) * 20 + (1.0,) * 20, marginal=coin),
    World(name="coin, 10 examples", n=10, delta=0.26, shares=(0, 1, 1, 1.2), marginal=coin),
    World(name="coin, one example", n=1, delta=0.955, shares=(0, 1, 1), marginal=coin),
    World(name="coin, delta 0.9", n=20, delta=0.9, shares=(0.2, 1, 1, 1.05), marginal=coin),
    World(name="coin, delta 0.02", n=149, delta=0.02, shares=_THEN_NULL, marginal=coin),
    World(name="coin, 1,000 examples", n=1000, delta=0.1, shares=(0.3, 1.0, 1.0), marginal=coin),
    World(name="coin, epsilon 0.2", n=16, delta=0.1, shares=_THEN_NULL, marginal=coin, epsilon=0.2),
    World(name="coin, epsilon 0.01", n=44, delta=0.1, shares=_THEN_NULL, marginal=coin, epsilon=0.01),
    World(name="beta, steep", n=100, delta=0.1, shares=_THEN_NULL, marginal=beta_steep),
    World(name="beta, steep, delta 0.5", n=50, delta=0.5, shares=(0, 1, 1, 1.5), marginal=beta_steep),
    World(name="beta, flat", n=200, delta=0.05, shares=_THEN_NULL, marginal=beta_flat),
    World(name="beta, flat, all at delta", n=200, delta=0.1, shares=_ALL_NULL, marginal=beta_flat, correlation=0.5),
    World(name="zero-inflated", n=100, delta=0.1, shares=_THEN_NULL, marginal=zero_inflated),
    World(name="zero-inflated, delta 0.02", n=200, delta=0.02, shares=_THEN_NULL, marginal=zero_inflated),
    World(name="bimodal", n=50, delta=0.3, shares=(0.2, 1, 1, 1.5), marginal=bimodal),
    World(name="bimodal, all at delta", n=100, delta=0.2, shares=_ALL_NULL, marginal=bimodal, correlation=0),
    World(name="ROUGE-like", n=100, delta=0.15, shares=_THEN_NULL, marginal=rouge_like),
    World(name="ROUGE-like, not monotone", n=200, delta=0.1, shares=_ALTERNATING, marginal=rouge_like, correlation=0.5),
    World(name="constant", n=50, delta=0.1, shares=_THEN_NULL, marginal=constant),
    World(name="almost constant", n=60, delta=0.2, shares=(0.5, 1, 1, 1.5), marginal=almost_constant),
    World(name="relief", n=100, delta=0.3, shares=(0, 1, 1, 1.5), marginal=relief(0.1)),
    World(name="means of clusters", n=120, delta=0.1, shares=_THEN_NULL, marginal=cluster_means),
    World(name="ROUGE-like, epsilon 0.005", n=300, delta=0.1, shares=_THEN_NULL, marginal=rouge_like, epsilon=0.005),
    World(name="jackpot", n=100, delta=0.1, shares=_THEN_NULL, marginal=jackpot(0.02)),
    World(name="jackpot, rare", n=300, delta=0.05, shares=_THEN_NULL, marginal=jackpot(0.005)),
    World(name="signed, ternary", n=100, delta=0.05, shares=_THEN_NULL, marginal=ternary(0.1), is_signed=True),
    World(
        name="signed, ternary, all at delta",
        n=100,
        delta=0.05,
        shares=_ALL_NULL,
        marginal=ternary(0.05),
        correlation=0,
        is_signed=True,
    ),
    World(
        name="signed, uniform", n=200, delta=0.1, shares=(-4, -4, 1, 1, 1.5), marginal=signed_uniform, is_signed=True
    ),
    World(
        name="signed, jackpot",
        n=100,
        delta=0.02,
        shares=(-2, -2, 1, 1, 1.5),
        marginal=signed_jackpot(0.03),
        is_signed=True,
    ),
    World(
        name="signed, relief", n=100, delta=0.05, shares=(-4, 1, 1, 1.5), marginal=signed_relief(0.05), is_signed=True
    ),
    World(name="signed, constant", n=50, delta=0.1, shares=(-9, 1, 1, 2), marginal=constant, is_signed=True),
)
