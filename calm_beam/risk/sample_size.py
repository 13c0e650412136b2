"""The number of examples a calibration needs: the power of a test, and when a watched one would stop.

Power is the probability that a threshold is accepted whose losses are distributed as guessed, or as they were measured,
at an expected loss below delta. It is computed exactly for losses of 0 and 1, unless the p-value depends on their
order, and by simulation otherwise. Only one threshold is considered. Fixed sequence testing accepts the safer ones
before it more easily; for procedures that divide epsilon among K thresholds, or entries that must hold together,
divide epsilon as they do.

For a calibration that is watched while examples come in, a simulation forecasts when it would prove a threshold. The
test is that of `signed_mixture`, whose capital may be tested after every round: by Ville's inequality it ever reaches
1 / epsilon with probability at most epsilon, if the risk exceeds delta.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from calm_beam.risk.elementary import log_capital
from calm_beam.risk.evidence import Evidence, Statistic
from calm_beam.risk.losses import LOSS_SCALE, require_signed_unit_interval
from calm_beam.risk.pvalues import P_VALUES, exact_binomial_p_value, p_values_of
from calm_beam.risk.pvalues.signed_mixture import BETS

# Calibration sets simulated together; part of what a seed means.
_SETS_AT_A_TIME = 50
# Precision of the search for a number of examples by simulation, whose own error is larger.
_SIMULATED_SHARE = 0.005
_ANY_LEVEL = 0.05

# p-values of losses of 0 and 1 that depend on how many are 1, and on nothing else.
COIN_P_VALUES = tuple(name for name, method in P_VALUES.items() if not method.needs_table)

# Function from a generator and a shape to losses.
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
    """Returns losses drawn with replacement from measured ones.

    Args:
      pilot: One or more losses, each in [-1, 1].

    Raises:
      ValueError: If there are none, or one is NaN or out of range.
    """
    values = require_signed_unit_interval(pilot, name="pilot")
    if not values.size:
        raise ValueError("pilot must hold at least one loss.")
    return lambda rng, shape: rng.choice(values, size=shape)


def coin_p_value(p_value: str, ones: int, *, n: int, delta: float) -> float:
    """Returns the p-value that a calibration computes from n losses, of which some are 1 and the others 0.

    Args:
      p_value: One of `COIN_P_VALUES`.
      ones: Number of losses that are 1, in [0, n].
      n: Number of examples, at least 1.
      delta: Risk tolerance, in (0, 1).

    Source: ours.

    >>> round(coin_p_value("exact_binomial", 1, n=59, delta=0.1), 4)
    0.0151
    """
    sums = {statistic: zero * (n - ones) + one * ones for statistic, zero, one in _coin_statistics(p_value, delta)}
    # No p-value of sums depends on the level.
    return float(P_VALUES[p_value].p_values(Evidence(n=n, sums=sums), delta, _ANY_LEVEL)[0])


@functools.lru_cache
def _coin_statistics(p_value: str, delta: float) -> tuple[tuple[Statistic, np.ndarray, np.ndarray], ...]:
    """Returns the statistics of a p-value, each with its value for a loss of 0 and a loss of 1, of shape (1,)."""
    zero, one = np.array([0]), np.array([LOSS_SCALE])
    return tuple((each, each.values(zero), each.values(one)) for each in P_VALUES[p_value].statistics(delta))


def exact_power(p_value: str, *, n: int, risk: float, delta: float, epsilon: float) -> float:
    """Returns the power at n losses of 0 and 1.

    Args:
      p_value: One of `COIN_P_VALUES`.
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
    # The largest accepted sum, by bisection: `low` is accepted or -1, `high` is not accepted or n + 1.
    low, high = -1, n + 1
    while high - low > 1:
        middle = (low + high) // 2
        if coin_p_value(p_value, middle, n=n, delta=delta) <= epsilon:
            low = middle
        else:
            high = middle
    return _chance_of_at_most(low, n=n, risk=risk)


