"""What metrics need to know besides texts."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricSettings:
    """Where metrics find what they work with; travels to workers.

    Attributes:
      bleurt_checkpoint: Folder of a BLEURT checkpoint, local or on Cloud Storage; None where there is none.
    """

    bleurt_checkpoint: str | None = None


NO_SETTINGS = MetricSettings()
