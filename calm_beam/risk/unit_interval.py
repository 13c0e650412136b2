"""The checks that scores and losses lie in the range on which the guarantee rests."""

import numpy as np
from numpy.typing import ArrayLike


def require_unit_interval(values: ArrayLike, *, name: str) -> np.ndarray:
    """Returns `values` as float64, having checked that each lies in [0, 1].

    Args:
      values: Any shape.
      name: What to call the values in the message, as the caller wrote it.

    Returns:
      The same shape, float64.

    Raises:
      ValueError: If any value is NaN or outside [0, 1]; the message names the first such value and its index.

    Source: CALM, sec. "Calibrating Local Early Exits from Global Constraints" (D and R in [0, 1]).

    >>> require_unit_interval([0, 0.5], name="loss")
    array([0. , 0.5])
    """
    return _require_range(values, low=0, name=name)


def require_signed_unit_interval(values: ArrayLike, *, name: str) -> np.ndarray:
    """Returns `values` as float64, having checked that each lies in [-1, 1].

    Args:
      values: Any shape.
      name: What to call the values in the message, as the caller wrote it.

    Returns:
      The same shape, float64.

    Raises:
      ValueError: If any value is NaN or outside [-1, 1]; the message names the first such value and its index.

    Source: CALM Definition 2 (a difference of two risks in [0, 1]).

    >>> require_signed_unit_interval([-1, 0.5], name="loss")
    array([-1. ,  0.5])
    """
    return _require_range(values, low=-1, name=name)


def _require_range(values: ArrayLike, *, low: int, name: str) -> np.ndarray:
    checked = np.asarray(values, dtype=np.float64)
    # Asked this way round because every comparison with NaN is false.
    is_inside = (checked >= low) & (checked <= 1)
    if not is_inside.all():
        index = tuple(int(i) for i in np.argwhere(~is_inside)[0])
        where = f"{name}[{', '.join(map(str, index))}]" if index else name
        raise ValueError(
            f"{where} must be in [{low}, 1], got {float(checked[index])}. "
            "The bounds hold for values in that range only: normalize the metric first."
        )
    return checked