def _chance_of_at_most(ones: int, *, n: int, risk: float) -> float:
    """Returns the probability of at most `ones` ones among n losses."""
    if ones < 0 or risk == 0:
        return float(ones >= 0)
    # The binomial p-value is the distribution function, with accurate tails.
    return float(exact_binomial_p_value(ones, n=n, delta=risk))


def coin_examples_needed(
    p_value: str, *, risk: float, delta: float, epsilon: float, power: float, at_most: int
) -> int | None:
    """Returns the number of losses of 0 and 1 from which on the power is enough, and stays so.

    Power is a sawtooth in n. A count of ones is accepted from some n on; until the next count is, every further example
    makes acceptance less probable, and then power jumps up. So power is least at the last n before a jump. It is
    enough there for every count except the small ones, and the number returned is where the first
    count begins after the last one for which power is not enough.

    Args:
      p_value: One of `COIN_P_VALUES`.
      risk: Expected loss, in [0, delta).
      delta: Risk tolerance, in (0, 1).
      epsilon: Level of the test, in (0, 1).
      power: The power asked for, in (0, 1).
      at_most: Largest number to try.

    Returns:
      A number N in [1, at_most] at which the power is enough, as at every larger one up to `at_most`; at N - 1 it is
      not. None if there is no such number.

    Source: bisection over the counts. Lengths of teeth are whole numbers, so power at their ends does not rise quite
      evenly: after the bisection we check as many more counts as that can affect.
    """
    teeth = _Teeth(p_value, delta=delta, epsilon=epsilon, at_most=at_most)

    def is_enough(count: int) -> bool:
        last = teeth.last(count)
        return last < teeth.first(count) or _chance_of_at_most(count, n=last, risk=risk) >= power

    # -1 is the tooth before any count is accepted.
    low, high = -1, 0
    while not is_enough(high):
        low, high = high, 2 * high + 1
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    # A tooth that is too long by one example has `risk` more ones in expectation. From one end to the next, the count
    # gains (1 - risk / delta) on its expectation, of which the growing spread takes half.
    unevenness = 2 + math.ceil(2 * delta * risk / (delta - risk))
    count = high
    while count <= high + unevenness and teeth.first(count) <= at_most:
        count += 1
        if not is_enough(count - 1):
            high = count
    return teeth.first(high) if teeth.first(high) <= at_most else None


