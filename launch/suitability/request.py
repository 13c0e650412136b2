"""The request of `calm-beam suitability` and `calm_beam.suitability`."""

import dataclasses
import os
from typing import Any

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.device_times import Device
from calm_beam.launch.flags.task import TaskRequest
from calm_beam.options import option, switch
from calm_beam.options.kinds import Kind, ValueRefusedError, share, whole_number


def _share_or_all(value: Any) -> float:
    """Returns a share above 0 and up to 1, given as such or in per cent."""
    if value in ("1", "1.0", "100%", 1):
        return 1.0
    try:
        found: float = share.taken(value)
    except ValueRefusedError as error:
        raise ValueRefusedError(
            f"expected a share above 0 and up to 1, such as 98% or 0.98, got {value!r:.40}"
        ) from error
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuitabilityRequest(TaskRequest, Device):
    """A forecast of whether a model can exit early, from a sample of prompts."""

    max_examples: int = option(100, "size of the sample, drawn by a hash of the ids", kind=whole_number(1))
    agreeing: float = option(
        0.98, "share of tokens that softmax exits may not change, in (0, 1]", kind=Kind(_share_or_all, _share_or_all)
    )
    output: str | os.PathLike[str] | None = option(None, "JSON file for the figures; default: the terminal alone")
    overwrite: bool = switch("replace --output", belongs_to=("output",))

    def settings(self) -> DecodeSettings:
        """Returns what determines the outputs of the full model: nothing exits."""
        return DecodeSettings.of(self, ExitRule(), thresholds=(1.0,))
