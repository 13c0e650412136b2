"""Running `calm-beam evaluate --experiment=splits`: prepare, run, write and print.

Preparing checks the request: the stored generations, their model, and what is asked of them.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from rich.table import Table

from calm_beam.calibration.asked_data import DecodedExamples
from calm_beam.calibration.plan import PlanTerms, plan_of_job
from calm_beam.checkpoints import Checkpoint, CheckpointError, load_checkpoint
from calm_beam.errors import CalmBeamError, UsageError
from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.evaluation.outcomes import SplitResults, Spread, Summary, by_test, read_grid, read_trials, summary_row
from calm_beam.evaluation.performance import sampled
from calm_beam.evaluation.serving_speed import Speedup, measure_speedups
from calm_beam.evaluation.splits import OutputCounter, Splits, StoredMeasure, find_measures, have_references
from calm_beam.exits.measures import check_may_run
from calm_beam.exits.rule import ExitRule
from calm_beam.extras import how_to_install
from calm_beam.inputs.files import digest_of_files
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, VocabularyError
from calm_beam.launch.evaluate.request import SplitsRequest
from calm_beam.launch.evaluate.sweeps import checked_output, sweep_measures, without_figures, write_rows
from calm_beam.launch.flags import as_usage
from calm_beam.launch.flags.shared_options import checked_metrics, declared, metric_settings
from calm_beam.launch.runners import PipelineError, Workers, run_pipeline
from calm_beam.launch.runners.dataflow import paths_by_flag
from calm_beam.launch.terminal import PlainConsole, give, say
from calm_beam.launch.terminal.lines import PlainTable
from calm_beam.launch.terminal.progress import SCORING, shown_progress, timing_in
from calm_beam.manifest import ManifestError, PlannedTest, content_digest
from calm_beam.manifest.plan_list import AskedPlan, PlanList, home_of
from calm_beam.manifest.versions import run_versions
from calm_beam.metrics.corpus_bleu import is_bleu_available
from calm_beam.outputs import DecodeJob, StoredGenerations, stored_examples
from calm_beam.outputs.scoring import Scoring
from calm_beam.report import write_page
from calm_beam.report.line_chart import why_no_figures
from calm_beam.report.splits_page import split_notes, splits_page, write_split_figures
from calm_beam.serving.agreement import check_model, check_vocabulary, recorded_vocabulary
from calm_beam.storage import absolute, joined, replacing, staged
from calm_beam.text import counted
from calm_beam.transforms.splits import SplitGenerations, SplitSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOfGenerations:
    """The model that made generations, for facts that the generations do not contain.

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
    """Repeated splits that have been checked.

    Attributes:
      output: Directory of what is found.
      splits: How the generations are split.
      specs: What the table is about.
      measures: The generations.
      sources: The same, with what is counted of each and how it is tested.
      model: Their model; None if it is not there, and nothing needs it.
      workers: The workers that score.
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
        """Returns everything that is needed to reproduce the results."""
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
            "every layer for every token: it is only shown with others. Name another measure too."
        )
    return tuple(sources)


def _list_plans(sources: Sequence[SplitSource], splits: Splits, *, is_swept: bool) -> None:
    """Records next to each folder of generations that its losses were seen, which later plans must disclose.

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


_TABLE, _CURVES, _TRIALS, _GRID, _PROVENANCE, _PAGE = (
    "splits.csv",
    "splits_curves.csv",
    "splits_trials.parquet",
    "splits_grid.parquet",
    "splits.json",
    "splits.html",
)
_FIGURE_KINDS = ("svg", "png")
_FIGURES = tuple(f"splits_{name}.{kind}" for name in ("curves", "tradeoff") for kind in _FIGURE_KINDS)
_FILES = (_TABLE, _CURVES, _TRIALS, "splits_grid.csv", _GRID, _PROVENANCE, _PAGE, *_FIGURES)


def evaluate_splits(request: SplitsRequest, options: PipelineOptions) -> int:
    """Runs the experiment and returns the exit status of the command."""
    start = time.monotonic()
    with as_usage((ValueError, OSError)):
        run = prepare(request, options, files=_FILES)
        pipeline = run.workers.new_pipeline()
    with _as_failure(), staged(run.output) as staging:
        results = _results(run, pipeline, directory=staging)
        _write(staging, run, results=results)
    without_figures(run.output, _FIGURES)
    _tell(run, results, seconds=time.monotonic() - start)
    return 0


