"""Answering shards of prompts under a manifest, into one file a shard."""

import dataclasses

import apache_beam as beam

from calm_beam.errors import UsageError
from calm_beam.manifest import MANIFEST, EntryChoice, Manifest, read_manifest
from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings
from calm_beam.options.option import shared
from calm_beam.outputs.folder import AnswerHome
from calm_beam.outputs.request import AnswerRequest
from calm_beam.storage import absolute, is_folder, joined

from .decode import DecodeExamples
from .examples import ExamplesRead, ReadExamples
from .progress import NOWHERE, ProgressLog
from .prompts import ReadPrompts, ShardPrompts
from .upstream import maker_of


@dataclasses.dataclass
class Generate(beam.PTransform):
    """Answers the prompts of `ReadPrompts` or `ShardPrompts` under a manifest, and stores all answers.

        pipeline | ReadPrompts("prompts/*.jsonl.gz") | Generate(manifest="calibration", model="model", output="answers")

    Every prompt is answered once, or listed with its reason. Manifest, model and the first prompts are checked, and the
    folder is made, when the pipeline is put together.

    Attributes:
      manifest: The manifest, its file, or the calibration directory that holds it.
      output: Folder of the answers.
      model: Folder of the model that was calibrated; None takes where the manifest says that it was.
      consistency: Of the manifest's entry. This and the next five are as in `Generator.from_manifest`.
      metric: Of the entry.
      loss: Of the entry.
      delta: Of the entry.
      epsilon: Of the entry.
      group: Of the entry: the group of prompts that name none.
      confidence: The confidence measure, if the manifest names code of the user's.
      vocabulary: Path of the SentencePiece model; None looks in and beside the model.
      output_format: `parquet`, or `jsonl` for JSON lines packed by gzip.
      on_error: `fail`, or `list` to list prompts that have no answer in `failures.jsonl`, and to answer the others.
      max_failures: Most prompts that may fail; None for few.
      probe_share: Share of the prompts that the full model answers as well, whose losses are written to
        `losses.jsonl`; None for none.
      probe_salt: Decides which these are; None takes the manifest's digest.
      metric_settings: What the metric of losses needs.
      batch_size: Most prompts decoded together; None goes by the memory that is free.
      token_budget: Most positions held at a time; None likewise.
      exit_head: One of `EXIT_HEADS`: the form of the output head that decides. It moves answers at near ties alone.
      engine: As in `Generator.from_manifest`; where other machines decode, `auto` takes no native code unless that was
        calibrated.
      exact_engine: As there.
      model_copies: Most copies of the model in one process.
      model_parallelism: Devices of a worker that share one model, each with a part of it; copies are on the others.
      resume: Whether to go on with what an unfinished run has left there.
      overwrite: Whether to take away what is there.
      runs_here: Whether this machine decodes, so that its memory has to do.
      progress: Where to report.
    """

    _: dataclasses.KW_ONLY
    manifest: Manifest | str
    output: str
    model: str | None = None
    consistency: str | None = None
    metric: str | None = None
    loss: str | None = None
    delta: float | None = None
    epsilon: float | None = None
    group: str | None = None
    confidence: str | None = None
    vocabulary: str | None = None
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
    model_copies: int = 1
    model_parallelism: int = 1
    resume: bool = False
    overwrite: bool = False
    runs_here: bool = True
    progress: ProgressLog = NOWHERE

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, prompts: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of one `FinishedAnswers`, given `ExamplesRead`."""
        # Here, since it needs JAX, which putting other pipelines together does not.
        from calm_beam.outputs.answer_prepared import prepare_answers

        shards = ExamplesRead(*prompts).shards
        source = maker_of(shards, ReadPrompts) or maker_of(shards, ShardPrompts) or maker_of(shards, ReadExamples)
        if source is None:
            raise UsageError("Generate takes what ReadPrompts, ShardPrompts or ReadExamples gives.")
        prepared = prepare_answers(self._request(source.shard_count()), source.files(), runs_here=self.runs_here)
        output = absolute(self.output)
        AnswerHome(output).begin([prepared.job], resume=self.resume, overwrite=self.overwrite, tell=lambda _: None)
        return prompts | DecodeExamples([prepared.assignment(output)], self.progress)

    def _request(self, num_shards: int) -> AnswerRequest:
        manifest = self.manifest
        if not isinstance(manifest, Manifest):
            manifest = read_manifest(joined(manifest, MANIFEST) if is_folder(manifest) else manifest)
        own = {"manifest": manifest, "choice": EntryChoice.named_by(self), "num_shards": num_shards}
        return AnswerRequest(**{**shared(self, AnswerRequest), **own})
