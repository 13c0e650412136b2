"""p-values of raw losses, by way of the same sums as in production."""

import numpy as np

from calm_beam.risk.evidence import Evidence
from calm_beam.risk.fixed_point import LOSS_SCALE, to_signed_fixed_point
from calm_beam.risk.pvalues import P_VALUES


def registered_p_values(name: str, losses: np.ndarray, *, delta: float) -> np.ndarray | None:
    """Returns the p-values that a calibration would compute from these losses.

    Args:
      name: A key of `P_VALUES`.
      losses: shape (n, ...), each in [-1, 1]. A p-value that takes no signed losses sees max(0, loss), as in the paper.
      delta: Risk tolerance.

    Returns:
      Shape (...); None if this p-value is for losses of 0 and 1, and there are others.
    """
    method = P_VALUES[name]
    fixed = to_signed_fixed_point(losses)
    if not method.takes_signed:
        fixed = np.maximum(fixed, 0)
    if name == "exact_binomial" and not np.isin(fixed, (0, LOSS_SCALE)).all():
        return None
    sums = {statistic: statistic.of(fixed).sum(axis=0) for statistic in method.statistics(delta)}
    evidence = Evidence(n=len(fixed), sums=sums, table=fixed if method.needs_table else None)
    return method.p_values(evidence, delta)
