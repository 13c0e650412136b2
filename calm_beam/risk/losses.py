"""The losses of one example, and losses as checked integers.

A loss is how much an early-exit output loses to the full model's. Scores and losses have to lie in the range on which
the guarantee rests; that is checked here, and nowhere else.

Sums of losses do not depend on the order in which workers add them. Float addition is not associative, and a threshold
may depend on the last digit of a sum. A loss is therefore rounded to a multiple of 2^-32 and added in int64. Rounding
always goes up: a bound on the larger loss is a bound on the loss itself, so the guarantee survives the rounding
exactly, at a price of at most 2.4e-10 in risk.
"""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.rules import split_tail

_FRACTION_BITS = 32
LOSS_SCALE = 2**_FRACTION_BITS


def require_unit_interval(values: ArrayLike, *, name: str) -> np.ndarray:
    """Returns `values` as float64, after checking that each lies in [0, 1].

    Args:
      values: Any shape.
      name: Name of the values for the message, as the caller wrote it.

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
    """Returns `values` as float64, after checking that each lies in [-1, 1].

    Args:
      values: Any shape.
      name: Name of the values for the message, as the caller wrote it.

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
    # Written this way because every comparison with NaN is false.
    is_inside = (checked >= low) & (checked <= 1)
    if not is_inside.all():
        index = tuple(int(i) for i in np.argwhere(~is_inside)[0])
        where = f"{name}[{', '.join(map(str, index))}]" if index else name
        raise ValueError(
            f"{where} must be in [{low}, 1], got {float(checked[index])}. "
            "The bounds hold for values in that range only: normalize the metric first."
        )
    return checked


def to_fixed_point(losses: ArrayLike) -> np.ndarray:
    """Returns losses in units of 2^-32, rounded up.

    Args:
      losses: Any shape, each in [0, 1].

    Returns:
      The same shape, int64, each in [0, LOSS_SCALE]: the least k with k / LOSS_SCALE >= loss.

    Raises:
      ValueError: If a loss is NaN or outside [0, 1].

    Source: ours; see the module docstring.

    >>> to_fixed_point([0.0, 0.25, 1e-300, 1.0])
    array([         0, 1073741824,          1, 4294967296])
    """
    return _rounded_up(require_unit_interval(losses, name="losses"))


def to_signed_fixed_point(losses: ArrayLike) -> np.ndarray:
    """Returns signed losses in units of 2^-32, rounded up.

    Args:
      losses: Any shape, each in [-1, 1].

    Returns:
      The same shape, int64, each in [-LOSS_SCALE, LOSS_SCALE]: the least k with k / LOSS_SCALE >= loss.

    Raises:
      ValueError: If a loss is NaN or outside [-1, 1].

    Source: ours; see the module docstring.

    >>> to_signed_fixed_point([-1.0, -1e-300, 0.25])
    array([-4294967296,           0,  1073741824])
    """
    return _rounded_up(require_signed_unit_interval(losses, name="losses"))


def squares_upper(fixed_losses: np.ndarray) -> np.ndarray:
    """Returns the squares of losses in units of 2^-32, rounded up.

    Args:
      fixed_losses: Any shape, int64 in units of 2^-32, each in [0, LOSS_SCALE].

    Returns:
      The same shape, int64, each in [0, LOSS_SCALE] and never above the loss itself.

    Source: ours; see the module docstring.

    >>> squares_upper(to_fixed_point([0.0, 1e-300, 0.5, 1.0]))
    array([         0,          1, 1073741824, 4294967296])
    """
    # Only the square of LOSS_SCALE itself, 2^64, does not fit into 64 bits; there it is replaced at the end.
    full = fixed_losses.astype(np.uint64) ** 2
    squares = (full >> np.uint64(_FRACTION_BITS)).astype(np.int64) + (full & np.uint64(LOSS_SCALE - 1) != 0)
    return np.asarray(np.where(fixed_losses == LOSS_SCALE, LOSS_SCALE, squares))


def loss_sum_upper(totals: ArrayLike) -> np.ndarray:
    """Returns the least float64 that is at least the loss sum.

    Args:
      totals: Any shape, integers: sums of `to_fixed_point` or `to_signed_fixed_point` values.

    Returns:
      The same shape, float64. Exact while the total is below 2^53 (a loss sum below 2,097,152), rounded up beyond.
      Rounding never passes an integer, so `np.ceil` of the result is the ceiling of the exact sum.

    Raises:
      TypeError: If `totals` does not hold integers.
      ValueError: If a total is outside the int64 range.

    Source: ours; see the module docstring.

    >>> loss_sum_upper([3 * LOSS_SCALE // 2, 2**53 + 1]) * LOSS_SCALE
    array([6.44245094e+09, 9.00719925e+15])
    >>> int(loss_sum_upper(2**53 + 1) * LOSS_SCALE) - 2**53
    2
    """
    checked = _require_totals(totals)
    nearest = checked.astype(np.float64)
    # 2^63 does not fit back into int64, but no total exceeds it: there the nearest float already lies above.
    fits = nearest < 2.0**63
    was_rounded_down = fits & (np.where(fits, nearest, 0).astype(np.int64) < checked)
    # Dividing by a power of two is exact.
    return np.asarray(np.where(was_rounded_down, np.nextafter(nearest, np.inf), nearest) / LOSS_SCALE)


