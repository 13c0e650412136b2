"""What `calm-beam evaluate --experiment=splits` does once its flags are parsed: prepare, run, write, tell."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from rich.table import Table

from calm_beam.errors import CalmBeamError
from calm_beam.evaluation.files import read_grid, read_trials, summary_row
from calm_beam.evaluation.outcomes import SplitResults, Spread, Summary, by_test
from calm_beam.evaluation.sample import sampled
from calm_beam.evaluation.speedup import Speedup
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.evaluate.output import write_rows
from calm_beam.launch.flags import as_usage
from calm_beam.launch.runners import PipelineError, run_pipeline
from calm_beam.launch.terminal import PlainConsole, give, say
from calm_beam.launch.terminal.tables import PlainTable
from calm_beam.metrics.corpus_bleu import is_bleu_available
from calm_beam.outputs import DecodeJob, stored_examples
from calm_beam.report import write_page
from calm_beam.report.splits_page import split_notes, splits_page, write_split_figures
from calm_beam.storage import joined, replacing, staged
from calm_beam.text import counted
from calm_beam.transforms.splits import SplitGenerations

from .prepare import ModelOfGenerations, PreparedSplits, prepare
from .request import SplitsRequest

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
    from calm_beam.evaluation.speedup import measure_speedups
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
    return measure_speedups(
        # Static confidence is known without computing anything.
        decoder(ExitRule(confidence="static"), None),
        {(name, threshold): decoder(rules[name], threshold) for name, threshold in chosen},
        prompts=sample,
        max_input_length=settings.max_input_length,
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
    write_split_figures(directory, _FIGURE_KINDS, results=results)


def _tell(run: PreparedSplits, results: SplitResults, *, seconds: float) -> None:
    """Prints the tables, how to read them, and where the files are."""
    console = PlainConsole()
    for table in _tables(results, with_speedup=run.speedup_prompts is not None):
        console.print(table)
    for note in split_notes(results, max_decode_length=run.measures[0].job.settings.max_decode_length):
        console.print(note)
    if not is_bleu_available():
        console.print("No BLEU: it needs sacrebleu, pip install 'calm-beam[metrics]'.")
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
    console.print(f"Files: {joined(run.output, 'splits*')}", soft_wrap=True)
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
