"""Objectives of the exit classifier: weights of its decisions in the loss.

Both objectives are weighted sums of binary cross-entropies, one a token and layer: the classifier says "exit" or "don't
exit", and the oracle whether the layer predicts what the last one does.
"""

import numpy as np

OBJECTIVES = ("independent", "geometric")


def independent_weights(agrees: np.ndarray) -> np.ndarray:
    """Returns weights by which every layer counts alike, whatever the layers below it have said.

    Args:
      agrees: bool, shape (layers - 1, tokens). Whether each layer but the last predicts what the last does.

    Returns:
      float64, shape of `agrees`. The loss of a token is the weighted sum over layers, of its average.

    Source: CALM, "Local confidence measures" (early exit classifier), and appendix "Training Details of the Early Exit
      Classifier" (unweighted average across layers).
    """
    return np.full(agrees.shape, 1 / len(agrees))


def balanced_weights(agrees: np.ndarray) -> np.ndarray:
    """Returns independent weights times 1 - the share of the decision's class, within each layer.

    Args:
      agrees: As in `independent_weights`, of one batch.

    Returns:
      float64, shape of `agrees`. A layer where all tokens agree, or none does, has nothing to tell: its weights are 0.

    Source: the released T5X code, `contrib/calm/models.py`; the paper does not speak of it.
    """
    share = agrees.mean(axis=1, keepdims=True)
    weights: np.ndarray = independent_weights(agrees) * np.where(agrees, 1 - share, share)
    return weights


def geometric_weights(agrees: np.ndarray) -> np.ndarray:
    """Returns weights by which a token's loss is minus the log-probability of exiting where the oracle first would.

    That is the sum over all layers below of log "don't exit", and of log "exit" at the layer itself. The last layer
    always agrees, and nothing is decided there, so it adds no term (in the released T5X code it does).

    Args:
      agrees: As in `independent_weights`.

    Returns:
      float64, shape of `agrees`: 1 up to the first layer that agrees, 0 above.

    Source: Elbayad et al. (2020), section 3.2 (geometric-like); CALM, appendix "Training Details of the Early Exit
      Classifier".
    """
    earlier = np.cumsum(agrees, axis=0) - agrees
    return np.asarray(earlier == 0, np.float64)


def decision_losses(margins: np.ndarray, agrees: np.ndarray) -> np.ndarray:
    """Returns the binary cross-entropy of every decision.

    Args:
      margins: float64, any shape. Log-odds of "exit".
      agrees: bool, same shape. The right decisions.

    Returns:
      float64, same shape, in nats.
    """
    return np.logaddexp(0.0, np.where(agrees, -margins, margins))