class _Teeth:
    """The teeth of power: the ranges of n over which each count of ones is the largest accepted one."""

    def __init__(self, p_value: str, *, delta: float, epsilon: float, at_most: int) -> None:
        self._p_value, self._delta, self._epsilon, self._at_most = p_value, delta, epsilon, at_most
        self._firsts = {-1: 1}

    def last(self, count: int) -> int:
        """Returns the last n of a tooth, capped at `at_most`."""
        return self.first(count + 1) - 1

    def first(self, count: int) -> int:
        """Returns the least n at which `count` ones are accepted; `at_most` + 1 if it is larger than `at_most`."""
        if count not in self._firsts:
            below = max(known for known in self._firsts if known < count)
            above = min((known for known in self._firsts if known > count), default=None)
            low = max(count, self._firsts[below]) - 1
            high = self._at_most + 1 if above is None else self._firsts[above]
            # One more loss of 1 needs about 1 / delta more examples.
            guess = min(high, low + int((count - below) / self._delta))
            self._firsts[count] = self._bisected(count, low=low, guess=guess, high=high)
        return self._firsts[count]

    def _bisected(self, count: int, *, low: int, guess: int, high: int) -> int:
        """Returns the least accepted n above `low`, or `high` if none below it is accepted; tries the guess first.

        From the guess on, steps double until the result lies between two of them.
        """
        step = max(1, (guess - low) // 64)
        probe = min(max(guess, low + 1), high)
        if self._is_accepted(count, probe):
            high = probe
            while (probe := high - step) > low and self._is_accepted(count, probe):
                high, step = probe, 2 * step
            low = max(low, probe)
        else:
            low = probe
            while (probe := low + step) < high and not self._is_accepted(count, probe):
                low, step = probe, 2 * step
            high = min(high, probe)
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_accepted(count, middle):
                high = middle
            else:
                low = middle
        return high

    def _is_accepted(self, count: int, n: int) -> bool:
        if n > self._at_most:
            return True
        return count <= n and coin_p_value(self._p_value, count, n=n, delta=self._delta) <= self._epsilon


def simulated_power(
    p_value: str, losses: Losses, *, n: int, delta: float, epsilon: float, replications: int, seed: int
) -> float:
    """Returns the share of simulated calibration sets in which the threshold is accepted.

    With one seed a larger n extends the sets of a smaller one, so that the power found is nearly monotone in n.

    Args:
      p_value: A key of `P_VALUES`.
      losses: Their distribution.
      n: Number of examples, at least 1.
      delta: Risk tolerance, in (0, 1).
      epsilon: Level of the test, in (0, 1).
      replications: Number of sets, at least 1.
      seed: Seed of the draws.

    Raises:
      EvidenceError: If the p-value does not take such losses.

    Source: simulation; its standard error is sqrt(power (1 - power) / replications).
    """
    sets = _accepted_sets(p_value, losses, n=n, delta=delta, epsilon=epsilon, replications=replications, seed=seed)
    return sum(sets) / replications


def _accepted_sets(
    p_value: str, losses: Losses, *, n: int, delta: float, epsilon: float, replications: int, seed: int
) -> Iterator[int]:
    """Yields how many of some simulated sets after the other are accepted."""
    for part, start in enumerate(range(0, replications, _SETS_AT_A_TIME)):
        rng = np.random.default_rng((seed, part))
        drawn = losses(rng, (n, min(_SETS_AT_A_TIME, replications - start)))
        yield int(np.count_nonzero(p_values_of(drawn, p_value=p_value, delta=delta, epsilon=epsilon) <= epsilon))


def simulated_examples_needed(
    p_value: str,
    losses: Losses,
    *,
    delta: float,
    epsilon: float,
    power: float,
    replications: int,
    seed: int,
    at_most: int,
) -> int | None:
    """Returns about how many examples it takes for the simulated power to be enough.

    Args:
      p_value: A key of `P_VALUES`.
      losses: Their distribution.
      delta: Risk tolerance, in (0, 1).
      epsilon: Level of the test, in (0, 1).
      power: The power asked for, in (0, 1).
      replications: Number of sets, at least 1.
      seed: Seed of the draws.
      at_most: Largest number to try.

    Returns:
      A number in [1, at_most] at which the simulated power is enough, while at one smaller by at most 0.5 % (and at
      least by 1) it is not; None if there is none.

    Raises:
      EvidenceError: If the p-value does not take such losses.

    Source: bisection; assumes that power is monotone, as it nearly is (see `simulated_power`).
    """

    def is_enough(n: int) -> bool:
        # Stops as soon as the remaining sets cannot change the answer.
        parts = _accepted_sets(p_value, losses, n=n, delta=delta, epsilon=epsilon, replications=replications, seed=seed)
        left = replications
        for accepted in itertools.accumulate(parts):
            left = max(0, left - _SETS_AT_A_TIME)
            if accepted / replications >= power:
                return True
            if (accepted + left) / replications < power:
                return False
        return False

    low, high = 0, 1
    while not is_enough(high):
        if high == at_most:
            return None
        low, high = high, min(2 * high, at_most)
    while high - low > max(1, int(_SIMULATED_SHARE * high)):
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedStop:
    """The outcome of simulated calibrations.

    Attributes:
      place: Index in the testing order of the last threshold that at least the requested share of them proves; -1 for
        none.
      shares: The share of all examples after which that threshold is proved: in the median calibration, and the ends of
        the interval that contains 90 % of them. A calibration that does not prove it uses all. None where `place` is
        -1.
    """

    place: int
    shares: tuple[float, float, float] | None


def expected_stop(
    fixed_losses: np.ndarray,
    *,
    delta: float,
    epsilon: float,
    looks: Sequence[int],
    power: float = 0.9,
    replications: int = 200,
    seed: int = 0,
) -> ExpectedStop:
    """Returns the expected end of calibrations that stop at the threshold which a whole one is expected to prove.

    Each simulated calibration draws its examples from the pilot's, with its own weights: the pilot is a sample too,
    so others may be better or worse. Thresholds are tested in their order until one is not proved.

    Args:
      fixed_losses: shape (examples, thresholds), int64 in units of 2^-32. Losses of the pilot, in testing order.
      delta: Risk tolerance, in (0, 1).
      epsilon: Level, in (0, 1).
      looks: Numbers of examples after which there is a look, ascending; the last is the number of all examples.
      power: Share of whole calibrations that must prove the threshold.
      replications: Number of simulated calibrations, at least 1.
      seed: Seed of the draws.

    Source: simulation; Ville (1939) for the test, Rubin (1981), "The Bayesian bootstrap", for the weights.
    """
    examples, thresholds = fixed_losses.shape
    # [bettors, examples, thresholds]
    grown = np.stack([log_capital(fixed_losses, delta=delta, share=share) / LOSS_SCALE for share in BETS])
    starts = np.log(np.array(list(BETS.values())))[:, None, None]
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(examples), size=replications)
    capital = np.zeros((len(BETS), replications, thresholds))
    needed = np.full((replications, thresholds), np.inf)
    seen = 0
    for look in looks:
        # Number of times each of the pilot's examples is drawn in this round.
        counts = rng.multinomial(look - seen, weights)
        capital += counts.astype(float) @ grown
        wealth = np.logaddexp.reduce(capital + starts, axis=0)
        needed[(wealth >= -math.log(epsilon)) & np.isinf(needed)] = look
        seen = look
    # A threshold is reached once all before it are proved too.
    reached = np.maximum.accumulate(needed, axis=1)
    proved = np.isfinite(reached).mean(axis=0) >= power
    if not proved[0]:
        return ExpectedStop(place=-1, shares=None)
    place = int(np.flatnonzero(proved)[-1])
    shares = np.minimum(reached[:, place], seen) / seen
    low, median, high = np.quantile(shares, (0.05, 0.5, 0.95), method="inverted_cdf")
    return ExpectedStop(place=place, shares=(float(median), float(low), float(high)))


