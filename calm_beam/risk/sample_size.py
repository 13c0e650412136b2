"""How many examples a calibration needs: the power of a test at an expected loss below delta, before any sweep.

Power is the probability that a threshold whose loss is distributed as guessed is accepted. It is computed exactly for
losses of 0 and 1 where the p-value depends on their sum alone, and by simulation otherwise.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from calm_beam.risk.in_memory import p_values_of
from calm_beam.risk.pvalues import exact_binomial_p_value, hoeffding_bentkus_p_value, hoeffding_p_value
from calm_beam.risk.unit_interval import require_signed_unit_interval

# Calibration sets simulated together; part of what a seed means.
_SETS_AT_A_TIME = 50


class _SumPValue(Protocol):
    def __call__(self, loss_sum: float, *, n: int, delta: float) -> np.ndarray: ...


# p-values that depend on the sum of the losses alone, and do not fall as it grows.
SUM_P_VALUES: Mapping[str, _SumPValue] = types.MappingProxyType(
    {
        "hoeffding": hoeffding_p_value,
        "hoeffding_bentkus": hoeffding_bentkus_p_value,
        "exact_binomial": exact_binomial_p_value,
    }
)

# Takes a generator and a shape; returns losses.
Losses = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def coin_losses(risk: float) -> Losses:
    """Returns losses of 0 and 1: the widest spread that a risk allows.

    Args:
      risk: Expected loss, in [0, 1].
    """
    return lambda rng, shape: np.asarray(rng.uniform(size=shape) < risk, dtype=np.float64)


def beta_losses(risk: float, *, std: float) -> Losses:
    """Returns beta-distributed losses.

    Args:
      risk: Expected loss, in (0, 1).
      std: Standard deviation, above 0 and below that of losses of 0 and 1, sqrt(risk (1 - risk)).

    Raises:
      ValueError: If no beta distribution has these moments.

    >>> losses = beta_losses(0.1, std=0.2)(np.random.default_rng(0), (1000, 1000))
    >>> float(losses.mean().round(3)), float(losses.std().round(3))
    (0.1, 0.2)
    """
    widest = float(np.sqrt(risk * (1 - risk)))
    if not 0 < std < widest:
        raise ValueError(
            f"loss_std must be above 0 and below {widest:.4g}, which losses of 0 and 1 have at risk {risk:g}; got "
            f"{std:g}."
        )
    size = risk * (1 - risk) / std**2 - 1
    return lambda rng, shape: rng.beta(risk * size, (1 - risk) * size, size=shape)


def resampled_losses(pilot: Sequence[float]) -> Losses:
    """Returns draws with replacement from losses that were measured.

    Args:
      pilot: One or more losses, each in [-1, 1].

    Raises:
      ValueError: If there is none, or one is NaN or out of range.
    """
    values = require_signed_unit_interval(pilot, name="pilot")
    if not values.size:
        raise ValueError("pilot must hold at least one loss.")
    return lambda rng, shape: rng.choice(values, size=shape)


def exact_power(p_value: str, *, n: int, risk: float, delta: float, epsilon: float) -> float:
    """Returns the power at n losses of 0 and 1.

    Args:
      p_value: A key of `SUM_P_VALUES`.
      n: Number of examples, at least 1.
      risk: Expected loss, in [0, 1).
      delta: Risk tolerance, in (0, 1).
      epsilon: Level of the test, in (0, 1).

    Source: the binomial distribution.

    >>> round(exact_power("exact_binomial", n=59, risk=0.0, delta=0.05, epsilon=0.05), 3)
    1.0
    >>> round(exact_power("exact_binomial", n=59, risk=0.01, delta=0.05, epsilon=0.05), 3) == round(0.99**59, 3)
    True
    """
    # The largest sum that is accepted, by bisection: `low` is, or is -1, and `high` is not, or is n + 1.
    low, high = -1, n + 1
    while high - low > 1:
        middle = (low + high) // 2
        if SUM_P_VALUES[p_value](float(middle), n=n, delta=delta) <= epsilon:
            low = middle
        else:
            high = middle
    if low < 0 or risk == 0:
        return float(low >= 0)
    # The binomial p-value is the distribution function, computed with care for its tails.
    return float(exact_binomial_p_value(low, n=n, delta=risk))


def simulated_power(
    p_value: str, losses: Losses, *, n: int, delta: float, epsilon: float, replications: int, seed: int
) -> float:
    """Returns the share of simulated calibration sets in which the threshold is accepted.

    With one seed a larger n extends the sets of a smaller one, so that the power found is nearly monotone in n.

    Args:
      p_value: A key of `P_VALUES`.
      losses: How they are distributed.
      n: Number of examples, at least 1.
      delta: Risk tolerance, in (0, 1).
      epsilon: Level of the test, in (0, 1).
      replications: Number of sets, at least 1.
      seed: Of the draws.

    Raises:
      EvidenceError: If the p-value does not take such losses.

    Source: simulation; its standard error is sqrt(power (1 - power) / replications).
    """
    accepted = 0
    for part, start in enumerate(range(0, replications, _SETS_AT_A_TIME)):
        rng = np.random.default_rng((seed, part))
        drawn = losses(rng, (n, min(_SETS_AT_A_TIME, replications - start)))
        accepted += int(np.count_nonzero(p_values_of(drawn, p_value=p_value, delta=delta) <= epsilon))
    return accepted / replications


def examples_needed(power_at: Callable[[int], float], *, power: float, window: int, at_most: int) -> int | None:
    """Returns the least number of examples found whose power is enough, also a little further up.

    Power saws as n grows, since a sum that is just accepted at one n is just not at another. A number is good here if
    the power is enough at it and at the `window` following ones.

    Args:
      power_at: Gives the power at a number of examples.
      power: The power asked for, in (0, 1).
      window: How many more numbers must do; 0 takes the power as monotone.
      at_most: Where to give up.

    Returns:
      A number in [1, at_most], or None if there is none. It is the least good one as far as goodness, unlike power, is
      monotone in n, and never one that is not good.

    Source: bisection.
    """

    def is_good(n: int) -> bool:
        return all(power_at(m) >= power for m in range(n, n + window + 1))

    low, high = 0, 1
    while not is_good(high):
        if high == at_most:
            return None
        low, high = high, min(2 * high, at_most)
    while high - low > 1:
        middle = (low + high) // 2
        if is_good(middle):
            high = middle
        else:
            low = middle
    return high
