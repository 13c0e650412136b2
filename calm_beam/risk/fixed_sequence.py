"""Fixed sequence testing: from the safest threshold down, stopping at the first failure."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedSequenceResult:
    """How far down the sequence the test came.

    Attributes:
      num_rejected: How many hypotheses were rejected: the first `num_rejected` thresholds are safe, the last of them
        is the choice. 0 means that no threshold is safe, which is a result: never exit.
      num_tested: How many were looked at: the rejected ones and the first failure, if there was one.
    """

    num_rejected: int
    num_tested: int


def fixed_sequence_test(p_values: ArrayLike, *, epsilon: float) -> FixedSequenceResult:
    """Returns how many hypotheses are rejected, in order, before the first whose p-value exceeds epsilon.

    Controls the chance of any false rejection (the FWER) at epsilon, however the p-values depend on each other and
    without dividing epsilon among them, because a false rejection needs the first true null of the sequence to be
    rejected. It holds only if the order was fixed before the losses were seen.

    Args:
      p_values: shape (thresholds,), each in [0, 1], in testing order: descending thresholds.
      epsilon: Allowed probability of any false rejection, in (0, 1).

    Returns:
      The numbers of hypotheses rejected and tested.

    Raises:
      ValueError: If `p_values` is not one-dimensional or holds NaN or values outside [0, 1] (also behind the first
        failure), or if `epsilon` is out of range.

    Source: CALM Algorithm 1 (calibrating CALM), sec. "Efficient fixed sequence testing"; Bauer (1991).

    >>> fixed_sequence_test([0.001, 0.05, 0.2, 0.01], epsilon=0.05)
    FixedSequenceResult(num_rejected=2, num_tested=3)
    """
    if not 0 < epsilon < 1:
        raise ValueError(
            f"epsilon must be in (0, 1), got {epsilon}. It is a probability: for 95 % confidence pass epsilon=0.05."
        )
    checked = np.asarray(p_values, dtype=np.float64)
    if checked.ndim != 1:
        raise ValueError(f"p_values must have shape (thresholds,), got {checked.shape}.")
    is_inside = (checked >= 0) & (checked <= 1)
    if not is_inside.all():
        place = int(np.argmin(is_inside))
        raise ValueError(f"p_values[{place}] must be in [0, 1], got {float(checked[place])}.")
    failures = np.flatnonzero(checked > epsilon)
    if failures.size == 0:
        return FixedSequenceResult(num_rejected=checked.size, num_tested=checked.size)
    first_failure = int(failures[0])
    return FixedSequenceResult(num_rejected=first_failure, num_tested=first_failure + 1)
