"""Outputs that another engine, or another batch, might have made otherwise: some decision was within rounding."""

import numpy as np

from .branches import Branches
from .result import NearTies, PromptResult

NEARNESS = 1e-5
"""How near a confidence comes to a threshold, or to 0 where it is the gap of two probabilities, in a near tie.

Engines and batches move confidences by about 1e-6 (docs/measurements.md).
"""


def near_ties_of(result: PromptResult, branches: Branches, *, thresholds: np.ndarray) -> NearTies | None:
    """Returns of each branch's output whether it hung on a near tie, or None where that is not seen; None if of none.

    A decision is a near tie if a confidence that was compared with its threshold, at the exit layer or below, is within
    `NEARNESS` of it. With the gap of the two largest probabilities as the measure, a token is one if that gap is; with
    others, ties of logits are not seen.

    Args:
      result: Of a prompt.
      branches: How exits were decided.
      thresholds: float32, shape (steps, branches); +inf in one of the full model.
    """
    is_seen = branches.sees_near_ties
    if result.max_rejected_confidence is None or not is_seen.any():
        return None
    at, is_token = thresholds.T, result.exit_layers > 0
    # At the last layer nothing is compared, and nothing is below a threshold of 0. Nothing is near +inf.
    near = (np.abs(result.confidences - at) <= NEARNESS) & (result.exit_layers < branches.layers)
    near |= np.abs(result.max_rejected_confidence - at) <= NEARNESS
    near &= is_token & (at > 0)
    near |= branches.is_gap[:, None] & is_token & (result.confidences <= NEARNESS)
    return tuple(told if seen else None for told, seen in zip(near.any(axis=1).tolist(), is_seen.tolist(), strict=True))
