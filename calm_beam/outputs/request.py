"""What is asked for, a sweep over a data set or answers to one, and what a worker is told of it."""

import dataclasses
from typing import TYPE_CHECKING, Any, Self

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.inputs import AS_USUAL, Reading, place_of
from calm_beam.inputs.set_parts import Split
from calm_beam.manifest import ANY_ENTRY, Calibration, ChatRecord, EntryChoice, Manifest
from calm_beam.metrics import NO_SETTINGS, MetricSettings
from calm_beam.options.groups import Decoding, OutputSettings
from calm_beam.options.option import shared

from .job import AnswerJob, DecodeJob, Job, StoredGenerations

if TYPE_CHECKING:
    from calm_beam.checkpoints import Declared
    from calm_beam.inputs.examples import Example


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSettings(Decoding):
    """How workers decode, where that is no part of what outputs are.

    What `engine` comes to on a worker must be the engine of the job.

    Attributes:
      on_error: `fail`, or what lets prompts fail that cannot be decoded: `worst_case` in a sweep, `list` for answers.
      max_failures: Most examples that may fail; None as in `failure_limit`.
      model_copies: Most copies of the model in one process; threads beyond them wait.
    """

    on_error: str = "fail"
    max_failures: int | None = None
    model_copies: int = 1

    def told_to_workers(self) -> dict[str, Any]:
        """Returns these settings by name, of whatever else they are a part."""
        return shared(self, WorkerSettings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRequest(WorkerSettings):
    """A sweep over a data set, as a user asks for it.

    Attributes:
      model: Folder of the model.
      settings: What determines the outputs; `prepare_sweep` sets the engine.
      vocabulary: Path of the SentencePiece model, or of a `tokenizer.json`; None looks in and beside the model.
      extra_ids: Sentinels to add to it; None takes as many as tokenizer files beside it name.
      chat_template: `model` for the chat template beside the tokenizer, the path of one, or `none` for prompts as they
        are; None is that, too, where there is no template.
      system: What every chat begins with; None if it begins with the prompt.
      recorded_chat: How a manifest says that prompts become chats, which counts before those two.
      shortens_prompts: Whether the most tokens of a prompt, which the settings have, are what the model has room for
        beside an output, if that is less: where nobody says how many.
      activation: Of the model, where its files do not say it; None goes by the files.
      relative_max_distance: The same.
      on_long: `truncate` or `error`, for prompts longer than the settings allow.
      num_shards: Shards that examples are divided into, by a hash of their prompts; None goes by the size of the data,
        and a prepared sweep has the number.
      order: Salt of a hash of their ids, or of their clusters' names, which divides them instead; None for prompts.
      round_examples: Examples of a round, where tests are looked at after each; None where all examples count.
      part: The part of the data that is decoded; None for all of it.
      decoder: As in `DecodeJob`.
    """

    model: str
    settings: DecodeSettings
    vocabulary: str | None = None
    extra_ids: int | None = None
    chat_template: str | None = None
    system: str | None = None
    recorded_chat: ChatRecord | None = None
    shortens_prompts: bool = False
    activation: str | None = None
    relative_max_distance: int | None = None
    on_long: str = "truncate"
    num_shards: int | None = None
    order: str | None = None
    round_examples: int | None = None
    part: Split | None = None
    decoder: str | None = None

    @classmethod
    def asked_by(cls, options: OutputSettings, settings: DecodeSettings, **own: Any) -> Self:
        """Returns the sweep that options ask for.

        Args:
          options: Each is the field of its name.
          settings: What determines the outputs.
          own: Fields that are no options, or are not called so.
        """
        fields = {**shared(options, cls), "settings": settings, "shortens_prompts": options.max_input_length is None}
        return cls(**{**fields, **own})


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerRequest(WorkerSettings):
    """Answers to a data set, as a user asks for them.

    Attributes:
      manifest: The manifest.
      model: Folder of the model that was calibrated; None takes where the manifest says that it was.
      choice: Its entry that answers prompts which name no group.
      vocabulary: Path of the SentencePiece model; None looks in and beside the model.
      activation: Of the model, where its files do not say it; None goes by the files.
      relative_max_distance: The same.
      output_format: One of `FORMATS`.
      probe_share: Share of the prompts that the full model answers as well, so that their losses are known; None for
        none.
      probe_salt: Decides which these are. None takes the manifest's digest, which is no secret from whoever chooses
        the ids of prompts.
      metric_settings: What the metric of losses needs.
      exact_engine: As in `Generator.from_manifest`.
      num_shards: Shards that prompts are divided into; None goes by the size of the data.
    """

    manifest: Manifest
    model: str | None = None
    choice: EntryChoice = ANY_ENTRY
    vocabulary: str | None = None
    activation: str | None = None
    relative_max_distance: int | None = None
    output_format: str = "parquet"
    probe_share: float | None = None
    probe_salt: str | None = None
    metric_settings: MetricSettings = NO_SETTINGS
    exact_engine: bool = False
    num_shards: int | None = None


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