def looks_at(examples: int, *, first: int) -> tuple[int, ...]:
    """Returns the numbers of examples at which to look: after every round at first, later after 5 % more.

    Args:
      examples: Number of all examples.
      first: Number of examples of a round.

    >>> looks_at(1000, first=400)
    (400, 800, 1000)
    """
    looks = []
    look = min(first, examples)
    while look < examples:
        looks.append(look)
        look += max(first, first * int(0.05 * look / first))
    return (*looks, examples)


_MOST_EXAMPLES_COMPUTED = 10_000_000
_MOST_EXAMPLES_SIMULATED = 100_000
_POINTS_OF_A_CURVE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuessedLosses:
    """A guess of the distribution of losses at one threshold.

    Attributes:
      risk: Expected loss.
      std: Standard deviation.
      losses: The function that draws them.
      is_coin: Whether all are 0 or 1.
      is_signed: Whether some are negative.
    """

    risk: float
    std: float
    losses: Losses
    is_coin: bool = False
    is_signed: bool = False

    @classmethod
    def with_moments(cls, risk: float, std: float | None) -> Self:
        """Returns losses of 0 and 1, or beta-distributed ones if `std` is given; errors as in `beta_losses`."""
        if std is None:
            return cls(risk=risk, std=math.sqrt(risk * (1 - risk)), losses=coin_losses(risk), is_coin=True)
        return cls(risk=risk, std=std, losses=beta_losses(risk, std=std))

    @classmethod
    def measured(cls, losses: Sequence[float]) -> Self:
        """Returns a guess that draws from measured losses; errors as in `resampled_losses`."""
        values = np.array(losses)
        return cls(
            risk=float(values.mean()),
            std=float(values.std()),
            losses=resampled_losses(losses),
            is_coin=bool(np.isin(values, (0, 1)).all()),
            is_signed=bool((values < 0).any()),
        )

    @property
    def title(self) -> str:
        """A description of the guess."""
        return f"expected loss {self.risk:.4g}, deviation {self.std:.3g}"

    def fits(self, p_value: str) -> bool:
        """Returns whether a p-value is valid for such losses."""
        method = P_VALUES[p_value]
        return (self.is_coin or method.takes_fractions) and (not self.is_signed or method.takes_signed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """The power of one p-value.

    Attributes:
      name: Name of the p-value.
      needed: Number of examples at which the power reaches the requested one; None if more than `at_most`.
      at_most: Largest number that was tried.
      points: Pairs of a number of examples and the power there.
    """

    name: str
    needed: int | None
    at_most: int
    points: tuple[tuple[int, float], ...]

    def needed_in_words(self) -> str:
        """Returns the number of examples needed as text, as far as it is known."""
        return f"> {self.at_most:,}" if self.needed is None else f"{self.needed:,}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerQuestion:
    """A question about the power of tests of one threshold.

    Attributes:
      delta: Risk tolerance.
      epsilon: Allowed probability of error.
      power: Requested probability of acceptance.
      replications: Number of simulated calibrations, if any are needed.
      seed: Seed of the simulation.
    """

    delta: float
    epsilon: float
    power: float
    replications: int
    seed: int

    def curves(
        self,
        guess: GuessedLosses,
        p_values: Sequence[str],
        *,
        has_points: bool,
        simulating: Callable[[str], None] = lambda _: None,
    ) -> list[Curve]:
        """Returns the number of examples that each p-value needs and, if asked for, the power around it.

        Args:
          guess: The losses.
          p_values: Names of tests that fit them.
          has_points: Whether powers are computed.
          simulating: Called with the name of each p-value before its simulation, which may take a minute.
        """
        curves, powers = [], []
        for name in p_values:
            curve, power_of = self._needed(guess, name, simulating=simulating)
            curves.append(curve)
            powers.append(power_of)
        if not has_points:
            return curves
        found = [curve.needed or curve.at_most for curve in curves]
        grid = sorted({int(n) for n in np.geomspace(max(1, min(found) / 10), 1.5 * max(found), _POINTS_OF_A_CURVE)})
        return [
            dataclasses.replace(curve, points=tuple((n, power_of(n)) for n in grid if n <= curve.at_most))
            for curve, power_of in zip(curves, powers, strict=True)
        ]

    def _needed(
        self, guess: GuessedLosses, name: str, *, simulating: Callable[[str], None]
    ) -> tuple[Curve, Callable[[int], float]]:
        """Returns the number of examples that a p-value needs, and its power function."""
        test: dict[str, Any] = {"delta": self.delta, "epsilon": self.epsilon}
        power_of: Callable[[int], float]
        if guess.is_coin and name in COIN_P_VALUES:
            at_most = _MOST_EXAMPLES_COMPUTED
            needed = coin_examples_needed(name, risk=guess.risk, power=self.power, at_most=at_most, **test)
            power_of = functools.partial(_exact_power, name, guess, test)
        else:
            at_most = _MOST_EXAMPLES_SIMULATED
            test |= {"replications": self.replications, "seed": self.seed}
            simulating(name)
            needed = simulated_examples_needed(name, guess.losses, power=self.power, at_most=at_most, **test)
            power_of = functools.partial(_simulated_power, name, guess, test)
        return Curve(name=name, needed=needed, at_most=at_most, points=()), power_of


def _exact_power(name: str, guess: GuessedLosses, test: Mapping[str, Any], n: int) -> float:
    return exact_power(name, n=n, risk=guess.risk, **test)


def _simulated_power(name: str, guess: GuessedLosses, test: Mapping[str, Any], n: int) -> float:
    return simulated_power(name, guess.losses, n=n, **test)
