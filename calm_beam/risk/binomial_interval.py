"""An interval for the probability behind a count."""

from calm_beam.risk.pvalues import exact_binomial_p_value

# Ends are multiples of 10^-12, found by halving, so that they have the same bits on every machine.
_STEPS = 10**12


def binomial_interval(count: int, trials: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Returns the probabilities that a count of independent trials does not contradict (Clopper-Pearson).

    Args:
      count: Trials in which it happened, in 0..trials.
      trials: At least 1.
      confidence: Chance that the interval holds the probability, at least; in (0, 1).

    Returns:
      Its ends, in [0, 1], rounded outwards to twelve digits.

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
    # The other end is that of the trials in which it did not happen, seen from the other side.
    low = 0 if count == 0 else _STEPS - _steps_to_upper_end(trials - count, trials, tail=tail)
    high = _STEPS if count == trials else _steps_to_upper_end(count, trials, tail=tail)
    return low / _STEPS, high / _STEPS


def _steps_to_upper_end(count: int, trials: int, *, tail: float) -> int:
    """Returns the least probability, in steps, under which a count so small has a chance of at most `tail`."""
    low, high = 0, _STEPS
    while high - low > 1:
        middle = (low + high) // 2
        if exact_binomial_p_value(count, n=trials, delta=middle / _STEPS) <= tail:
            high = middle
        else:
            low = middle
    return high
