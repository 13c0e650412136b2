"""What `calm-beam evaluate --experiment=splits` does once its flags are parsed."""

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.plan import plan_of
from calm_beam.errors import CalmBeamError
from calm_beam.evaluation.files import read_grid, read_trials
from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.evaluation.outcomes import GridRow, Summary, TrialOutcome, summaries
from calm_beam.evaluation.output_counts import OutputCounter
from calm_beam.evaluation.sample import sampled
from calm_beam.evaluation.speedup import Speedups
from calm_beam.evaluation.splits import Splits
from calm_beam.exits.measures import check_may_run
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.files import digest_of_files
from calm_beam.launch.evaluate.output import checked_output, staged, write_rows
from calm_beam.launch.evaluate.sweeps import sweep_measures
from calm_beam.launch.flags import UsageError, as_usage, refuse_decoding_flags
from calm_beam.launch.flags.metrics import metric_settings
from calm_beam.launch.flags.model import declared
from calm_beam.launch.runners import PipelineError, Workers, run_pipeline
from calm_beam.launch.runners.dataflow import job_paths
from calm_beam.launch.terminal import PlainConsole, say
from calm_beam.manifest import PlannedTest, content_digest
from calm_beam.manifest.plan_list import AskedPlan, PlanList, home_of
from calm_beam.manifest.versions import run_versions
from calm_beam.metrics.corpus_bleu import is_bleu_available
from calm_beam.outputs import DecodeJob, StoredGenerations, stored_examples
from calm_beam.report import write_page
from calm_beam.report.figures import check_plots_available
from calm_beam.report.splits_page import split_notes, splits_page, write_split_figures
from calm_beam.storage import joined, replacing
from calm_beam.text.counted import counted
from calm_beam.transforms.splits import SplitGenerations, SplitSource

from .flags import ALSO_OF_STORED, asked_specs, fill_in_metric, fill_in_task
from .sources import ModelOfGenerations, StoredMeasure, find_measures, find_model, have_references
from .tables import summary_row, summary_tables

_TABLE, _CURVES, _TRIALS, _GRID, _PROVENANCE, _PAGE = (
    "splits.csv",
    "splits_curves.csv",
    "splits_trials.parquet",
    "splits_grid.parquet",
    "splits.json",
    "splits.html",
)
# Flags of what workers read or write.
_WORKERS_PATHS = ("checkpoint", "vocabulary", "data", "generations", "bleurt_checkpoint", "output")
_FIGURE_KINDS = ("svg", "png")
_FIGURES = tuple(f"splits_{name}.{kind}" for name in ("curves", "tradeoff") for kind in _FIGURE_KINDS)
_FILES = (_TABLE, _CURVES, _TRIALS, "splits_grid.csv", _GRID, _PROVENANCE, _PAGE, *_FIGURES)


