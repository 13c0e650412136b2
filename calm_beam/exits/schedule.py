"""The threshold at each decoding step."""

import numpy as np

from calm_beam.risk import elementary

from .rule import ExitRule
from .schedules import SCHEDULES


def threshold_factors(rule: ExitRule, max_decode_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the schedule as numbers: the threshold at step t is clip(scale[t] * threshold + shift[t], 0, 1).

    Args:
      rule: Names the schedule and its tau.
      max_decode_length: N, the largest number of generated tokens.

    Returns:
      `scale` and `shift`, float64, each of shape (N,), with the same bits on every machine. Step 0 is the first
      generated token.

    Source: CALM Eq. 5 (decaying threshold), and the formula in the released T5X code; see `SCHEDULES`.
    """
    decay = np.zeros(max_decode_length)
    if rule.tau is not None:
        decay = 0.1 * elementary.exp(-rule.tau * np.arange(max_decode_length) / max_decode_length)
    scale, shift = SCHEDULES[rule.schedule].factors(decay)
    return scale + np.zeros(max_decode_length), shift + np.zeros(max_decode_length)


def scheduled_thresholds(rule: ExitRule, thresholds: tuple[float, ...], *, max_decode_length: int) -> np.ndarray:
    """Returns the float32 threshold of every step, shape (max_decode_length, thresholds).

    Rounded to float32 last, since confidences are float32 and ties matter.
    """
    scale, shift = threshold_factors(rule, max_decode_length)
    exact = scale[:, None] * np.asarray(thresholds, np.float64)[None] + shift[:, None]
    return np.asarray(np.clip(exact, 0, 1), np.float32)
