"""The checks that all procedures share."""

import numpy as np
from numpy.typing import ArrayLike


def require_arguments(p_values: ArrayLike, *, epsilon: float) -> np.ndarray:
    """Returns the p-values as float64, having checked them and epsilon.

    Args:
      p_values: shape (..., thresholds), each in [0, 1].
      epsilon: Allowed probability of any false rejection, in (0, 1).

    Returns:
      The same shape.

    Raises:
      ValueError: If `p_values` has no axis or holds NaN or values outside [0, 1], or `epsilon` is out of range.

    Source: ours.

    >>> require_arguments([0, 0.5], epsilon=0.05)
    array([0. , 0.5])
    """
    if not 0 < epsilon < 1:
        raise ValueError(
            f"epsilon must be in (0, 1), got {epsilon}. It is a probability: for 95 % confidence pass epsilon=0.05."
        )
    checked = np.asarray(p_values, dtype=np.float64)
    if checked.ndim == 0:
        raise ValueError(f"p_values must have shape (..., thresholds), got the single number {p_values!r}.")
    is_inside = (checked >= 0) & (checked <= 1)
    if not is_inside.all():
        index = tuple(int(i) for i in np.argwhere(~is_inside)[0])
        raise ValueError(f"p_values[{', '.join(map(str, index))}] must be in [0, 1], got {float(checked[index])}.")
    return checked
