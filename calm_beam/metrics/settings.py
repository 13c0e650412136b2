"""Settings of metrics."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricSettings:
    """Files that metrics need; sent to workers.

    Attributes:
      bleurt_checkpoint: Folder of a BLEURT checkpoint, local or on Cloud Storage; None without one.
    """

    bleurt_checkpoint: str | None = None


NO_SETTINGS = MetricSettings()
