"""What a token was said to cost where rules of exit are chosen by it, and how fast what was chosen has been."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from calm_beam.errors import ManifestError
from calm_beam.storage.record_values import Cost, Count, Number, OneOf, Positive, Text, shown
from calm_beam.storage.records import Record

from ._model import EngineRecord

OBJECTIVES = LATENCY, THROUGHPUT, LAYERS, FLOPS = ("latency", "throughput", "layers", "flops")
"""What exits are to save: seconds of single prompts, of batches, layers, or operations."""
UNITS = {LATENCY: "seconds", THROUGHPUT: "seconds", LAYERS: "layers", FLOPS: "operations"}
"""In what each is counted."""


@dataclass(frozen=True, kw_only=True)
class CostRecord(Record):
    """What a token was said to cost, settled before any loss was seen; whatever the numbers, the promises hold.

    A token costs `output`, `layer` for each layer that it goes through, `skipped` for each that it skips, and a test
    wherever it might have left and did not, or leaves by another measure than one of logits.

    Attributes:
      unit: What numbers count: `seconds`, `operations` or `layers`.
      batch: Prompts decoded together; None where it does not matter.
      device: JAX's name of the kind of device that was measured; None where nothing was.
      cores: Cores that the process might use; likewise.
      engine: What decoded; likewise.
      layer: Of a layer gone through. Where it was measured, what it takes more than a layer skipped.
      skipped: Of a layer skipped. Where it was measured, 0: it stands in the two others.
      output: Of all else.
      logits_test: Of an exit test of logits; None where it was not measured, and such measures are no candidates.
      states_test: Of one of states; likewise.
      classifier_test: Of one of the exit classifier; likewise.
    """

    unit: Annotated[str, OneOf(tuple(dict.fromkeys(UNITS.values())))]
    batch: Positive | None = None
    device: Text | None = None
    cores: Positive | None = None
    engine: EngineRecord | None = None
    layer: Cost
    skipped: Cost
    output: Cost
    logits_test: Cost | None = None
    states_test: Cost | None = None
    classifier_test: Cost | None = None

    @property
    def was_measured(self) -> bool:
        """Whether it is of a machine."""
        return self.device is not None


@dataclass(frozen=True, kw_only=True)
class SpeedRecord(Record):
    """How fast a promised threshold was, in turns with the full model, on the machine that calibrated.

    Attributes:
      calibrations: Places of the promises that it is about, which are decoded alike, counted from 0.
      factor: Seconds of the full model over its own, of the same prompts.
      standard_error: Of the factor over samples of prompts; None where there was a single part.
      prompts: Prompts that both have decoded.
      batch: Prompts at a time.
      seconds: Of a prompt, on average.
      full_seconds: Of a prompt by the full model.
      device: JAX's name of the kind of device.
      cores: Cores that the process might use.
      engine: What decoded.
    """

    calibrations: tuple[Count, ...]
    factor: Annotated[float, Number(0, above=True)]
    standard_error: Cost | None = None
    prompts: Positive
    batch: Positive
    seconds: Cost
    full_seconds: Cost
    device: Text
    cores: Positive
    engine: EngineRecord


def check_speeds(speeds: tuple[SpeedRecord, ...], exits: Collection[int]) -> None:
    """Refuses speeds of promises that are not there, or of which nothing was found safe.

    Args:
      speeds: As in a manifest.
      exits: Places of the promises that exit, or would if it paid.

    Raises:
      ManifestError: If one is of such.
    """
    for index, speed in enumerate(speeds):
        wrong = next((place for place in speed.calibrations if place not in exits), None)
        if wrong is not None:
            raise ManifestError(
                f"speeds[{index}].calibrations must be places of entries that accepted one, got {shown(wrong)}"
            )
