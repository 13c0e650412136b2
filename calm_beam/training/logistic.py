"""The fit of an exit classifier, and how well it tells the layers that agree with the last one from those that do not.

The fit is weighted logistic regression by Newton's method. The loss is convex and has a few hundred weights: a handful
of Newton steps reach its one minimum, with no learning rate to choose, whatever the scales of the features are.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.linalg
import scipy.stats

from calm_beam.training.exit_objective import decision_losses

# Makes the minimum unique, also where the classes can be separated or there is only one.
_RIDGE = 1e-6
# In nats; half the Newton decrement bounds how far the loss is from its minimum.
_TOLERANCE = 1e-9
_MOST_STEPS = 50
_SMALLEST_STEP = 2.0**-20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of a regression.

    Attributes:
      features: float32, shape (rows, width).
      labels: bool, shape (rows,).
      weights: float64, shape (rows,), at least 0.
    """

    features: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticFit:
    """Log-odds of a label: features @ kernel + bias.

    Attributes:
      kernel: float64, shape (width,).
      bias: The constant.
      steps: Newton steps that were taken.
    """

    kernel: np.ndarray
    bias: float
    steps: int


def fit_logistic(batches: Sequence[Rows]) -> LogisticFit:
    """Returns the weights with the least weighted mean cross-entropy.

    Features are standardised for the fit, and the result folded back, so it is for features as they came.

    Args:
      batches: All rows; at least one row has a positive weight, and all features are finite.

    Source: iteratively reweighted least squares, that is Newton's method, with step halving.
    """
    center, scale = _moments(batches)
    total = sum(batch.weights.sum() for batch in batches)
    weights = np.zeros(len(center) + 1)
    loss, gradient, hessian = _derivatives(batches, weights, center=center, scale=scale, total=total)
    steps = 0
    while steps < _MOST_STEPS:
        direction = scipy.linalg.solve(hessian, gradient, assume_a="pos")
        decrement = gradient @ direction
        if decrement / 2 <= _TOLERANCE:
            break
        size = 1.0
        while size >= _SMALLEST_STEP:
            candidate = weights - size * direction
            new = _derivatives(batches, candidate, center=center, scale=scale, total=total)
            if new[0] <= loss - 1e-4 * size * decrement:
                break
            size /= 2
        weights, (loss, gradient, hessian) = candidate, new
        steps += 1
    kernel = weights[:-1] / scale
    return LogisticFit(kernel=kernel, bias=float(weights[-1] - center @ kernel), steps=steps)


def _moments(batches: Sequence[Rows]) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation of every feature; 1 where it does not vary."""
    rows = sum(len(batch.features) for batch in batches)
    center = sum(batch.features.sum(axis=0, dtype=np.float64) for batch in batches) / rows
    variance = sum(np.square(batch.features - center).sum(axis=0) for batch in batches) / rows
    return center, np.where(variance > 0, np.sqrt(variance), 1.0)


def _derivatives(
    batches: Sequence[Rows], weights: np.ndarray, *, center: np.ndarray, scale: np.ndarray, total: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """Returns the loss at given weights of the standardised features and a constant, its gradient and its Hessian."""
    loss, gradient, hessian = 0.0, np.zeros_like(weights), np.zeros((len(weights), len(weights)))
    for batch in batches:
        inputs = np.concatenate([(batch.features - center) / scale, np.ones((len(batch.features), 1))], axis=1)
        margins = inputs @ weights
        probabilities = 0.5 * (1 + np.tanh(margins / 2))
        loss += batch.weights @ decision_losses(margins, batch.labels)
        gradient += (batch.weights * (probabilities - batch.labels)) @ inputs
        curvature = batch.weights * probabilities * (1 - probabilities)
        hessian += inputs.T @ (curvature[:, None] * inputs)
    # The penalty is on the mean loss.
    loss = loss / total + _RIDGE / 2 * (weights @ weights)
    return loss, gradient / total + _RIDGE * weights, hessian / total + _RIDGE * np.eye(len(weights))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitQuality:
    """The classifier's quality at one layer.

    Attributes:
      agreeing: Share of tokens at which the layer predicts what the last one does.
      f1: F1 of "don't exit", as `f1_not_exiting` says.
      auc: As `area_under_curve` says.
    """

    agreeing: float
    f1: float
    auc: float


def exit_quality(scores: np.ndarray, agrees: np.ndarray) -> tuple[ExitQuality, ...]:
    """Returns the quality at every layer but the last.

    Args:
      scores: Shape (layers - 1, tokens), at least one token. The classifier's probabilities of "exit".
      agrees: bool, same shape. Whether the layer predicts what the last one does.
    """
    return tuple(
        ExitQuality(
            agreeing=float(labels.mean()), f1=f1_not_exiting(values, labels), auc=area_under_curve(values, labels)
        )
        for values, labels in zip(scores, agrees, strict=True)
    )


def f1_not_exiting(scores: np.ndarray, agrees: np.ndarray) -> float:
    """Returns the F1 of "don't exit" (score below 1/2) against the oracle (the layer disagrees with the last).

    Args:
      scores: Shape (tokens,).
      agrees: bool, shape (tokens,).

    Returns:
      2 TP / (2 TP + FP + FN), in [0, 1]; NaN where no token disagrees and none is predicted to.

    Source: CALM, appendix "Training Details of the Early Exit Classifier" (table of F1 scores).

    >>> f1_not_exiting(np.array([0.1, 0.2, 0.7, 0.9]), np.array([False, True, False, True]))
    0.5
    """
    stays = scores < 0.5
    hits = np.count_nonzero(stays & ~agrees)
    named = np.count_nonzero(stays) + np.count_nonzero(~agrees)
    return float(2 * hits / named) if named else float("nan")


def area_under_curve(scores: np.ndarray, agrees: np.ndarray) -> float:
    """Returns the chance that a token that agrees scores higher than one that does not; ties count half.

    Args:
      scores: Shape (tokens,).
      agrees: bool, shape (tokens,).

    Returns:
      In [0, 1]; NaN where all tokens agree or none does.

    Source: Mann-Whitney U.

    >>> area_under_curve(np.array([0.1, 0.2, 0.7, 0.9]), np.array([False, True, False, True]))
    0.75
    """
    positives = np.count_nonzero(agrees)
    pairs = positives * (len(agrees) - positives)
    if not pairs:
        return float("nan")
    ranks = scipy.stats.rankdata(scores)
    return float((ranks[agrees].sum() - positives * (positives + 1) / 2) / pairs)
