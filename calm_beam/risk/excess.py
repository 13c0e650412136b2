"""The opposite question: do losses prove that the risk exceeds delta?

A p-value for "the risk exceeds delta" becomes one for "the risk is at most delta" when good and bad change places: a
loss L in [0, 1] turns into 1 - L, and the tolerance into 1 - delta. Signed losses are brought to [0, 1] on the way.
"""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.fixed_point import require_signed_unit_interval, require_unit_interval
from calm_beam.risk.in_memory import p_values_of


def excess_p_values(losses: ArrayLike, *, p_value: str, delta: float, is_signed: bool = False) -> np.ndarray:
    """Returns p-values of the null "the risk is at most delta": a small one is evidence that it is larger.

    Args:
      losses: shape (n, ...), each in [0, 1], or in [-1, 1] if signed; along the first axis in betting order.
      p_value: A key of `P_VALUES`; every one that is valid for the losses is valid for them reversed.
      delta: Risk tolerance, in (0, 1).
      is_signed: Whether losses lie in [-1, 1].

    Returns:
      Shape (...), values in [0, 1].

    Raises:
      ValueError: If there are no losses, one is NaN or out of range, or `delta` is.
      EvidenceError: If the p-value is for losses of 0 and 1, and there are others.

    Source: ours; see the module docstring.

    >>> excess_p_values([[0.0, 1.0]] * 29, p_value="exact_binomial", delta=0.9).round(4)
    array([1.    , 0.0471])
    """
    if is_signed:
        reversed_losses = (1 - require_signed_unit_interval(losses, name="losses")) / 2
        return p_values_of(reversed_losses, p_value=p_value, delta=(1 - delta) / 2)
    return p_values_of(1 - require_unit_interval(losses, name="losses"), p_value=p_value, delta=1 - delta)
