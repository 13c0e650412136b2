"""The losses of one example: how much an early-exit output loses to the full model's."""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.fixed_point import require_unit_interval
from calm_beam.risk.tails import split_tail


def textual_loss(similarity: ArrayLike) -> np.ndarray:
    """Returns the textual dissimilarity D(Y_early, Y_full) = 1 - m(Y_early, Y_full).

    Args:
      similarity: shape (thresholds,), each in [0, 1]. The metric of the early-exit output at each threshold, with
        the full model's output as its only reference.

    Returns:
      Shape (thresholds,), each in [0, 1]; 0 where the outputs agree in the eyes of the metric.

    Raises:
      ValueError: If a similarity is NaN or outside [0, 1].

    Source: CALM Definition 1 (textual consistency) and Eq. 10 (its loss).

    >>> textual_loss([1.0, 0.75])
    array([0.  , 0.25])
    """
    return np.asarray(1.0 - require_unit_interval(similarity, name="similarity"))


def signed_risk_loss(*, early_score: ArrayLike, full_score: ArrayLike) -> np.ndarray:
    """Returns R(Y_early, Z) - R(Y_full, Z): what exiting early adds to the risk on one example, or takes from it.

    With R = 1 - m the difference of risks is m(Y_full, Z) - m(Y_early, Z), and that is what we compute: one rounding
    instead of three, and equal scores give exactly 0.

    Args:
      early_score: shape (thresholds,), each in [0, 1]. The metric of the early-exit output against the references Z.
      full_score: scalar or shape (thresholds,), in [0, 1]. The metric of the full model's output against the same.

    Returns:
      Shape (thresholds,), each in [-1, 1]. Its expectation is what Definition 2 bounds.

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

    The paper's loss: see `signed_risk_loss` for one that gives no power away.

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
    # The maximum of a signed loss that was checked: it would turn an early score of 1.2 into a loss of 0.
    return np.asarray(np.maximum(0.0, signed_risk_loss(early_score=early_score, full_score=full_score)))


def tail_loss(losses: ArrayLike, *, above: float) -> np.ndarray:
    """Returns whether an output loses more than it may, as 1 and 0.

    Args:
      losses: Of one example, any shape.
      above: A loss that is allowed.

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
      loss: `dissimilarity`, `signed`, `relu`, or the tail of one (`calm_beam.risk.tails`).
      early_score: shape (thresholds,), each in [0, 1]. The metric of the early-exit outputs.
      full_score: scalar or shape (thresholds,), in [0, 1]. That of the full model's output.

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
