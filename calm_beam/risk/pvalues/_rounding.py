"""Rounding outwards: what is published as a p-value is never below the exact one."""

import numpy as np

from calm_beam.risk import elementary

# What a computed argument may be wrong by, as a share of it: 16 roundings of 2^-53.
_ARGUMENT = 2.0**-49
# The least p-value that we publish. 0 would be certainty, and far below are numbers that some processors take for 0.
LEAST = 1e-300


def exp_upper(exponents: np.ndarray, *, factor: float = 1.0) -> np.ndarray:
    """Returns min(1, factor e^exponent), rounded up.

    Args:
      exponents: Any shape, at most 0, each right to a share of 2^-49.
      factor: Exact, and above 0.

    Returns:
      The same shape, in (0, 1]: above the exact value by a share of 2^-49 and of 2^-48 times the exponent.
    """
    return rounded_up(factor * elementary.exp(exponents * (1 - _ARGUMENT)))


def rounded_up(values: np.ndarray) -> np.ndarray:
    """Returns values that are right to 2^-50 of themselves as p-values that are none too small.

    They lie in [1e-300, 1].
    """
    return np.asarray(np.clip(values * (1 + 2 * elementary.RELATIVE_ERROR), LEAST, 1.0))
