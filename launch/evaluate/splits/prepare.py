"""From the request of repeated splits to what has been found good: stored generations, their model, what is asked."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.asked_data import DecodedExamples
from calm_beam.calibration.plan import PlanTerms, plan_of_job
from calm_beam.checkpoints import Checkpoint, CheckpointError, load_checkpoint
from calm_beam.errors import UsageError
from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.evaluation.measures import StoredMeasure, find_measures, have_references
from calm_beam.evaluation.output_counts import OutputCounter
from calm_beam.evaluation.splits import Splits
from calm_beam.exits.measures import check_may_run
from calm_beam.inputs.files import digest_of_files
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, VocabularyError
from calm_beam.launch.evaluate.output import checked_output
from calm_beam.launch.evaluate.sweeps import sweep_measures
from calm_beam.launch.flags.metrics import checked_metrics, metric_settings
from calm_beam.launch.flags.model import declared
from calm_beam.launch.runners import Workers
from calm_beam.launch.runners.dataflow import paths_by_flag
from calm_beam.launch.terminal import say
from calm_beam.manifest import ManifestError, PlannedTest, content_digest
from calm_beam.manifest.plan_list import AskedPlan, PlanList, home_of
from calm_beam.manifest.versions import run_versions
from calm_beam.metrics.corpus_bleu import is_bleu_available
from calm_beam.outputs import StoredGenerations
from calm_beam.outputs.scoring import Scoring
from calm_beam.report.figures import check_plots_available
from calm_beam.serving.agreement import check_model, check_vocabulary, recorded_vocabulary
from calm_beam.storage import absolute
from calm_beam.transforms.splits import SplitSource

from .request import SplitsRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOfGenerations:
    """The model that generations are of, for what cannot be told from them alone.

    Attributes:
      checkpoint: The model.
      vocabulary: Its vocabulary; None where there was none.
      vocabulary_path: Where that was read.
    """

    checkpoint: Checkpoint
    vocabulary: Vocabulary | None
    vocabulary_path: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedSplits:
    """Repeated splits, all of which have been found good.

    Attributes:
      output: Directory of what is found.
      splits: How the generations are split.
      specs: What the table is about.
      measures: The generations.
      sources: The same, with what is counted of each and how it is tested.
      model: Their model; None if it is not there, and nothing needs it.
      workers: Who scores.
      scoring: How losses are made.
      speedup_prompts: Prompts that are timed; None measures no speedup.
    """

    output: str
    splits: Splits
    specs: tuple[PlannedTest, ...]
    measures: tuple[StoredMeasure, ...]
    sources: tuple[SplitSource, ...]
    model: ModelOfGenerations | None
    workers: Workers
    scoring: Scoring
    speedup_prompts: int | None

    def provenance(self) -> dict[str, Any]:
        """Returns what it takes to find the same again."""
        job = self.measures[0].job
        return {
            "experiment": "splits",
            "measures": [
                {
                    "name": measure.name,
                    "generations": measure.folder,
                    "rule": dataclasses.asdict(measure.rule),
                    "thresholds": measure.job.settings.thresholds,
                    "examples": measure.finished.examples,
                    "failed": measure.finished.failed,
                }
                for measure in self.measures
            ],
            "splits": dataclasses.asdict(self.splits),
            "model": job.model.to_dict(),
            "data": job.patterns,
            "cluster_key": job.cluster_key,
            "max_decode_length": job.settings.max_decode_length,
            "on_error": self.sources[0].plan.on_error,
            "speedup_prompts": self.speedup_prompts,
            "software": run_versions(job.software, metrics={spec.objective.metric for spec in self.specs}),
        }


def prepare(request: SplitsRequest, options: PipelineOptions, *, files: Sequence[str]) -> PreparedSplits:
    """Returns what is asked for, once the generations are there: where none are named, they are made first.

    Args:
      request: What is asked for.
      options: Beam's.
      files: What will be written into the output directory.

    Raises:
      UsageError: If what was asked for is wrong.
      PipelineError: If a sweep that is made first fails.
      CalmBeamError: If stored generations are not complete, or are not what they say.
    """
    output = checked_output(request, files)
    Workers(options=options).refuse_template(command="evaluate")
    check_plots_available()
    splits = Splits(trials=request.trials, calibration_share=request.calibration_share, seed=request.seed)
    # Before sweeps, which take their time.
    metrics = checked_metrics(request.metrics, metric_settings(request))
    request.table_and_curve(consistencies=tuple(request.consistency or ("textual",)), metrics=metrics)
    if request.is_demo:
        say("no --checkpoint and no --data: the demo model on the demo data")
    if request.generations is None:
        directories = sweep_measures(_swept_measures(request), request, options=options, output=output)
    else:
        directories = tuple(request.generations)
    measures = find_measures(directories)
    workers = Workers.prepared(
        options,
        # Sweeps had it; scoring needs none.
        accelerator=None,
        paths=_workers_paths(request, directories),
        num_shards=lambda: sum(len(measure.finished.shards) for measure in measures),
    )
    has_references = have_references(measures[0])
    specs, curve = request.table_and_curve(
        consistencies=_consistencies(request, measures[0], has_references=has_references),
        metrics=metrics,
        is_clustered=measures[0].job.cluster_key is not None,
    )
    model = find_model(measures[0], request)
    if request.speedup and model is None:
        raise UsageError("--speedup needs the model: pass --checkpoint.")
    sources = _sources(
        request,
        measures,
        model=model,
        specs=tuple(dict.fromkeys((*specs, *curve))),
        with_bleu=has_references and is_bleu_available(),
    )
    _list_plans(sources, splits, is_swept=request.generations is None)
    return PreparedSplits(
        output=output,
        splits=splits,
        specs=specs,
        measures=measures,
        sources=sources,
        model=model,
        workers=workers,
        scoring=Scoring(max_failures=request.max_failures, metric_settings=metric_settings(request)),
        speedup_prompts=request.speedup_prompts if request.speedup else None,
    )


def _workers_paths(request: SplitsRequest, directories: tuple[str, ...]) -> list[tuple[str, str | None]]:
    """Returns what workers read or write, each path with its flag."""
    return paths_by_flag(
        {
            "checkpoint": request.model_folder,
            "vocabulary": request.vocabulary,
            "data": request.patterns,
            "generations": directories,
            "bleurt_checkpoint": request.bleurt_checkpoint,
            "output": os.fspath(request.output),
        }
    )


def find_model(measure: StoredMeasure, request: SplitsRequest) -> ModelOfGenerations | None:
    """Returns the model that generations are of; None if it is no longer where it was, and no other place was named.

    Args:
      measure: The generations.
      request: May say where the model and its vocabulary are, and what its files do not say of it.

    Raises:
      UsageError: If what is found where the user says is missing or another one.
    """
    job, checkpoint, vocabulary = measure.job, request.model_folder, request.vocabulary
    try:
        loaded = load_checkpoint(checkpoint or job.model.uri, declared=declared(request))
        path = vocabulary or (loaded.vocabulary_uri if job.vocabulary else None)
        opened = recorded_vocabulary(job.vocabulary, loaded, path=path)
        of = f"what is stored in {measure.folder}"
        check_model(job.model, loaded, of=of)
        check_vocabulary(job.vocabulary, opened, checkpoint=loaded, of=of)
    except (CheckpointError, VocabularyError, ManifestError, OSError) as error:
        if checkpoint or vocabulary:
            raise UsageError(f"--checkpoint {checkpoint or job.model.uri}: {error}") from error
        say(f"operations are not counted: {error} Pass --checkpoint to have them counted.")
        return None
    return ModelOfGenerations(
        checkpoint=loaded, vocabulary=opened, vocabulary_path=absolute(path) if opened and path else None
    )


def _swept_measures(request: SplitsRequest) -> tuple[str, ...]:
    """Returns the measures to sweep: those asked for, or the usual ones that the model has."""
    if request.measures is not None:
        return request.measures
    checkpoint = load_checkpoint(request.model_path, declared=declared(request))
    return ("softmax", "state", *(("classifier",) if checkpoint.config.exit_classifier else ()))


def _consistencies(request: SplitsRequest, measure: StoredMeasure, *, has_references: bool) -> tuple[str, ...]:
    """Returns the kinds of consistency: those asked for, or all that the data allow."""
    if request.consistency is None:
        return ("textual", "risk") if has_references else ("textual",)
    if "risk" in request.consistency and not has_references:
        raise UsageError(f"--consistency=risk needs references, and not every example in {measure.folder} has some.")
    return tuple(request.consistency)


def _sources(
    request: SplitsRequest,
    measures: Sequence[StoredMeasure],
    *,
    model: ModelOfGenerations | None,
    specs: tuple[PlannedTest, ...],
    with_bleu: bool,
) -> tuple[SplitSource, ...]:
    sizes = DecoderSizes.of(model.checkpoint.config) if model else None
    sources = []
    for measure in measures:
        job, stored = measure.job, StoredGenerations(directory=measure.folder, job=measure.job)
        check_may_run(job.settings.rule.confidence, named=request.measures or ())
        DecodedExamples(stored, measure.finished).check_failed(request.on_error)
        sources.append(
            SplitSource(
                measure=measure.name,
                plan=plan_of_job(specs, job, terms=PlanTerms(on_error=request.on_error)),
                stored=stored,
                finished=measure.finished,
                counter=OutputCounter(
                    max_decode_length=job.settings.max_decode_length,
                    end_ids=job.end_ids,
                    rule=measure.rule,
                    sizes=sizes,
                    with_bleu=with_bleu,
                ),
                vocabulary=model.vocabulary_path if model else None,
                is_tested=not measure.rule.needs_full_model(),
            )
        )
    if not any(source.is_tested for source in sources):
        raise UsageError(
            f"--generations: nothing can be served by {', '.join(source.measure for source in sources)}, which needs "
            "every layer for every token: it is only shown beside others. Name another measure too."
        )
    return tuple(sources)


def _list_plans(sources: Sequence[SplitSource], splits: Splits, *, is_swept: bool) -> None:
    """Lists beside each folder of generations that its losses are looked at, which later plans have to tell.

    Args:
      sources: The generations, and what is asked of them.
      splits: How they are divided.
      is_swept: Whether they were decoded for this.
    """
    for source in sources:
        plans = PlanList(home_of(source.stored.directory))
        digest = content_digest({"plan": source.plan.to_dict(), "splits": dataclasses.asdict(splits)})
        stored = DecodedExamples(source.stored, source.finished)
        data = digest_of_files(source.stored.job.files) if is_swept else stored.identity(plans)
        asked = AskedPlan(plan=digest, tests=digest, data=data, command="evaluate", decodes=is_swept)
        plans.ask(asked, is_answered=True)
