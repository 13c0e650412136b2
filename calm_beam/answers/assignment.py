"""What a worker is told."""

import dataclasses
from typing import TYPE_CHECKING

from calm_beam.inputs import AS_USUAL, Reading, place_of
from calm_beam.manifest import Calibration, Manifest
from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings

from .job import AnswerJob
from .paths import published_path, shard_path

if TYPE_CHECKING:
    from calm_beam.checkpoints import Declared
    from calm_beam.inputs.examples import Example


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerAssignment:
    """Which answers a worker is to make, and how.

    Attributes:
      directory: Where they go.
      job: What they are. A worker that finds another model or vocabulary than the manifest's refuses.
      manifest: The manifest; the job has its digest.
      declared: Of the model, for layouts that do not say it.
      vocabulary_path: Path of the SentencePiece model; None looks in and beside the model, if there is one.
      reading: How the data are read, for messages.
      confidence: The confidence measure, if it is code of the user's.
      metric: Name of the entry's metric as the user gave it, which the probe needs if it is code of the user's.
      metric_settings: What the metric needs.
      batch_size: Most prompts decoded together; None for as many as memory and speed recommend.
      token_budget: Most positions held at a time; None for a share of the memory that is free.
      exit_head: One of `EXIT_HEADS`: the form of the output head that decides. It moves answers at near ties alone.
      engine: As in `Generator.from_manifest`.
      on_error: `fail` or `list`, for prompts that have no answer.
      max_failures: Most prompts that may fail; None as in `failure_limit`.
      model_copies: Most copies of the model in one process; threads beyond them wait.
      model_parallelism: Devices of a worker that share one model, each with a part of it; copies are on the others.
    """

    directory: str
    job: AnswerJob
    manifest: Manifest = dataclasses.field(repr=False)
    declared: "Declared"
    vocabulary_path: str | None
    reading: Reading = AS_USUAL
    confidence: str | None = None
    metric: str | None = None
    metric_settings: MetricSettings = NO_SETTINGS
    batch_size: int | None = None
    token_budget: int | None = None
    exit_head: str = "auto"
    engine: str = "auto"
    on_error: str = "fail"
    max_failures: int | None = None
    model_copies: int = 1
    model_parallelism: int = 1

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

    def shard_path(self, shard: int) -> str:
        """Returns the Parquet file of a shard: what is stored once, and says all that became of its prompts."""
        return shard_path(self.directory, shard, job=self.job)

    def published_path(self, shard: int) -> str:
        """Returns the file of a shard that users read; the same, unless another format was asked for."""
        return published_path(self.directory, shard, job=self.job)

    def place_of(self, example: "Example") -> str:
        """Returns what messages call a prompt."""
        if not self.job.files:
            return f"prompt {example.id}"
        place = place_of(self.job.files[example.file_index], example.line, reading=self.reading)
        return f"{place} ({example.id})" if example.has_own_id else place
