"""The check that every score and loss lies in [0, 1], on which the guarantee rests."""

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
      ValueError: If any value is NaN or outside [0, 1]; the message names the first such value and its place.

    Source: CALM, sec. "Calibrating Local Early Exits from Global Constraints" (D and R in [0, 1]).

    >>> require_unit_interval([0, 0.5], name="loss")
    array([0. , 0.5])
    """
    checked = np.asarray(values, dtype=np.float64)
    # Asked this way round because every comparison with NaN is false.
    is_inside = (checked >= 0) & (checked <= 1)
    if not is_inside.all():
        place = tuple(int(i) for i in np.argwhere(~is_inside)[0])
        where = f"{name}[{', '.join(map(str, place))}]" if place else name
        raise ValueError(
            f"{where} must be in [0, 1], got {float(checked[place])}. "
            "The bounds hold for values in that range only: normalize the metric first."
        )
    return checked
