"""The threshold of every step, where a prompt is decoded at one."""

from collections.abc import Sequence

import numpy as np

from calm_beam.exits.rule import ExitRule
from calm_beam.exits.schedule import scheduled_thresholds


def thresholds_by_step(
    rule: ExitRule,
    threshold: float | None,
    threshold_by_position: Sequence[float] | None = None,
    *,
    max_decode_length: int,
) -> np.ndarray:
    """Returns the threshold of every step: float32, shape (max_decode_length,); +inf if there is none.

    Args:
      rule: Names the schedule.
      threshold: Exit threshold in [0, 1]; None never exits.
      threshold_by_position: What the rule's schedule made of the threshold where it was calibrated; computed here if
        None.
      max_decode_length: Most tokens to generate.

    Raises:
      ValueError: If the threshold is outside [0, 1], or the thresholds by position are not `max_decode_length` numbers
        in [0, 1], or come without a threshold.
    """
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be in [0, 1], or None to never exit; got {threshold}.")
    if threshold_by_position is None:
        if threshold is None:
            return np.full(max_decode_length, np.inf, np.float32)
        return scheduled_thresholds(rule, (threshold,), max_decode_length=max_decode_length)[:, 0]
    if threshold is None or len(threshold_by_position) != max_decode_length:
        raise ValueError(
            f"threshold_by_position must be {max_decode_length} numbers beside a threshold, got "
            f"{len(threshold_by_position)} numbers beside {threshold}."
        )
    if not all(0 <= value <= 1 for value in threshold_by_position):
        raise ValueError(f"threshold_by_position must be numbers in [0, 1], got {list(threshold_by_position)}.")
    return np.array(threshold_by_position, np.float32)
