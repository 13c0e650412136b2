"""What a worker is told."""

import dataclasses
from typing import TYPE_CHECKING

from calm_beam.inputs import AS_USUAL, Reading, place_of
from calm_beam.manifest import ANY_ENTRY, Calibration, EntryChoice, Manifest
from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings

from .job import AnswerJob, DecodeJob, Job, StoredGenerations
from .request import WorkerSettings

if TYPE_CHECKING:
    from calm_beam.checkpoints import Declared
    from calm_beam.inputs.examples import Example


BATCH = "batch"
"""The `decoder` of a job whose outputs are made by the decoder of batches that serves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment(WorkerSettings):
    """Which outputs a worker is to make, and how.

    Attributes:
      directory: Where they go.
      job: What they are. A worker that finds another model or vocabulary than the job's refuses.
      declared: Of the model, for layouts that do not say it.
      vocabulary_path: Path of the SentencePiece model. None where there is none and prompts are token ids; for answers,
        also where it is looked for in and beside the model.
    """

    directory: str
    job: Job
    declared: "Declared"
    vocabulary_path: str | None

    @property
    def lanes(self) -> int:
        """How many branches of a prompt a worker decodes."""
        return 1

    def shard_path(self, shard: int) -> str:
        """Returns the Parquet file of a shard: what is stored once, and says all that became of its examples."""
        return self.job.shard_path(self.directory, shard)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepAssignment(Assignment):
    """Which generations a worker is to make, and how.

    Attributes:
      above: The upper part of the grid, complete; the job's grid begins with it, and only what follows is decoded. None
        if all of it is.
      goes_on: Whether another run is to go on below this grid.
    """

    job: DecodeJob
    above: StoredGenerations | None = None
    goes_on: bool = False

    @property
    def lanes(self) -> int:
        """How many a worker decodes: one a threshold that is not above, and the full model's unless that is."""
        thresholds = len(self.job.settings.thresholds)
        return 1 + thresholds if self.above is None else thresholds - len(self.above.thresholds)

    @property
    def stored(self) -> StoredGenerations:
        """What is there at the end."""
        return StoredGenerations(directory=self.directory, job=self.job)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerAssignment(Assignment):
    """Which answers a worker is to make, and how.

    Attributes:
      manifest: The manifest; the job has its digest.
      reading: How the data are read, for messages.
      choice: The entry as the user named it, and with it code of the user's that may run.
      metric_settings: What the metric needs.
    """

    job: AnswerJob
    manifest: Manifest = dataclasses.field(repr=False)
    reading: Reading = AS_USUAL
    choice: EntryChoice = ANY_ENTRY
    metric_settings: MetricSettings = NO_SETTINGS

    @property
    def entry(self) -> Calibration:
        """The entry that answers prompts of no group."""
        return self.manifest.calibrations[self.job.calibration]

    @property
    def has_groups(self) -> bool:
        """Whether rows say by which entry a prompt was answered, and for which group."""
        return self.manifest.data.groups is not None

    def watched(self) -> tuple[int, ...]:
        """Returns the places of the entries whose losses are measured; none without a probe.

        An entry that never exits has no risk to watch.
        """
        if self.job.probe is None:
            return ()
        entries = self.manifest.calibrations
        promise = self.manifest.of_same_promise(self.entry)
        return tuple(place for place, entry in enumerate(entries) if entry in promise and entry.threshold is not None)

    def place_of(self, example: "Example") -> str:
        """Returns what messages call a prompt."""
        if not self.job.files:
            return f"prompt {example.id}"
        place = place_of(self.job.files[example.file_index], example.line, reading=self.reading)
        return f"{place} ({example.id})" if example.has_own_id else place
