"""Answering shards of prompts under a manifest, into one file a shard."""

import dataclasses
import os

import apache_beam as beam

from calm_beam.errors import UsageError
from calm_beam.manifest import MANIFEST, EntryChoice, Manifest, read_manifest
from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings
from calm_beam.options import again, option, switch
from calm_beam.options.call import documented, naming_arguments
from calm_beam.options.entries import Answers, Entry, ExactEngine, Trusted
from calm_beam.options.groups import Copies, Decoding, FactsOfAny, ModelSource, Replacing
from calm_beam.options.option import shared
from calm_beam.outputs.folder import AnswerHome
from calm_beam.outputs.request import AnswerRequest
from calm_beam.storage import absolute, is_folder, joined

from .decode import DecodeExamples
from .examples import ExamplesRead, ReadExamples
from .progress import NOWHERE, ProgressLog
from .prompts import ReadPrompts, ShardPrompts
from .upstream import maker_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(FactsOfAny, Entry, Trusted, ExactEngine, Answers, Decoding, Copies, Replacing):
    """What answers to `ReadPrompts` or `ShardPrompts` are asked for."""

    manifest: Manifest | str
    output: str | os.PathLike[str] = option(dataclasses.MISSING, "folder of the answers")
    model: str | os.PathLike[str] | None = option(
        None, "folder of the model that was calibrated; default: where the manifest says that it was"
    )
    vocabulary: str | None = again(ModelSource, "vocabulary", belongs_to=())
    resume: bool = switch("go on with what an unfinished run has left there")
    metric_settings: MetricSettings = NO_SETTINGS
    runs_here: bool = True
    progress: ProgressLog = NOWHERE


@documented
class Generate(GenerateOptions, beam.PTransform):
    """Answers the prompts of `ReadPrompts` or `ShardPrompts` under a manifest, and stores all answers.

        pipeline | ReadPrompts("prompts/*.jsonl.gz") | Generate(manifest="calibration", model="model", output="answers")

    Every prompt is answered once, or listed with its reason. Manifest, model and the first prompts are checked, and the
    folder is made, when the pipeline is put together.

    Attributes:
      manifest: The manifest, its file, or the calibration directory that holds it.
      metric_settings: What the metric of losses needs.
      runs_here: Whether this machine decodes, so that its memory has to do. Where others decode, `engine=auto` takes no
        native code unless that was calibrated.
      progress: Where to report.
    """

    def __post_init__(self) -> None:
        with naming_arguments(GenerateOptions):
            super().__post_init__()

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
        with naming_arguments(GenerateOptions):
            prepared = prepare_answers(self._request(source.shard_count()), source.files(), runs_here=self.runs_here)
        output = absolute(os.fspath(self.output))
        AnswerHome(output).begin([prepared.job], resume=self.resume, overwrite=self.overwrite, tell=lambda _: None)
        return prompts | DecodeExamples([prepared.assignment(output)], self.progress)

    def _request(self, num_shards: int) -> AnswerRequest:
        manifest = self.manifest
        if not isinstance(manifest, Manifest):
            manifest = read_manifest(joined(manifest, MANIFEST) if is_folder(manifest) else manifest)
        own = {"manifest": manifest, "choice": EntryChoice.named_by(self), "num_shards": num_shards}
        return AnswerRequest(**{**shared(self, AnswerRequest), **own})
