"""The threshold at each decoding step."""

import numpy as np

from calm_beam import elementary

from .rule import ExitRule


def threshold_factors(rule: ExitRule, max_decode_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the schedule as numbers: the threshold at step t is clip(scale[t] * threshold + shift[t], 0, 1).

    Args:
      rule: Names the schedule and its tau.
      max_decode_length: N, the largest number of generated tokens.

    Returns:
      `scale` and `shift`, float64, each of shape (N,), with the same bits on every machine. Step 0 is the first
      generated token.

    Source: CALM Eq. 5 (decaying threshold): clip(0.9 threshold + 0.1 exp(-tau t / N)). The released T5X code holds
    another formula, threshold (0.9 + 0.1 exp(-tau t / N)), offered as `decay_t5x`. As released, its sampler never
    passes the position, so that t is always 0: whatever its tau, that code decodes with a constant threshold. To repeat
    what it does, take `constant`.
    """
    steps = np.arange(max_decode_length)
    if rule.schedule == "constant":
        return np.ones(max_decode_length), np.zeros(max_decode_length)
    assert rule.tau is not None
    decay = 0.1 * elementary.exp(-rule.tau * steps / max_decode_length)
    if rule.schedule == "decay":
        return np.full(max_decode_length, 0.9), decay
    return 0.9 + decay, np.zeros(max_decode_length)


def scheduled_thresholds(rule: ExitRule, thresholds: tuple[float, ...], *, max_decode_length: int) -> np.ndarray:
    """Returns the float32 threshold of every step, shape (max_decode_length, thresholds).

    Rounded to float32 last, since confidences are float32 and ties matter.
    """
    scale, shift = threshold_factors(rule, max_decode_length)
    exact = scale[:, None] * np.asarray(thresholds, np.float64)[None] + shift[:, None]
    return np.asarray(np.clip(exact, 0, 1), np.float32)
