"""What a calibration finds."""

import dataclasses

from calm_beam.manifest import Manifest

from .result import RiskRow


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationOutcome:
    """What a calibration finds, before it is written.

    Attributes:
      manifest: The thresholds with their proof.
      rows: The risk table.
      failures: Id and reason of every example that counts with loss 1, sorted.
    """

    manifest: Manifest
    rows: tuple[RiskRow, ...]
    failures: tuple[tuple[str, str], ...]
