"""What a run of answers is asked to do."""

import dataclasses

from calm_beam.manifest import Manifest
from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """Answers to a data set, as a user asks for them.

    Attributes:
      manifest: The manifest.
      model: Folder of the model that was calibrated; None takes where the manifest says that it was.
      consistency: Of the manifest's entry. This and the next five are as in `Generator.from_manifest`.
      metric: Of the entry. A metric of one's own has to be named, where losses are measured.
      loss: Of the entry.
      delta: Of the entry.
      epsilon: Of the entry.
      group: Of the entry: the group of prompts that name none.
      confidence: The confidence measure, if the manifest names code of the user's.
      vocabulary: Path of the SentencePiece model; None looks in and beside the model.
      activation: Of the model, where its files do not say it; None goes by the files.
      relative_max_distance: The same.
      output_format: One of `FORMATS`.
      on_error: `fail`, or `list` to list prompts that have no answer, and to answer the others.
      max_failures: Most prompts that may fail; None as in `failure_limit`.
      probe_share: Share of the prompts that the full model answers as well, so that their losses are known; None for
        none.
      probe_salt: Decides which these are. None takes the manifest's digest, which is no secret from whoever chooses
        the ids of prompts.
      metric_settings: What the metric of losses needs.
      batch_size: Most prompts decoded together; None for as many as memory and speed recommend.
      token_budget: Most positions held at a time; None for a share of the memory that is free.
      exit_head: One of `EXIT_HEADS`: the form of the output head that decides. It moves answers at near ties alone.
      engine: As in `Generator.from_manifest`.
      exact_engine: As there.
      num_shards: Shards that prompts are divided into; None goes by the size of the data.
      model_copies: Most copies of the model in one process.
      model_parallelism: Devices of a worker that share one model, each with a part of it; copies are on the others.
    """

    manifest: Manifest
    model: str | None = None
    consistency: str | None = None
    metric: str | None = None
    loss: str | None = None
    delta: float | None = None
    epsilon: float | None = None
    group: str | None = None
    confidence: str | None = None
    vocabulary: str | None = None
    activation: str | None = None
    relative_max_distance: int | None = None
    output_format: str = "parquet"
    on_error: str = "fail"
    max_failures: int | None = None
    probe_share: float | None = None
    probe_salt: str | None = None
    metric_settings: MetricSettings = NO_SETTINGS
    batch_size: int | None = None
    token_budget: int | None = None
    exit_head: str = "auto"
    engine: str = "auto"
    exact_engine: bool = False
    num_shards: int | None = None
    model_copies: int = 1
    model_parallelism: int = 1
