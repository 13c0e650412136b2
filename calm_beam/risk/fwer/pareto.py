"""Pareto testing: one part of the data chooses a path through a grid of settings, the other tests along it.

A grid over several settings, such as exit threshold and temperature, has no natural order from safe to risky. Any order
is allowed as long as the losses that test it are not those that chose it.
"""

import math
import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.fixed_point import require_unit_interval

from .arguments import require_arguments
from .fixed_sequence import fixed_sequence_test
from .result import FwerResult


def pareto_path(p_values: ArrayLike, *, costs: ArrayLike) -> tuple[int, ...]:
    """Returns the settings worth testing, safest first, as the first part of the data sees them.

    A setting is left out if another one is at least as good in every p-value and in cost, and better in one of them.

    Args:
      p_values: shape (settings,) or (objectives, settings), each in [0, 1]. From the first part of the data.
      costs: shape (settings,). What to keep low, such as mean layers; from the first part, or known beforehand.

    Returns:
      Places of the settings on the Pareto front, by ascending p-value (the largest over objectives). The first of equal
      settings alone is kept.

    Raises:
      ValueError: If shapes differ, a p-value is NaN or outside [0, 1], or a cost is not finite.

    Source: Laufer-Goldshtein et al. (2023), Efficiently controlling multiple risks with Pareto testing, Algorithm 1.

    >>> pareto_path([0.001, 0.9, 0.004, 0.2], costs=[7.0, 2.0, 5.0, 6.0])
    (0, 2, 1)
    """
    evidence = np.atleast_2d(require_unit_interval(p_values, name="p_values"))
    prices = np.asarray(costs, dtype=np.float64)
    if evidence.ndim != 2 or prices.shape != evidence.shape[1:]:
        raise ValueError(
            "p_values must have shape (settings,) or (objectives, settings) and costs (settings,), got "
            f"{np.shape(p_values)} and {prices.shape}."
        )
    if not np.isfinite(prices).all():
        index = int(np.argmin(np.isfinite(prices)))
        raise ValueError(f"costs[{index}] must be finite, got {float(prices[index])}.")
    # Any strict weak order that puts a dominating setting before those it dominates will do; this one is the path.
    sums = np.array([math.fsum(column) for column in evidence.T])
    order = np.lexsort((prices, sums, evidence.max(axis=0)))
    criteria = np.vstack([evidence, prices])
    path: list[int] = []
    for index in order:
        if not (criteria[:, path] <= criteria[:, [index]]).all(axis=0).any():
            path.append(int(index))
    return tuple(path)


def pareto_test(p_values: ArrayLike, *, epsilon: float, path: Sequence[int]) -> FwerResult:
    """Returns what a fixed sequence test along a path rejects, in the grid's own order.

    Controls the FWER at epsilon if the losses behind `p_values` are independent of those that chose the path.

    Args:
      p_values: shape (..., settings), each in [0, 1]. From the second part of the data, of the settings in their own
        order; for several objectives the largest of each setting's, which is a p-value for "one of the risks exceeds
        its tolerance".
      epsilon: Allowed probability of any false rejection, in (0, 1).
      path: Distinct indices of settings, in testing order, as `pareto_path` returns them.

    Returns:
      Rejected and tested settings, in their own order; those off the path are neither.

    Raises:
      TypeError: If an index is not an integer.
      ValueError: If the path repeats an index or leaves the grid, or as `fixed_sequence_test`.

    Source: Laufer-Goldshtein et al. (2023), Efficiently controlling multiple risks with Pareto testing, Algorithm 1.

    >>> pareto_test([0.01, 0.3, 0.04, 0.0], epsilon=0.05, path=(0, 2, 1)).rejected
    array([ True, False,  True, False])
    """
    checked = require_arguments(p_values, epsilon=epsilon)
    size = checked.shape[-1]
    indices = [operator.index(index) for index in path]
    if len(set(indices)) != len(indices) or not all(0 <= index < size for index in indices):
        raise ValueError(f"path must hold different places in [0, {size}), got {indices}.")
    along = fixed_sequence_test(checked[..., indices], epsilon=epsilon)
    rejected = np.zeros(checked.shape, dtype=bool)
    tested = np.zeros(checked.shape, dtype=bool)
    rejected[..., indices] = along.rejected
    tested[..., indices] = along.tested
    return FwerResult(rejected=rejected, tested=tested)
