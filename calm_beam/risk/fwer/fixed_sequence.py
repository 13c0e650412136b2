"""Fixed sequence testing: from the safest threshold down, stopping at the first failure."""

import numpy as np
from numpy.typing import ArrayLike

from .arguments import require_arguments
from .result import FwerResult


def fixed_sequence_test(p_values: ArrayLike, *, epsilon: float) -> FwerResult:
    """Returns what is rejected, in order, before the first hypothesis whose p-value exceeds epsilon.

    Controls the chance of any false rejection (the FWER) at epsilon, however the p-values depend on each other and
    without dividing epsilon among them, because a false rejection needs the first true null of the sequence to be
    rejected. It holds only if the order was fixed before the losses were seen.

    Args:
      p_values: shape (..., thresholds), each in [0, 1], in testing order: descending thresholds.
      epsilon: Allowed probability of any false rejection, in (0, 1).

    Returns:
      Rejected are all before the first failure; tested are those and the failure itself.

    Raises:
      ValueError: If `p_values` has no axis or holds NaN or values outside [0, 1] (also behind the first failure), or
        if `epsilon` is out of range.

    Source: CALM Algorithm 1 (calibrating CALM), sec. "Efficient fixed sequence testing"; Bauer (1991).

    >>> fixed_sequence_test([0.001, 0.05, 0.2, 0.01], epsilon=0.05).rejected
    array([ True,  True, False, False])
    """
    checked = require_arguments(p_values, epsilon=epsilon)
    rejected = np.logical_and.accumulate(checked <= epsilon, axis=-1)
    # The first is always looked at, each other one if the one before it was rejected.
    tested = np.ones_like(rejected)
    tested[..., 1:] = rejected[..., :-1]
    return FwerResult(rejected=rejected, tested=tested)
