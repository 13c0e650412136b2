"""What fresh data have said of the promises of a manifest."""

import dataclasses
from typing import Any

from calm_beam.calibration.anytime import AnytimeEvidence
from calm_beam.calibration.verification import FreshLosses, Verdict
from calm_beam.manifest import Calibration, Manifest, SettingCalibration, SettingManifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """What became of a test of promises.

    Attributes:
      manifest: Whose promises they are.
      alpha: Chance of calling any of them broken that is kept.
      verdicts: On every promise that was tested; none where none is made.
      evidence: Of all runs, where they count together.
    """

    manifest: Manifest | SettingManifest
    alpha: float
    verdicts: tuple[Verdict[Any], ...] = ()
    evidence: AnytimeEvidence | None = None

    @property
    def is_broken(self) -> bool:
        """Whether a promise is proved broken."""
        return any(verdict.is_broken for verdict in self.verdicts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedThresholds(Verified):
    """What fresh outputs of a model have said.

    Attributes:
      metrics: Those whose entries were asked for; None for all.
      fresh: The losses, of each way of decoding; none where there was nothing to test.
      others: Promises of other metrics, which were not tested.
    """

    manifest: Manifest
    verdicts: tuple[Verdict[Calibration], ...] = ()
    metrics: tuple[str, ...] | None = None
    fresh: tuple[FreshLosses, ...] = ()
    others: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedSettings(Verified):
    """What fresh losses, or scores, have said.

    Attributes:
      examples: How many there were; 0 where there was nothing to test.
    """

    manifest: SettingManifest
    verdicts: tuple[Verdict[SettingCalibration], ...] = ()
    examples: int = 0
