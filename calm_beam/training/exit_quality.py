"""How well an exit classifier tells the layers that agree with the last one from those that do not."""

import dataclasses

import numpy as np
import scipy.stats


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