@contextlib.contextmanager
def _as_failure() -> Iterator[None]:
    """Turns what is wrong with values that were found good, or made here, into a failure of the run."""
    try:
        yield
    except (CalmBeamError, ValueError) as error:
        raise PipelineError(str(error)) from error


def _results(run: PreparedSplits, pipeline: beam.Pipeline, *, directory: str) -> SplitResults:
    """Scores and splits the generations; trials and grid are files in the directory then."""
    lanes = sum(len(source.plan.thresholds) for source in run.sources)
    say(
        f"scoring {counted(run.measures[0].finished.examples, 'example')} at {counted(lanes, 'threshold')} of "
        f"{counted(len(run.sources), 'measure')}"
    )
    trials, grid = joined(directory, _TRIALS), joined(directory, _GRID)
    _ = pipeline | "SplitGenerations" >> SplitGenerations(
        sources=run.sources,
        splits=run.splits,
        trials_path=trials,
        grid_path=grid,
        scoring=run.scoring,
    )
    with run.workers.shown_progress(first=SCORING):
        run_pipeline(pipeline)
    num_layers = run.sources[0].num_layers
    results = SplitResults.of(read_trials(trials), read_grid(grid), asked=run.specs, num_layers=num_layers)
    if run.speedup_prompts is None or run.model is None:
        return results
    speedups = _speedups(run, results, model=run.model, prompts=run.speedup_prompts)
    return dataclasses.replace(results, speedups=speedups)


def _speedups(
    run: PreparedSplits, results: SplitResults, *, model: ModelOfGenerations, prompts: int
) -> Mapping[tuple[str, float], Speedup]:
    """Returns the speedup at every threshold of the table, measured here."""
    # Here, since it loads JAX.
    from calm_beam.decoding.branches import Branch
    from calm_beam.decoding.early_exit import EarlyExitDecoder
    from calm_beam.inputs.prompts import encode_prompt

    measures = run.measures
    job = measures[0].job
    settings = job.settings

    def decoder(rule: ExitRule, threshold: float | None) -> EarlyExitDecoder:
        branch = Branch.at(rule, threshold, max_decode_length=settings.max_decode_length)
        return EarlyExitDecoder(model.checkpoint, branch, max_input_length=settings.max_input_length)

    rules = {measure.name: measure.rule for measure in measures}
    chosen = dict.fromkeys((each.measure, each.threshold) for each in results.table if each.threshold is not None)
    examples = [example for path in DecodeJob.shard_files(measures[0].folder) for example in stored_examples(path)]
    vocab_size = model.checkpoint.config.vocab_size
    sample = [
        encode_prompt(example, model.vocabulary, settings=settings, vocab_size=vocab_size, on_long="truncate").ids
        for example in sampled(examples, prompts)
    ]
    say(
        f"speedup: {counted(len(sample), 'prompt')} by the full model and at {counted(len(chosen), 'threshold')}, "
        "one at a time"
    )
    with shown_progress(enabled=True) as progress:
        return measure_speedups(
            # Static confidence is known without computing anything.
            decoder(ExitRule(confidence="static"), None),
            {(name, threshold): decoder(rules[name], threshold) for name, threshold in chosen},
            prompts=sample,
            max_input_length=settings.max_input_length,
            on_decoded=timing_in(progress),
        )


