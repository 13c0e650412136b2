"""Requests for a sweep over a data set or for answers to one, and the workers' assignments."""

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
    """How workers decode, as far as that does not change the outputs.

    The engine that `engine` resolves to on a worker must be the job's engine.

    Attributes:
      on_error: `fail`, or the value that lets undecodable prompts fail: `worst_case` in a sweep, `list` for answers.
      max_failures: Most examples that may fail; None for the default of `failure_limit`.
      model_copies: Most copies of the model in one process; further threads wait.
    """

    on_error: str = "fail"
    max_failures: int | None = None
    model_copies: int = 1

    def told_to_workers(self) -> dict[str, Any]:
        """Returns only these settings, by name, also from a subclass."""
        return shared(self, WorkerSettings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRequest(WorkerSettings):
    """A sweep over a data set, as a user requests it.

    Attributes:
      model: Folder of the model.
      settings: The decode settings, which determine the outputs; `prepare_sweep` sets the engine.
      vocabulary: Path of the SentencePiece model, or of a `tokenizer.json`; None searches in and next to the model.
      extra_ids: Sentinels to add to it; None takes the number that tokenizer files next to it give.
      chat_template: `model` for the chat template next to the tokenizer, the path of one, or `none` for prompts as they
        are; None is allowed only if there is no template, and equals `none`.
      system: System text of every chat; None for none.
      stop_strings: Texts that end an output; None takes those of the model's `generation_config.json`.
      recorded_chat: A manifest's record of how prompts become chats; it overrides those two.
      shortens_prompts: Whether to lower the settings' maximum prompt length to the room that the model leaves next to
        an output; set if the user gives no length.
      activation: The model's activation, if its files do not name it; None takes it from the files.
      relative_max_distance: The model's maximum relative distance, if its files do not name it; None takes it from the
        files.
      on_long: `truncate` or `error`, for prompts longer than the settings allow.
      num_shards: Shards that examples are divided into, by a hash of their prompts; None derives it from the size of
        the data. A prepared sweep has the number.
      order: Salt of a hash of ids, or of cluster names, which then divides the examples; None divides by prompts.
      round_examples: Examples of a round, if tests look at the losses after each round; None if all examples count.
      part: The part of the data that is decoded; None for all of it.
      decoder: `BATCH` for the serving decoder; None for a sweep.
    """

    model: str
    settings: DecodeSettings
    vocabulary: str | None = None
    extra_ids: int | None = None
    chat_template: str | None = None
    system: str | None = None
    stop_strings: tuple[str, ...] | None = None
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
        """Returns the sweep that options request.

        Args:
          options: Each option sets the field of its name.
          settings: The decode settings.
          own: Fields that are not options, or have another name there.
        """
        fields = {**shared(options, cls), "settings": settings, "shortens_prompts": options.max_input_length is None}
        return cls(**{**fields, **own})


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerRequest(WorkerSettings):
    """Answers to a data set, as a user requests them.

    Attributes:
      manifest: The manifest.
      model: Folder of the calibrated model; None takes the location in the manifest.
      choice: The manifest's entry that answers prompts without a group.
      vocabulary: Path of the SentencePiece model; None searches in and next to the model.
      activation: The model's activation, if its files do not name it; None takes it from the files.
      relative_max_distance: The model's maximum relative distance, if its files do not name it; None takes it from the
        files.
      output_format: One of `FORMATS`.
      probe_share: Share of the prompts that the full model answers as well, so that their losses are known; None for
        none.
      probe_salt: Salt that draws these prompts. None takes the manifest's digest, which is no secret from clients that
        choose the ids of prompts.
      metric_settings: Settings of the metric of losses.
      exact_engine: Whether to refuse any other engine than the calibrated one, as `Generator.from_manifest` does.
      num_shards: Shards that prompts are divided into; None derives it from the size of the data.
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
"""The `decoder` of a job whose outputs are made by the serving decoder, in batches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment(WorkerSettings):
    """The outputs that a worker makes, and how.

    Attributes:
      directory: Folder of the outputs.
      job: Their job. A worker that finds another model or vocabulary than the job's refuses.
      declared: Facts about the model that its layout may not record.
      vocabulary_path: Path of the SentencePiece model. None if there is none and prompts are token ids; for answers,
        also if the worker searches in and next to the model.
    """

    directory: str
    job: Job
    declared: "Declared"
    vocabulary_path: str | None

    @property
    def num_branches(self) -> int:
        """Number of branches of a prompt that a worker decodes."""
        return 1

    def shard_path(self, shard: int) -> str:
        """Returns the Parquet file of a shard, which is stored once and has the outcome of all its examples."""
        return self.job.shard_path(self.directory, shard)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepAssignment(Assignment):
    """The generations that a worker makes, and how.

    Attributes:
      above: The upper part of the grid, complete; the job's grid begins with it, and only the rest is decoded. None to
        decode the whole grid.
      goes_on: Whether another run continues below this grid.
    """

    job: DecodeJob
    above: StoredGenerations | None = None
    goes_on: bool = False

    @property
    def num_branches(self) -> int:
        """Number of branches that a worker decodes: the thresholds not in `above`, and the full model unless it is."""
        thresholds = len(self.job.settings.thresholds)
        return 1 + thresholds if self.above is None else thresholds - len(self.above.thresholds)

    @property
    def stored(self) -> StoredGenerations:
        """The generations that are stored at the end."""
        return StoredGenerations(directory=self.directory, job=self.job)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerAssignment(Assignment):
    """The answers that a worker makes, and how.

    Attributes:
      manifest: The manifest; the job has its digest.
      reading: How the data are read, for messages.
      choice: The entry as the user named it, with the user's code that may run.
      metric_settings: Settings of the metric.
    """

    job: AnswerJob
    manifest: Manifest = dataclasses.field(repr=False)
    reading: Reading = AS_USUAL
    choice: EntryChoice = ANY_ENTRY
    metric_settings: MetricSettings = NO_SETTINGS

    @property
    def entry(self) -> Calibration:
        """The entry that answers prompts without a group."""
        return self.manifest.calibrations[self.job.calibration]

    @property
    def has_groups(self) -> bool:
        """Whether rows name the prompt's group and the entry that answered it."""
        return self.manifest.data.groups is not None

    def watched(self) -> tuple[int, ...]:
        """Returns the indices of the entries whose losses are measured; none without a probe.

        An entry that never exits has no risk to monitor.
        """
        if self.job.probe is None:
            return ()
        entries = self.manifest.calibrations
        promise = self.manifest.of_same_promise(self.entry)
        return tuple(place for place, entry in enumerate(entries) if entry in promise and entry.threshold is not None)

    def place_of(self, example: "Example") -> str:
        """Returns the name of a prompt in messages."""
        if not self.job.files:
            return f"prompt {example.id}"
        place = place_of(self.job.files[example.file_index], example.line, reading=self.reading)
        return f"{place} ({example.id})" if example.has_own_id else place
