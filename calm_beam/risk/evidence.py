"""What a p-value is computed from."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from calm_beam.errors import CalmBeamError
from calm_beam.risk.statistics import Statistic


class EvidenceError(CalmBeamError, ValueError):
    """The losses that were found do not allow the p-value that was planned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was gathered about one loss over the calibration set.

    Attributes:
      n: Number of independent units: examples, or clusters of them.
      sums: For each statistic that was asked for, its sums; shape (thresholds,), int64.
      table: Losses in betting order, shape (n, thresholds), int64 in units of 2^-32; None unless it was asked for.
    """

    n: int
    sums: Mapping[Statistic, np.ndarray]
    table: np.ndarray | None = None
