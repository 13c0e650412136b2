"""p-values of raw losses, from the same sums as in production."""

import numpy as np

from calm_beam.risk.evidence import EvidenceError
from calm_beam.risk.pvalues import P_VALUES, p_values_of


def registered_p_values(name: str, losses: np.ndarray, *, delta: float, epsilon: float = 0.05) -> np.ndarray | None:
    """Returns the p-values that a calibration would compute from these losses.

    Args:
      name: A key of `P_VALUES`.
      losses: shape (n, ...), each in [-1, 1]. A p-value that takes no signed losses sees max(0, loss), as in the paper.
      delta: Risk tolerance.
      epsilon: Planned level of the test.

    Returns:
      Shape (...); None if this p-value is for losses of 0 and 1 only, and there are others.
    """
    losses = losses if P_VALUES[name].takes_signed else np.maximum(losses, 0)
    try:
        return p_values_of(losses, p_value=name, delta=delta, epsilon=epsilon)
    except EvidenceError:
        return None