def _rounded_up(losses: np.ndarray) -> np.ndarray:
    # Multiplying by a power of two is exact (only the exponent moves), so `ceil` sees the true value.
    return np.asarray(np.ceil(losses * LOSS_SCALE).astype(np.int64))


def _require_totals(totals: ArrayLike) -> np.ndarray:
    """Returns the totals as int64, checked."""
    given = np.asarray(totals)
    if given.dtype.kind not in "iu":
        raise TypeError(f"totals must be integers (sums of to_fixed_point values), got dtype {given.dtype}.")
    is_outside = given > np.iinfo(np.int64).max
    if is_outside.any():
        raise ValueError(f"totals must be in [-2^63, 2^63), got {int(given[is_outside].flat[0])}.")
    return given.astype(np.int64)


def textual_loss(similarity: ArrayLike) -> np.ndarray:
    """Returns the textual dissimilarity D(Y_early, Y_full) = 1 - m(Y_early, Y_full).

    Args:
      similarity: shape (thresholds,), each in [0, 1]. The metric of the early-exit output at each threshold, with
        the full model's output as its only reference.

    Returns:
      Shape (thresholds,), each in [0, 1]; 0 where the outputs agree under the metric.

    Raises:
      ValueError: If a similarity is NaN or outside [0, 1].

    Source: CALM Definition 1 (textual consistency) and Eq. 10 (its loss).

    >>> textual_loss([1.0, 0.75])
    array([0.  , 0.25])
    """
    return np.asarray(1.0 - require_unit_interval(similarity, name="similarity"))


def signed_risk_loss(*, early_score: ArrayLike, full_score: ArrayLike) -> np.ndarray:
    """Returns R(Y_early, Z) - R(Y_full, Z): the change in risk on one example from exiting early.

    With R = 1 - m the difference of risks is m(Y_full, Z) - m(Y_early, Z), which is computed: one rounding
    instead of three, and equal scores give exactly 0.

    Args:
      early_score: shape (thresholds,), each in [0, 1]. The metric of the early-exit output against the references Z.
      full_score: scalar or shape (thresholds,), in [0, 1]. The metric of the full model's output against the same.

    Returns:
      Shape (thresholds,), each in [-1, 1]. Definition 2 bounds its expectation.

    Raises:
      ValueError: If a score is NaN or outside [0, 1].

    Source: CALM Definition 2 (risk consistency).

    >>> signed_risk_loss(early_score=[0.5, 0.25, 1.0], full_score=0.5)
    array([ 0.  ,  0.25, -0.5 ])
    """
    early = require_unit_interval(early_score, name="early_score")
    full = require_unit_interval(full_score, name="full_score")
    return np.asarray(full - early)


def relu_risk_loss(*, early_score: ArrayLike, full_score: ArrayLike) -> np.ndarray:
    """Returns max(0, R(Y_early, Z) - R(Y_full, Z)): the risk added by exiting early, on one example.

    This is the paper's loss; `signed_risk_loss` gives no power away.

    Args:
      early_score: shape (thresholds,), each in [0, 1]. The metric of the early-exit output against the references Z.
      full_score: scalar or shape (thresholds,), in [0, 1]. The metric of the full model's output against the same.

    Returns:
      Shape (thresholds,), each in [0, 1]. Examples on which the early exit does better count 0, not less: the paper
      gives that power away to keep the loss in [0, 1].

    Raises:
      ValueError: If a score is NaN or outside [0, 1].

    Source: CALM Definition 2 (risk consistency) and Eq. 11 (its loss).

    >>> relu_risk_loss(early_score=[0.5, 0.25, 1.0], full_score=0.5)
    array([0.  , 0.25, 0.  ])
    """
    # The signed loss is checked first: the maximum alone would turn an early score of 1.2 into a loss of 0.
    return np.asarray(np.maximum(0.0, signed_risk_loss(early_score=early_score, full_score=full_score)))


def tail_loss(losses: ArrayLike, *, above: float) -> np.ndarray:
    """Returns 1 where an output's loss exceeds a bound, and 0 elsewhere.

    Args:
      losses: Losses of one example, any shape.
      above: The bound: the largest loss that is allowed.

    Returns:
      float64, shape of `losses`. Its expectation is the share of outputs that lose more.

    Source: ours; the risk that Learn then Test controls may be of any loss (Angelopoulos et al., 2021).

    >>> tail_loss([0.0, 0.3, 0.4], above=0.3)
    array([0., 0., 1.])
    """
    return np.asarray(np.asarray(losses) > above, np.float64)


def losses_of_scores(loss: str, *, early_score: ArrayLike, full_score: ArrayLike) -> np.ndarray:
    """Returns one example's losses by name.

    Args:
      loss: `dissimilarity`, `signed`, `relu`, or the tail of one (`calm_beam.risk.rules`).
      early_score: shape (thresholds,), each in [0, 1]. The metric of the early-exit outputs.
      full_score: scalar or shape (thresholds,), in [0, 1]. The metric of the full model's output.

    Returns:
      Shape (thresholds,).

    Raises:
      ValueError: If a score is NaN or outside [0, 1], or there is no such loss.
    """
    name, above = split_tail(loss)
    match name:
        case "dissimilarity":
            losses = textual_loss(early_score)
        case "signed":
            losses = signed_risk_loss(early_score=early_score, full_score=full_score)
        case "relu":
            losses = relu_risk_loss(early_score=early_score, full_score=full_score)
        case _:
            raise ValueError(f"there is no loss {loss!r}.")
    return losses if above is None else tail_loss(losses, above=above)
