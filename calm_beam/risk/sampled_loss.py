"""The loss of a sampled request, with the promise that it is about, and the order in which losses are watched.

The capital that watches losses depends on their order, and so does its promise: who lets large losses come first sees
alarms that mean nothing. A hash of the ids is an order that knows nothing of losses, is the same wherever they were
measured, and whichever came first.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from calm_beam.manifest import Calibration, ExternalCalibration, ExternalManifest, Manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedPromise:
    """An entry of a manifest, as far as losses are held against it.

    Attributes:
      manifest: The manifest's digest.
      calibration: The entry's place in it.
      group: Group that it is about; None for all prompts.
      delta: Risk tolerance, in (0, 1).
      is_signed: Whether losses lie in [-1, 1] and not in [0, 1].
    """

    manifest: str
    calibration: int
    group: str | None
    delta: float
    is_signed: bool

    @classmethod
    def of(cls, manifest: "Manifest | ExternalManifest", entry: "Calibration | ExternalCalibration") -> Self:
        """Returns what is watched of an entry."""
        return cls(
            manifest=manifest.digest,
            calibration=manifest.calibrations.index(entry),
            group=entry.group,
            delta=entry.delta,
            is_signed=entry.is_signed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledLoss:
    """The loss of a sampled request.

    Attributes:
      id: Of the request.
      value: The loss; 1 if it is missing.
      failure: Why it is missing, as it was not measured; None if it was.
      promise: What it is about.
    """

    id: str
    value: float
    failure: str | None
    promise: WatchedPromise

    @property
    def measured(self) -> float | None:
        """The loss as `RiskMonitor` takes it; None if it is missing."""
        return self.value if self.failure is None else None

    def to_row(self) -> dict[str, Any]:
        """Returns the loss as `calm-beam monitor` reads it."""
        return {
            "id": self.id,
            "loss": self.value,
            "failure": self.failure,
            "manifest": self.promise.manifest,
            "calibration": self.promise.calibration,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any], promises: Iterable[WatchedPromise]) -> Self:
        """Returns the loss that a row of a `LossProbe` is.

        Args:
          row: As `to_row` returns it.
          promises: Those that it may be about.

        Raises:
          ValueError: If it is about none of them, or no such row.
        """
        keys = ("id", "loss", "failure", "manifest", "calibration")
        if row.keys() != set(keys):
            raise ValueError(f"the row of a loss has the keys {', '.join(keys)}; got {sorted(map(str, row))}.")
        if not (row["failure"] is None or isinstance(row["failure"], str)):
            raise ValueError(
                f"the loss of request {row['id']!r:.60}: failure must be a text, or None where the loss was measured; "
                f"got {row['failure']!r:.60}."
            )
        for promise in promises:
            if (promise.manifest, promise.calibration) == (row["manifest"], row["calibration"]):
                return cls(id=str(row["id"]), value=row["loss"], failure=row["failure"], promise=promise)
        raise ValueError(
            f"the loss of request {row['id']!r:.60} was measured for another manifest or entry. The losses of one "
            "promise say nothing about another: name the manifest that it was measured for."
        )


def in_fixed_order(losses: Iterable[SampledLoss]) -> list[SampledLoss]:
    """Returns losses in an order that depends on their ids alone, each request once.

    A request whose loss is there twice, as where a source delivers a message again, counts with the smaller one: more
    alarms than were promised must not come of it.

    Args:
      losses: Of one promise, in any order.

    Source: ours.
    """
    by_id: dict[str, SampledLoss] = {}
    for loss in losses:
        other = by_id.get(loss.id)
        if other is None or (loss.value, loss.failure or "") < (other.value, other.failure or ""):
            by_id[loss.id] = loss
    return sorted(by_id.values(), key=lambda loss: (hashlib.sha256(loss.id.encode()).digest(), loss.id))