def _write(directory: str, run: PreparedSplits, *, results: SplitResults) -> None:
    """Writes all files but trials and grid, which are there."""
    provenance = run.provenance()
    write_rows(joined(directory, _TABLE), [summary_row(summary, results) for summary in results.table])
    write_rows(joined(directory, _CURVES), [summary_row(summary, results) for summary in results.curves])
    write_rows(joined(directory, "splits_grid.csv"), [dataclasses.asdict(row) for row in results.grid])
    with replacing(joined(directory, _PROVENANCE)) as temporary:
        temporary.write_text(json.dumps(provenance, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    write_page(splits_page(provenance, results), joined(directory, _PAGE))
    if why_no_figures() is None:
        write_split_figures(directory, _FIGURE_KINDS, results=results)


def _tell(run: PreparedSplits, results: SplitResults, *, seconds: float) -> None:
    """Prints the tables, how to read them, and where the files are."""
    console = PlainConsole()
    for table in _tables(results, with_speedup=run.speedup_prompts is not None):
        console.print(table)
    for note in split_notes(results, max_decode_length=run.measures[0].job.settings.max_decode_length):
        console.print(note)
    if not is_bleu_available():
        console.print(f"No BLEU: it needs sacrebleu, {how_to_install('metrics')}.")
    grid = results.grid
    console.print(
        f"{counted(grid[0].examples, 'example')}, {counted(grid[0].repeated, 'repeated input')}, "
        f"{max(row.failed for row in grid)} failed; "
        f"{counted(len(run.measures), 'measure')}. {seconds:.0f} s."
    )
    if grid[0].repeated:
        console.print(
            "Unless prompts repeat by themselves, repeated inputs make test parts look better than fresh data would."
        )
    console.say(f"Files: {joined(run.output, 'splits*')}")
    rows = [summary_row(summary, results) for summary in results.table]
    files = [joined(run.output, name) for name in (_TABLE, _CURVES, _PROVENANCE, _PAGE)]
    give({"experiment": "splits", "output": run.output, "rows": rows, **run.provenance()}, files=files)


def _tables(results: SplitResults, *, with_speedup: bool) -> Iterator[Table]:
    """Yields one table for each loss and its test, as the paper's Table 2: a block a tolerance, a line a measure."""
    for group in by_test(results.table):
        yield _table(group, results, with_speedup=with_speedup)


def _table(group: Sequence[Summary], results: SplitResults, *, with_speedup: bool) -> Table:
    spec = group[0].spec
    objective = spec.objective
    title = (
        f"{objective.consistency} consistency, {objective.metric} ({objective.loss} loss)\n"
        f"{spec.p_value}, {spec.procedure}, epsilon {spec.epsilon:g}"
    )
    table = PlainTable(title, padding=0)
    with_flops = any(summary.flops_appendix_b for summary in group)
    with_bleu = any(summary.bleu for summary in group)
    columns = [
        "delta",
        "measure",
        "threshold",
        f"layers\nof {results.num_layers}",
        *(["oper-\nations", "as in\nTable 2"] if with_flops else []),
        *(["speedup"] if with_speedup else []),
        "test\nrisk",
        "risk >\ndelta",
        *(["BLEU"] if with_bleu else []),
    ]
    for column in columns:
        is_name = column == "measure"
        # All columns fit into the 80 characters of a terminal, names of measures as a whole.
        table.add_column(column, justify="left" if is_name else "right", no_wrap=not is_name, min_width=10 * is_name)
    deltas = list(dict.fromkeys(summary.spec.delta for summary in group))
    for delta in deltas:
        lines = [summary for summary in group if summary.spec.delta == delta]
        for index, summary in enumerate(lines):
            table.add_row(
                f"{delta:g}" if index == 0 else "",
                summary.measure,
                "never exit" if summary.threshold is None else f"{summary.threshold:g}",
                f"{summary.layers.mean:.2f}",
                *([_change(summary.flops_appendix_b), _change(summary.flops_calm_table)] if with_flops else []),
                *([_speedup_cell(summary, results)] if with_speedup else []),
                f"{summary.test_risk.mean:.4f}",
                f"{summary.exceeding}/{summary.trials}",
                *([f"{summary.bleu.mean:.1f}" if summary.bleu else ""] if with_bleu else []),
                end_section=index == len(lines) - 1,
            )
    return table


def _speedup_cell(summary: Summary, results: SplitResults) -> str:
    if summary.threshold is None:
        return "x1.00"
    speedup = results.speedup(summary)
    return "" if speedup is None else f"x{speedup.factor.mean:.2f}"


def _change(reduction: Spread | None) -> str:
    """Returns how many operations more or fewer there are than those of the full model."""
    return "" if reduction is None else f"{1 / reduction.mean - 1:+.0%}"
