"""Exit thresholds: grids in the order of testing, and the thresholds of each decoding step."""

import itertools
from collections.abc import Iterable
from decimal import Decimal

import numpy as np

from calm_beam.risk import elementary

from .rule import ExitRule
from .schedules import SCHEDULES

# A finer grid is refused, since every threshold is decoded for every prompt.
_FINEST_STEP = 0.001


def descending_grid(thresholds: Iterable[float]) -> tuple[float, ...]:
    """Returns thresholds in the order of testing: strictly descending.

    Args:
      thresholds: At least one, in any order.

    Raises:
      ValueError: If there is none, one is outside [0, 1] or NaN, or two are equal in float32, the type in which
        confidences are compared.
    """
    grid = tuple(sorted((float(threshold) for threshold in thresholds), reverse=True))
    if not grid:
        raise ValueError("thresholds must not be empty.")
    for threshold in grid:
        if not 0 <= threshold <= 1:
            raise ValueError(f"thresholds must be in [0, 1], got {threshold}.")
    for upper, lower in itertools.pairwise(grid):
        if np.float32(upper) == np.float32(lower):
            raise ValueError(f"thresholds must be distinct in float32, got {upper} and {lower}.")
    return grid


def uniform_grid(step: float) -> tuple[float, ...]:
    """Returns the multiples of `step` below 1, descending to 0.

    1 itself is left out: since "never exit" is always the fallback, it would cost a full decode for almost no gain.
    `--thresholds` takes any grid.

    Args:
      step: In [0.001, 1).

    Raises:
      ValueError: If the step is outside that range.

    >>> uniform_grid(0.25)
    (0.75, 0.5, 0.25, 0.0)
    """
    if not _FINEST_STEP <= step < 1:
        raise ValueError(
            f"grid_step must be in [{_FINEST_STEP}, 1), got {step}. It is the distance of two thresholds, e.g. 0.05."
        )
    # In decimal, so that the grid holds 0.15 and not 0.15000000000000002.
    exact = Decimal(repr(float(step)))
    multiples = [index * exact for index in range(int(1 / exact) + 1)]
    return tuple(float(value) for value in reversed(multiples) if np.float32(value) < 1)


def threshold_factors(rule: ExitRule, max_decode_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale and shift of a schedule: the threshold at step t is clip(scale[t] * threshold + shift[t], 0, 1).

    Args:
      rule: A rule, which names the schedule and its tau.
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

    Rounding to float32 comes last, since confidences are float32 and ties matter.
    """
    scale, shift = threshold_factors(rule, max_decode_length)
    exact = scale[:, None] * np.asarray(thresholds, np.float64)[None] + shift[:, None]
    return np.asarray(np.clip(exact, 0, 1), np.float32)
