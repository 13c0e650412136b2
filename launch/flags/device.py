"""Which accelerator a forecast is for."""

import dataclasses

from calm_beam.evaluation.device_forecast import DEVICES
from calm_beam.options import Options, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device(Options):
    """An accelerator that is forecast."""

    device: str | None = option(
        None,
        "accelerator for which the least time of a step is forecast from bytes and operations, by exit layer and "
        "measure; nothing is run there",
        choices=tuple(DEVICES),
    )
