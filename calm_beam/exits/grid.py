"""Grids of exit thresholds, in the order in which they are tested."""

import itertools
from collections.abc import Iterable
from decimal import Decimal

import numpy as np

# Every threshold is decoded for every prompt.
_FINEST_STEP = 0.001


def descending_grid(thresholds: Iterable[float]) -> tuple[float, ...]:
    """Returns thresholds in the order in which they are tested: strictly descending.

    Args:
      thresholds: Any order, at least one.

    Raises:
      ValueError: If there is none, one is outside [0, 1] or NaN, or two are equal (also when only as float32, the type
        that confidences are compared in).
    """
    grid = tuple(sorted((float(threshold) for threshold in thresholds), reverse=True))
    if not grid:
        raise ValueError("thresholds must not be empty.")
    for threshold in grid:
        if not 0 <= threshold <= 1:
            raise ValueError(f"thresholds must be in [0, 1], got {threshold}.")
    for upper, lower in itertools.pairwise(grid):
        if np.float32(upper) == np.float32(lower):
            raise ValueError(f"thresholds must be distinct in float32, got {upper} and {lower}.")
    return grid


def uniform_grid(step: float) -> tuple[float, ...]:
    """Returns the multiples of `step` below 1, descending to 0.

    1 itself is left out: next to "never exit", which is always the fallback, it would cost a full decode for almost
    nothing. `--thresholds` takes any grid.

    Args:
      step: In [0.001, 1).

    Raises:
      ValueError: If the step is outside that range.

    >>> uniform_grid(0.25)
    (0.75, 0.5, 0.25, 0.0)
    """
    if not _FINEST_STEP <= step < 1:
        raise ValueError(
            f"grid_step must be in [{_FINEST_STEP}, 1), got {step}. It is the distance of two thresholds, e.g. 0.05."
        )
    # In decimal, so that the grid holds 0.15 and not 0.15000000000000002.
    exact = Decimal(repr(float(step)))
    multiples = [index * exact for index in range(int(1 / exact) + 1)]
    return tuple(float(value) for value in reversed(multiples) if np.float32(value) < 1)