def evaluate_splits(flags: argparse.Namespace, options: PipelineOptions, *, argv: Sequence[str]) -> int:
    """Runs the experiment and returns the exit status of the command.

    Args:
      flags: Of `split_parser`.
      options: Beam's.
      argv: What both were made of.
    """
    start = time.monotonic()
    with as_usage((ValueError, OSError)):
        output = checked_output(flags, _FILES)
        is_swept = flags.generations is None
        Workers(options=options).refuse_template(command="evaluate")
        check_plots_available()
        splits = Splits(trials=flags.trials, calibration_share=flags.calibration_share, seed=flags.seed)
        fill_in_metric(flags)
        # Before sweeps, which take their time.
        asked_specs(flags, flags.consistency or ("textual",))
        if is_swept:
            fill_in_task(flags)
            flags.generations = sweep_measures(_swept_measures(flags), flags, options=options, output=output)
        else:
            refuse_decoding_flags(argv, ",".join(flags.generations), allowed=ALSO_OF_STORED, also=("--accelerator",))
        measures = find_measures(flags.generations)
        workers = Workers.prepared(
            options,
            # Sweeps had it; scoring needs none.
            accelerator=None,
            paths=job_paths(flags, _WORKERS_PATHS),
            num_shards=lambda: sum(len(measure.finished.shards) for measure in measures),
        )
        has_references = have_references(measures[0])
        consistencies = _consistencies(flags, measures[0], has_references=has_references)
        specs, curve = asked_specs(flags, consistencies)
        model = find_model(
            measures[0], checkpoint=flags.checkpoint, declared=declared(flags), vocabulary=flags.vocabulary
        )
        if flags.speedup and model is None:
            raise UsageError("--speedup needs the model: pass --checkpoint.")
        sources = _sources(
            flags,
            measures,
            model=model,
            specs=tuple(dict.fromkeys((*specs, *curve))),
            with_bleu=has_references and is_bleu_available(),
        )
        _list_plans(sources, splits, is_swept=is_swept)
        pipeline = workers.new_pipeline()
    with _as_failure():
        lanes = sum(len(source.plan.thresholds) for source in sources)
        say(
            f"scoring {counted(measures[0].finished.examples, 'example')} at {counted(lanes, 'threshold')} of "
            f"{counted(len(sources), 'measure')}"
        )
        with staged(output) as staging:
            trials, whole = joined(staging, _TRIALS), joined(staging, _GRID)
            _ = pipeline | "SplitGenerations" >> SplitGenerations(
                sources=sources,
                splits=splits,
                trials_path=trials,
                grid_path=whole,
                max_failures=flags.max_failures,
                metric_settings=metric_settings(flags),
            )
            run_pipeline(pipeline)
            outcomes, grid = read_trials(trials), read_grid(whole)
            found = summaries(outcomes)
            table = [summary for summary in found if summary.spec in specs]
            speedups = _speedups(flags, measures, model=model, table=table) if flags.speedup and model else {}
            _write(
                staging,
                _provenance(flags, measures, splits=splits, specs=specs),
                found=found,
                table=table,
                trials=outcomes,
                grid=grid,
                speedups=speedups,
                num_layers=sources[0].num_layers,
            )
    console = PlainConsole()
    for each in summary_tables(table, speedups, num_layers=sources[0].num_layers, with_speedup=bool(flags.speedup)):
        console.print(each)
    for note in split_notes(table, grid, max_decode_length=measures[0].job.settings.max_decode_length):
        console.print(note)
    if not is_bleu_available():
        console.print("No BLEU: it needs sacrebleu, pip install 'calm-beam[metrics]'.")
    console.print(
        f"{counted(grid[0].examples, 'example')}, {counted(grid[0].repeated, 'repeated input')}, "
        f"{max(row.failed for row in grid)} failed; "
        f"{counted(len(measures), 'measure')}. {time.monotonic() - start:.0f} s."
    )
    if grid[0].repeated:
        console.print(
            "Unless prompts repeat by themselves, repeated inputs make test parts look better than fresh data would."
        )
    console.print(f"Files: {joined(output, 'splits*')}", soft_wrap=True)
    return 0


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
        if is_swept:
            data = digest_of_files(source.stored.job.files)
        else:
            data = plans.data_of_outputs() or source.finished.digest()
        asked = AskedPlan(plan=digest, tests=digest, data=data, command="evaluate", decodes=is_swept)
        plans.ask(asked, is_answered=True)


@contextlib.contextmanager
def _as_failure() -> Iterator[None]:
    """Turns what is wrong with values that were found good, or made here, into a failure of the run."""
    try:
        yield
    except (CalmBeamError, ValueError) as error:
        raise PipelineError(str(error)) from error


def _swept_measures(flags: argparse.Namespace) -> tuple[str, ...]:
    """Returns the measures to sweep: those asked for, or the usual ones that the model has."""
    from calm_beam.checkpoints import load_checkpoint

    if flags.confidences is not None:
        asked: tuple[str, ...] = flags.confidences
        return asked
    checkpoint = load_checkpoint(flags.checkpoint, declared=declared(flags))
    return ("softmax", "state", *(("classifier",) if checkpoint.config.exit_classifier else ()))


def _consistencies(flags: argparse.Namespace, measure: StoredMeasure, *, has_references: bool) -> tuple[str, ...]:
    """Returns the kinds of consistency: those asked for, or all that the data allow."""
    if flags.consistency is None:
        return ("textual", "risk") if has_references else ("textual",)
    if "risk" in flags.consistency and not has_references:
        raise UsageError(f"--consistency=risk needs references, and not every example in {measure.folder} has some.")
    asked: tuple[str, ...] = flags.consistency
    return asked


