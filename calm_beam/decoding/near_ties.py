"""Outputs that another engine, or another batch, might have made otherwise: some decision was within rounding."""

import numpy as np

from calm_beam.exits.measures import Measure, Need
from calm_beam.exits.rule import ExitRule

from .branches import Branches
from .result import PromptResult

NEARNESS = 1e-5
"""How near a confidence comes to a threshold, or to 0 where it is the gap of two probabilities, in a near tie.

Engines and batches move confidences by about 1e-6 (docs/measurements.md).
"""


def tells_near_ties(rule: ExitRule) -> bool:
    """Returns whether near ties of a rule are seen.

    Shares of agreeing layers, and numbers of layers, are not rounded: the tokens behind them may be, which is unseen.
    """
    return _tells(rule.measure())


def near_ties_of(result: PromptResult, branches: Branches, *, thresholds: np.ndarray) -> tuple[bool | None, ...] | None:
    """Returns of each branch's output whether it hung on a near tie, or None where that is not seen; None if of none.

    A decision is a near tie if a confidence that was compared with its threshold, at the exit layer or below, is within
    `NEARNESS` of it. With the gap of the two largest probabilities as the measure, a token is one if that gap is; with
    others, ties of logits are not seen.

    Args:
      result: Of a prompt.
      branches: How exits were decided.
      thresholds: float32, shape (steps, branches); +inf in one of the full model.
    """
    tells = np.array([_tells(measure) for measure in branches.measures])[branches.measure_of]
    if result.runner_ups is None or not tells.any():
        return None
    is_gap = np.array([measure.is_gap for measure in branches.measures])[branches.measure_of]
    at = thresholds.T
    is_token = result.exit_layers > 0
    # Nothing is below a threshold of 0. At the last layer, nothing is compared.
    is_compared = is_token & np.isfinite(at) & (at > 0)
    near = is_compared & (result.exit_layers < branches.layers) & (np.abs(result.confidences - at) <= NEARNESS)
    with np.errstate(invalid="ignore"):
        near |= is_compared & (np.abs(result.runner_ups - at) <= NEARNESS)
    near |= is_gap[:, None] & is_token & (result.confidences <= NEARNESS)
    return tuple(bool(each) if is_told else None for each, is_told in zip(near.any(axis=1), tells, strict=True))


def _tells(measure: Measure) -> bool:
    return measure.needs not in (Need.TOKENS, Need.LAYER, Need.LAST_TOKEN)
