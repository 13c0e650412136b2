"""Any registered p-value of losses that are at hand: for simulations, benchmarks and small jobs."""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.evidence import Evidence
from calm_beam.risk.fixed_point import to_fixed_point, to_signed_fixed_point
from calm_beam.risk.pvalues import P_VALUES


def p_values_of(losses: ArrayLike, *, p_value: str, delta: float, epsilon: float = 0.05) -> np.ndarray:
    """Returns the p-values that a calibration with these losses would compute, bit for bit.

    Args:
      losses: shape (n, ...), each in [0, 1], or in [-1, 1] for a p-value that takes signed losses. Along the first axis
        in betting order, which only some p-values look at.
      p_value: A key of `P_VALUES`.
      delta: Risk tolerance, in (0, 1).
      epsilon: Level that the test is planned at, in (0, 1), which only `star_bets` looks at.

    Returns:
      Shape (...), values in [0, 1].

    Raises:
      ValueError: If there are no losses, one is NaN or out of range, or `delta` is.
      EvidenceError: If the p-value is for losses of 0 and 1, and there are others.

    Source: ours.

    >>> p_values_of([[0.0, 1.0]] * 29, p_value="exact_binomial", delta=0.1).round(4)
    array([0.0471, 1.    ])
    """
    method = P_VALUES[p_value]
    fixed = to_signed_fixed_point(losses) if method.takes_signed else to_fixed_point(losses)
    if fixed.ndim == 0 or not len(fixed):
        raise ValueError(f"losses must have shape (n, ...) with n at least 1, got {fixed.shape}.")
    evidence = Evidence.of(fixed, method.statistics(delta), table=fixed if method.needs_table else None)
    return method.p_values(evidence, delta, epsilon)