def _sources(
    flags: argparse.Namespace,
    measures: Sequence[StoredMeasure],
    *,
    model: ModelOfGenerations | None,
    specs: tuple[PlannedTest, ...],
    with_bleu: bool,
) -> tuple[SplitSource, ...]:
    sizes = DecoderSizes.of(model.checkpoint.config) if model else None
    sources = []
    for measure in measures:
        job = measure.job
        check_may_run(job.settings.rule.confidence, named=flags.confidences or ())
        if measure.finished.failed and flags.on_error == "fail":
            raise UsageError(
                f"{measure.finished.failed} of the examples in {measure.folder} could not be decoded. Pass "
                "--on_error=worst_case to count them with loss 1 at every threshold."
            )
        sources.append(
            SplitSource(
                measure=measure.name,
                plan=plan_of(
                    specs,
                    job.settings,
                    model=job.model.fingerprint,
                    vocabulary=job.vocabulary_identity(),
                    cluster_key=job.cluster_key,
                    on_error=flags.on_error,
                    on_long=job.on_long,
                ),
                stored=StoredGenerations(directory=measure.folder, job=job),
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


def _speedups(
    flags: argparse.Namespace,
    measures: Sequence[StoredMeasure],
    *,
    model: ModelOfGenerations,
    table: Sequence[Summary],
) -> Speedups:
    """Returns the speedup at every threshold of the table, measured here."""
    # Here, since it loads JAX.
    from calm_beam.decoding.branches import Branch
    from calm_beam.decoding.early_exit import EarlyExitDecoder
    from calm_beam.decoding.prompts import encode_prompt
    from calm_beam.evaluation.speedup import measure_speedups

    job = measures[0].job
    settings = job.settings

    def decoder(rule: ExitRule, threshold: float | None) -> EarlyExitDecoder:
        branch = Branch.at(rule, threshold, max_decode_length=settings.max_decode_length)
        return EarlyExitDecoder(model.checkpoint, branch, max_input_length=settings.max_input_length)

    rules = {measure.name: measure.rule for measure in measures}
    chosen = dict.fromkeys((each.measure, each.threshold) for each in table if each.threshold is not None)
    examples = [example for path in DecodeJob.shard_files(measures[0].folder) for example in stored_examples(path)]
    vocab_size = model.checkpoint.config.vocab_size
    prompts = [
        encode_prompt(example, model.vocabulary, settings=settings, vocab_size=vocab_size, on_long="truncate").ids
        for example in sampled(examples, flags.speedup_prompts)
    ]
    say(
        f"speedup: {counted(len(prompts), 'prompt')} by the full model and at {counted(len(chosen), 'threshold')}, "
        "one at a time"
    )
    return measure_speedups(
        # Static confidence is known without computing anything.
        decoder(ExitRule(confidence="static"), None),
        {(name, threshold): decoder(rules[name], threshold) for name, threshold in chosen},
        prompts=prompts,
        max_input_length=settings.max_input_length,
    )


def _provenance(
    flags: argparse.Namespace, measures: Sequence[StoredMeasure], *, splits: Splits, specs: Sequence[PlannedTest]
) -> dict[str, Any]:
    """Returns what it takes to find the same again."""
    job = measures[0].job
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
            for measure in measures
        ],
        "splits": dataclasses.asdict(splits),
        "model": job.model.to_dict(),
        "data": job.patterns,
        "cluster_key": job.cluster_key,
        "max_decode_length": job.settings.max_decode_length,
        "on_error": flags.on_error,
        "speedup_prompts": flags.speedup_prompts if flags.speedup else None,
        "software": run_versions(job.software, metrics={spec.objective.metric for spec in specs}),
    }


def _write(
    directory: str,
    provenance: Mapping[str, Any],
    *,
    found: Sequence[Summary],
    table: Sequence[Summary],
    trials: Sequence[TrialOutcome],
    grid: Sequence[GridRow],
    speedups: Speedups,
    num_layers: int,
) -> None:
    write_rows(joined(directory, _TABLE), [summary_row(summary, speedups) for summary in table])
    write_rows(joined(directory, _CURVES), [summary_row(summary, speedups) for summary in found])
    write_rows(joined(directory, "splits_grid.csv"), [dataclasses.asdict(row) for row in grid])
    with replacing(joined(directory, _PROVENANCE)) as temporary:
        temporary.write_text(json.dumps(provenance, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    page = splits_page(
        provenance,
        found=found,
        asked=table,
        trials=trials,
        grid=grid,
        speedups=speedups,
        num_layers=num_layers,
    )
    write_page(page, joined(directory, _PAGE))
    write_split_figures(directory, _FIGURE_KINDS, found=found, grid=grid, num_layers=num_layers)
