"""Fixed sequence testing from several starting points, for risks that fail early and recover."""

import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from .arguments import require_arguments
from .fixed_sequence import fixed_sequence_test
from .result import FwerResult

_DEFAULT_STARTS = 4


def multi_start_test(p_values: ArrayLike, *, epsilon: float, starts: Sequence[int] | None = None) -> FwerResult:
    """Returns what fixed sequence tests from several starting points reject, each at its share of epsilon.

    Every test runs to its own first failure, through later starting points too. One early failure then does not hide
    the rest of the grid; the price is that every p-value has to be as small as epsilon divided by the number of
    starting points. Controls the FWER at epsilon however the p-values depend on each other (union bound over the
    tests), if order and starting points were fixed before the losses were seen.

    Args:
      p_values: shape (..., thresholds), each in [0, 1], in testing order.
      epsilon: Allowed probability of any false rejection, in (0, 1).
      starts: Places at which tests start, distinct, each in [0, thresholds). None spreads up to four evenly, the first
        at 0.

    Returns:
      Rejected and tested by any of the tests.

    Raises:
      TypeError: If a start is not an integer.
      ValueError: If `starts` is empty, repeats an index or leaves the sequence, or as `fixed_sequence_test`.

    Source: Angelopoulos et al. (2021), Learn then Test, Algorithm 1 (fixed sequence testing; J are our starts).

    >>> multi_start_test([0.3, 0.01, 0.02, 0.03], epsilon=0.05, starts=[0, 1]).rejected
    array([False,  True,  True, False])
    """
    checked = require_arguments(p_values, epsilon=epsilon)
    size = checked.shape[-1]
    indices = _even_starts(size) if starts is None else _checked_starts(starts, size)
    rejected = np.zeros(checked.shape, dtype=bool)
    tested = np.zeros(checked.shape, dtype=bool)
    for start in indices:
        part = fixed_sequence_test(checked[..., start:], epsilon=epsilon / len(indices))
        rejected[..., start:] |= part.rejected
        tested[..., start:] |= part.tested
    return FwerResult(rejected=rejected, tested=tested)


def _even_starts(size: int) -> list[int]:
    count = min(_DEFAULT_STARTS, size)
    return [index * size // count for index in range(count)]


def _checked_starts(starts: Sequence[int], size: int) -> list[int]:
    indices = [operator.index(start) for start in starts]
    if not indices or len(set(indices)) != len(indices) or not all(0 <= index < size for index in indices):
        raise ValueError(f"starts must be one or more different places in [0, {size}), got {indices}.")
    return indices
