"""Outputs that another engine, or another batch, might have made otherwise: some decision was within rounding."""

import numpy as np

from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule

from .result import SweepResult

NEARNESS = 1e-5
"""How near a confidence comes to a threshold, or to 0 where it is the gap of two probabilities, in a near tie.

Engines and batches move confidences by about 1e-6 (docs/measurements.md).
"""


def tells_near_ties(rule: ExitRule) -> bool:
    """Returns whether near ties of a rule are seen.

    Shares of agreeing layers, and numbers of layers, are not rounded: the tokens behind them may be, which is unseen.
    """
    return rule.measure().needs not in (Need.TOKENS, Need.LAYER, Need.LAST_TOKEN)


def near_ties_of(result: SweepResult, rule: ExitRule, *, thresholds: np.ndarray, num_layers: int) -> np.ndarray | None:
    """Returns which outputs hung on a near tie, bool, shape (lanes,); None where that is not known.

    A decision is a near tie if a confidence that was compared with its threshold, at the exit layer or below, is within
    `NEARNESS` of it. With the gap of the two largest probabilities as the measure, a token is one if that gap is; with
    others, ties of logits are not seen.

    Args:
      result: Of a prompt.
      rule: How exits were decided.
      thresholds: float32, shape (steps, lanes); +inf in a lane of the full model.
      num_layers: Of the decoder: at the last, nothing is compared.
    """
    if result.runner_ups is None or not tells_near_ties(rule):
        return None
    at = thresholds.T
    is_token = result.exit_layers > 0
    # Nothing is below a threshold of 0.
    is_compared = is_token & np.isfinite(at) & (at > 0)
    near = is_compared & (result.exit_layers < num_layers) & (np.abs(result.confidences - at) <= NEARNESS)
    with np.errstate(invalid="ignore"):
        near |= is_compared & (np.abs(result.runner_ups - at) <= NEARNESS)
    if rule.confidence == "softmax":
        near |= is_token & (result.confidences <= NEARNESS)
    found: np.ndarray = near.any(axis=1)
    return found
