"""Bounds on a probability from counts of independent trials, and on a promise.

The promise concerns serving by another engine than the calibrated one. Two engines give the same output except at
near ties. Losses are at most 1, so for every threshold

    R_served <= R_calibrated + q,    q = P(the output for a prompt differs).

The test that accepts a risk above delta with probability at most epsilon was about R_calibrated. So it may accept a
served risk above delta wherever R_calibrated is above delta - q, with a probability larger than epsilon.
"""

from calm_beam.risk.pvalues import exact_binomial_p_value

# Interval ends are multiples of 10^-12, found by bisection, so that they have the same bits on every machine.
_STEPS = 10**12


def binomial_interval(count: int, trials: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Returns the Clopper-Pearson interval of the probability behind a count of independent trials.

    Args:
      count: Successful trials, in 0..trials.
      trials: At least 1.
      confidence: Least chance that the interval covers the probability; in (0, 1).

    Returns:
      The ends of the interval, in [0, 1], rounded outwards to twelve digits.

    Raises:
      ValueError: If the count is not in 0..trials.

    Source: Clopper and Pearson (1934), "The use of confidence or fiducial limits".

    >>> low, high = binomial_interval(0, 50)
    >>> low, round(high, 4)
    (0.0, 0.0711)
    """
    if not 0 <= count <= trials or trials < 1:
        raise ValueError(f"count must be in 0..trials, got {count} of {trials}.")
    tail = (1 - confidence) / 2
    # The lower end is 1 minus the upper end for the unsuccessful trials.
    low = 0 if count == 0 else _STEPS - _steps_to_upper_end(trials - count, trials, tail=tail)
    high = _STEPS if count == trials else _steps_to_upper_end(count, trials, tail=tail)
    return low / _STEPS, high / _STEPS


def differing_upper(differing: int, prompts: int, *, level: float = 0.95) -> float:
    """Returns an upper confidence bound on q, given how many prompts had differing outputs.

    Args:
      differing: Number of prompts whose outputs at the threshold differed between the engines.
      prompts: Number of prompts decoded by both, drawn from the distribution that is served.
      level: Least probability that the bound holds, in (0, 1).

    Raises:
      ValueError: If a number is out of range.

    Source: Clopper and Pearson (1934), one-sided.

    >>> round(differing_upper(0, 1000), 5)
    0.00299
    """
    if not 0 <= differing <= prompts or prompts < 1:
        raise ValueError(f"differing must be in [0, prompts], got {differing} of {prompts}.")
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}.")
    return 1.0 if differing == prompts else _steps_to_upper_end(differing, prompts, tail=1 - level) / _STEPS


def epsilon_elsewhere(q: float, *, delta: float, epsilon: float, n: int) -> float:
    """Returns the probability that a calibration makes a promise that another engine breaks.

    It is computed for losses of 0 and 1 and the exact binomial test at one threshold, whose served risk is just above
    delta and whose calibrated risk is less by q. With q = 0 it is at most epsilon.

    Args:
      q: Probability that the other engine gives another output, in [0, 1].
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that the promise is broken, in (0, 1).
      n: Number of tested units.

    Raises:
      ValueError: If a number is out of range.

    >>> round(epsilon_elsewhere(0.003, delta=0.05, epsilon=0.05, n=5000), 2)
    0.24
    """
    if not 0 <= q <= 1 or not 0 < delta < 1 or not 0 < epsilon < 1 or n < 1:
        raise ValueError(f"q, delta, epsilon and n must be in range, got {q}, {delta}, {epsilon} and {n}.")
    from scipy.stats import binom

    # The largest sum of losses whose p-value is at most epsilon; -1 if there is none.
    most = int(binom.ppf(epsilon, n, delta))
    if binom.cdf(most, n, delta) > epsilon:
        most -= 1
    return float(binom.cdf(most, n, max(0.0, delta - q)))


def _steps_to_upper_end(count: int, trials: int, *, tail: float) -> int:
    """Returns the least probability, in steps, at which P(Bin(trials, p) <= count) is at most `tail`."""
    low, high = 0, _STEPS
    while high - low > 1:
        middle = (low + high) // 2
        if exact_binomial_p_value(count, n=trials, delta=middle / _STEPS) <= tail:
            high = middle
        else:
            low = middle
    return high
