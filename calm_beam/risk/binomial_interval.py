"""An interval for the probability behind a count."""

from scipy import stats


def binomial_interval(count: int, trials: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Returns the probabilities that a count of independent trials does not contradict (Clopper-Pearson).

    Args:
      count: Trials in which it happened, in 0..trials.
      trials: At least 1.
      confidence: Chance that the interval holds the probability, at least; in (0, 1).

    Returns:
      Its ends, in [0, 1].

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
    low = float(stats.beta.ppf(tail, count, trials - count + 1)) if count else 0.0
    high = float(stats.beta.ppf(1 - tail, count + 1, trials - count)) if count < trials else 1.0
    return low, high
