"""The experiments of `calm-beam evaluate` on a sample of prompts: each is run, measured and printed.

`propagation`: what the cache of skipped layers does to outputs whose tokens are right. `sensitivity`: what one wrong
token does to the whole output, by its position. `tradeoff`: layers per token against quality, for every confidence
measure over the grid.
"""

import dataclasses
import functools
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from apache_beam.options.pipeline_options import PipelineOptions
from rich.table import Table

from calm_beam import __version__
from calm_beam.errors import UsageError
from calm_beam.evaluation.performance import (
    Estimate,
    Measured,
    Performance,
    Task,
    Variant,
    encoded_prompts,
    measure_variants,
    measured_variants,
    propagation_variants,
    sample_in_words,
    sampled,
    tradeoff_variants,
)
from calm_beam.evaluation.sensitivity import KINDS, PerturbationDecoder, Sensitivity, measure_sensitivity
from calm_beam.exits.measures import COMPARABLE, Need, measure_named
from calm_beam.inputs.examples import DataError, Example
from calm_beam.inputs.preview import read_all_examples
from calm_beam.launch.flags import as_usage
from calm_beam.launch.flags.shared_options import checked_metrics, metric_settings
from calm_beam.launch.runners import Workers
from calm_beam.launch.runners.workers import shared_place
from calm_beam.launch.terminal import PlainConsole, give, say
from calm_beam.launch.terminal.lines import PlainTable
from calm_beam.launch.terminal.progress import shown_progress
from calm_beam.options import options_of
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.report import write_page
from calm_beam.report.experiment_page import (
    experiment_page,
    propagation_charts,
    propagation_headline,
    propagation_name,
    sensitivity_charts,
    sensitivity_headline,
    tradeoff_charts,
    tradeoff_headline,
)
from calm_beam.report.line_chart import LineChart, why_no_figures, write_figure
from calm_beam.storage import joined, replacing, staged

from .request import PropagationRequest, SampleRequest, SensitivityRequest, SweptRequest, TradeoffRequest
from .sweeps import Cell, checked_output, decoded_by, prepared_sample, sweep_workers, without_figures, write_rows

if TYPE_CHECKING:
    from calm_beam.checkpoints import Checkpoint


# Meanings of the columns of a performance, for a note below the table.
_MEANING = (
    "Quality: score against the references; change: minus the full model's; similarity: score against the full "
    "model's output; ± one standard error."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """The findings of an experiment.

    Attributes:
      rows: Every number, one mapping from column to value a line, all with the same columns.
      tables: What the terminal shows of them.
      notes: How to read the tables, a sentence or two.
      headline: What a page says first: parts of a sentence, of which every second one is a number that matters.
      charts: What is drawn of them.
    """

    rows: Sequence[Mapping[str, Cell]]
    tables: Sequence[Table]
    notes: str
    headline: Sequence[str]
    charts: Sequence[LineChart]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedExperiment:
    """An experiment that has been checked.

    Attributes:
      measure: Decodes every prompt once and scores it; calls its second argument after every prompt.
    """

    measure: Callable[[Task, Callable[[], None]], Findings]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedSweeps:
    """An experiment that sweeps ways of exiting, on any workers, and has been found good.

    Attributes:
      variants: The ways of exiting, each of which decodes every prompt once.
      findings: Returns what is found, given the task and the performance of the full model and of all variants.
    """

    variants: tuple[Variant, ...]
    findings: Callable[[Task, Sequence[Measured]], Findings]


def prepared_experiment(request: SampleRequest, run: PreparedSweep) -> PreparedExperiment | PreparedSweeps:
    """Returns what will be measured, given the model.

    Raises:
      ValueError: If what is asked for does not fit the model.
    """
    if isinstance(request, PropagationRequest):
        variants = propagation_variants(run.settings.rule.confidence, run.settings.thresholds)
        return PreparedSweeps(variants=variants, findings=_propagation_findings)
    if isinstance(request, SensitivityRequest):
        return _prepared_sensitivity(request, run)
    assert isinstance(request, TradeoffRequest)
    return _prepared_tradeoff(request, run)


def _propagation_findings(task: Task, found: Sequence[Measured]) -> Findings:
    return Findings(
        rows=[_performance_row(measured) for measured in found],
        tables=[
            _performance_table(
                "Exits that change the cache alone",
                {propagation_name(measured): measured.performance for measured in found},
                metric=task.metric,
                num_layers=task.checkpoint.config.num_decoder_layers,
            )
        ],
        notes=(
            "Every token is the last layer's prediction, so only the cache can make outputs differ. Oracle: exit at "
            "the first layer that agrees with the last. Noisy cache: exit by a confidence measure, as far as the cache "
            f"is concerned. {_MEANING}"
        ),
        headline=propagation_headline(
            [measured.performance.similarity.mean for measured in found[1:]], metric=task.metric
        ),
        charts=propagation_charts(found, metric=task.metric),
    )


def _prepared_sensitivity(request: SensitivityRequest, run: PreparedSweep) -> PreparedExperiment:
    decoder = PerturbationDecoder(
        run.checkpoint,
        positions=request.places,
        rank=request.rank,
        max_decode_length=request.max_decode_length,
        max_input_length=run.settings.max_input_length,
        batch_size=request.batch_size,
        precision=run.settings.precision,
    )
    return PreparedExperiment(measure=functools.partial(_sensitivity_findings, decoder, request.rank))


def _sensitivity_findings(decoder: PerturbationDecoder, rank: int, task: Task, decoded: Callable[[], None]) -> Findings:
    found = measure_sensitivity(task, decoder, decoded=decoded)
    if not found:
        raise DataError("no output is long enough to have one of the --positions. Name lower ones.")
    labels = {"sampling": f"last layer's choice of rank {rank}", "layer": "first layer's prediction"}
    return Findings(
        rows=[
            {
                "kind": point.kind,
                "position": point.position,
                **_estimate_cells("similarity", point.similarity),
                "replaced": point.replaced,
                "prompts": point.similarity.prompts,
            }
            for point in found
        ],
        tables=[_sensitivity_table(found, rank)],
        notes=(
            f"Similarity ({task.metric}) of the whole output to the unperturbed one if the token at that position is "
            "replaced, ± one standard error, over the prompts whose output is that long. Replaced: how often the first "
            "layer's prediction was another token."
        ),
        headline=sensitivity_headline([point for point in found if point.kind == KINDS[0]], metric=task.metric),
        charts=sensitivity_charts(found, labels, metric=task.metric),
    )


def _sensitivity_table(found: Sequence[Sensitivity], rank: int) -> Table:
    table = PlainTable("Similarity after one wrong token")
    for name in ("position", "prompts", f"sampling\n(rank {rank})", "layer\n(layer 1)", "replaced"):
        table.add_column(name, justify="right")
    points = {(point.kind, point.position): point for point in found}
    for position in sorted({point.position for point in found}):
        sampling, layer = (points[kind, position] for kind in KINDS)
        table.add_row(
            str(position),
            str(sampling.similarity.prompts),
            _shown(sampling.similarity),
            _shown(layer.similarity),
            f"{layer.replaced:.0%}",
        )
    return table


def _prepared_tradeoff(request: TradeoffRequest, run: PreparedSweep) -> PreparedSweeps:
    variants = tradeoff_variants(
        run.settings.rule,
        _tradeoff_measures(request, run.checkpoint),
        thresholds=run.settings.thresholds,
        num_layers=run.checkpoint.config.num_decoder_layers,
    )
    return PreparedSweeps(variants=variants, findings=_tradeoff_findings)


def _tradeoff_measures(request: TradeoffRequest, checkpoint: "Checkpoint") -> tuple[str, ...]:
    has_classifier = bool(checkpoint.config.exit_classifier)
    if request.measures is None:
        return tuple(name for name in COMPARABLE if has_classifier or not _needs_classifier(name))
    needing = next((name for name in request.measures if _needs_classifier(name)), None)
    if needing is not None and not has_classifier:
        raise UsageError(
            f"--confidence={needing} needs decoder/meta_cls in the checkpoint; {request.model_path} has none."
        )
    return request.measures


def _needs_classifier(name: str) -> bool:
    return measure_named(name).needs is Need.CLASSIFIER


def _tradeoff_findings(task: Task, found: Sequence[Measured]) -> Findings:
    full, *others = found
    num_layers = task.checkpoint.config.num_decoder_layers
    curves: dict[str, list[Measured]] = {}
    for measured in others:
        assert measured.rule is not None
        curves.setdefault(measured.rule.confidence, []).append(measured)
    bounds = {"full model": full.performance, "oracle": curves["oracle"][0].performance}
    for measured in curves["static"]:
        assert measured.threshold is not None
        bounds[f"static layer {round(measured.threshold * num_layers)}"] = measured.performance
    rule = others[0].rule
    assert rule is not None
    caution = " Here layers are those of the exits: every layer ran." if rule.needs_full_model() else ""
    return Findings(
        rows=[_performance_row(measured) for measured in (full, *others)],
        tables=[
            *_tradeoff_tables(curves, metric=task.metric),
            _performance_table("Bounds and baselines", bounds, metric=task.metric, num_layers=num_layers),
        ],
        notes=(
            "Oracle: exit at the first layer that predicts what the last would. Static: every token exits at that "
            f"layer. {_MEANING}{caution}"
        ),
        headline=tradeoff_headline(full.performance, curves["oracle"][0].performance, metric=task.metric),
        charts=tradeoff_charts(full, curves, metric=task.metric),
    )


# So many fit into 80 columns.
_MEASURES_PER_TABLE = 3


def _tradeoff_tables(curves: dict[str, list[Measured]], *, metric: str) -> Iterator[Table]:
    """Yields layers and score of every measure at every threshold, some measures a table."""
    measures = [name for name in curves if name in COMPARABLE]
    has_references = curves[measures[0]][0].performance.quality is not None
    title = f"Layers per token and {'quality' if has_references else 'similarity'} ({metric})"
    for start in range(0, len(measures), _MEASURES_PER_TABLE):
        some = measures[start : start + _MEASURES_PER_TABLE]
        table = PlainTable(title)
        table.add_numbers("threshold", *some)
        for row in zip(*(curves[name] for name in some), strict=True):
            cells = []
            for measured in row:
                score = measured.performance.quality if has_references else measured.performance.similarity
                assert score is not None
                cells.append(f"{measured.performance.layers.mean:.2f}  {score.mean:.4f}")
            table.add_row(f"{row[0].threshold:g}", *cells)
        yield table


def _performance_row(measured: Measured) -> dict[str, Cell]:
    """Returns every number of a performance, and what it belongs to: no rule and no threshold is the full model."""
    rule, performance = measured.rule, measured.performance
    return {
        "confidence": rule.confidence if rule else None,
        "state_propagation": rule.state_propagation if rule else None,
        "token_from": rule.token_from if rule else None,
        "threshold": measured.threshold,
        **_estimate_cells("layers", performance.layers),
        **_estimate_cells("similarity", performance.similarity),
        **_estimate_cells("quality", performance.quality),
        **_estimate_cells("quality_change", performance.quality_change),
        "prompts": performance.layers.prompts,
    }


def _performance_table(title: str, performances: Mapping[str, Performance], *, metric: str, num_layers: int) -> Table:
    """Returns a table with one line per name; scores against references only if there are any."""
    table = PlainTable(f"{title} ({metric})", collapse_padding=True)
    table.add_column("", overflow="fold")
    has_references = any(performance.quality is not None for performance in performances.values())
    table.add_numbers(f"layers\nof {num_layers}", *(["quality", "change"] if has_references else []), "similarity")
    for name, performance in performances.items():
        quality = [_shown(performance.quality, with_error=False), _shown(performance.quality_change, signed=True)]
        table.add_row(
            name,
            _shown(performance.layers, digits=2, with_error=False),
            *(quality if has_references else []),
            _shown(performance.similarity),
        )
    return table


def _estimate_cells(name: str, estimate: Estimate | None) -> dict[str, Cell]:
    """Returns an estimate as two columns; both empty for None."""
    mean, error = (None, None) if estimate is None else (estimate.mean, estimate.standard_error)
    return {name: mean, f"{name}_standard_error": error}


def _shown(estimate: Estimate | None, *, digits: int = 4, signed: bool = False, with_error: bool = True) -> str:
    """Returns an estimate and its standard error for a table, as in `0.3824 ± 0.0031`; nothing for None."""
    if estimate is None:
        return ""
    mean = f"{estimate.mean:{'+' if signed else ''}.{digits}f}"
    if not with_error or estimate.standard_error is None:
        return mean
    return f"{mean} ± {estimate.standard_error:.{digits}f}"


def run_experiment(request: SampleRequest, options: PipelineOptions | None) -> int:
    """Runs an experiment, prints its findings and returns the exit status of the command.

    Args:
      request: What is asked for.
      options: Beam's, where it has sweeps; None where it runs without Beam.
    """
    name = request.experiment
    with as_usage((ValueError, OSError)):
        if request.is_demo:
            say("no --checkpoint and no --data: the demo model on the demo data")
        output = checked_output(request, _file_names(name))
        (metric,) = checked_metrics([request.metric], metric_settings(request))
        workers = None
        if options is not None and isinstance(request, SweptRequest):
            workers = sweep_workers(request, options)
        run = prepared_sample(request, runs_here=workers is None or workers.are_here)
        if workers is not None:
            run = run.without_weights()
        prepared = prepared_experiment(request, run)
        examples = read_all_examples(run.paths, run.reading)
        chosen = sampled(examples, request.max_examples)
        task = _task(request, run, metric=metric, examples=chosen)
        place = None if workers is None else shared_place(workers)
    start = time.monotonic()
    with staged(output) as staging:
        if isinstance(prepared, PreparedSweeps) and workers is not None and place is not None:
            findings = _on_workers(prepared, task, examples=chosen, run=run, workers=workers, place=place)
        else:
            findings = _in_this_process(prepared, task)
        sample = sample_in_words(task.prompts, len(examples))
        provenance = {"sample": sample, **_provenance(request, run, metric=metric)}
        _write(staging, name, findings=findings, provenance=provenance)
    console = PlainConsole()
    for table in findings.tables:
        console.print(table)
    console.print(findings.notes)
    names = _file_names(name)
    left_out = (_figure(name),) if without_figures(output, [_figure(name)]) else ()
    files = [joined(output, file) for file in names if file not in left_out]
    give({"experiment": name, "output": output, "rows": findings.rows, **provenance}, files=files)
    console.print(f"{sample} {time.monotonic() - start:.0f} s.")
    console.say(f"Files: {', '.join(files)}")
    return 0


def _in_this_process(prepared: PreparedExperiment | PreparedSweeps, task: Task) -> Findings:
    """Returns what an experiment finds that decodes one prompt after the other here."""
    passes = len(prepared.variants) if isinstance(prepared, PreparedSweeps) else 1
    with shown_progress(enabled=True, unit="prompts" if passes == 1 else "outputs") as progress:
        progress.report("read", passes * len(task.prompts))
        progress.report("compiling", 1)

        def decoded() -> None:
            progress.report("decoded", 1)

        if isinstance(prepared, PreparedSweeps):
            return prepared.findings(task, measure_variants(task, prepared.variants, decoded=decoded))
        return prepared.measure(task, decoded)


def _on_workers(
    prepared: PreparedSweeps,
    task: Task,
    *,
    examples: Sequence[Example],
    run: PreparedSweep,
    workers: Workers,
    place: str,
) -> Findings:
    """Returns what an experiment finds whose sweeps are decoded by others."""
    with workers.shown_progress(unit="prompts" if len(prepared.variants) == 1 else "outputs") as progress:
        progress.report("read", len(prepared.variants) * len(examples))
        generations = (
            decoded_by(workers, examples, variant, run=run, place=place, progress=progress)
            for variant in prepared.variants
        )
        return prepared.findings(task, measured_variants(task, prepared.variants, generations))


def _task(request: SampleRequest, run: PreparedSweep, *, metric: str, examples: Sequence[Example]) -> Task:
    return Task(
        checkpoint=run.checkpoint,
        vocabulary=run.vocabulary,
        prompts=encoded_prompts(run, examples),
        metric=metric,
        metric_settings=metric_settings(request),
        max_input_length=run.settings.max_input_length,
        max_decode_length=request.max_decode_length,
        precision=run.settings.precision,
        **request.asked_of_decoder(),
    )


def _provenance(request: SampleRequest, run: PreparedSweep, *, metric: str) -> dict[str, Any]:
    """Returns what it takes to measure the same again."""
    packages = ("jax", "flax", "numpy", "rouge-score", "sentencepiece")
    left_out = (
        *("experiment", "output", "overwrite"),
        # The choice of workers does not change outputs.
        *("accelerator", "model_copies", "model_parallelism", "num_shards"),
    )
    asked = {name: getattr(request, name) for name, _ in options_of(type(request)) if name not in left_out}
    asked |= {"metric": metric, "checkpoint": request.model_path, "data": request.patterns}
    return {
        "flags": dict(sorted(asked.items())),
        "model": {"fingerprint": run.model_fingerprint, "layers": run.checkpoint.config.num_decoder_layers},
        "vocabulary": run.vocabulary.fingerprint if run.vocabulary else None,
        "software": {
            "calm-beam": __version__,
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in packages},
        },
    }


def _file_names(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{suffix}" for suffix in ("csv", "json", "svg", "html"))


def _figure(name: str) -> str:
    return f"{name}.svg"


def _write(directory: str, name: str, *, findings: Findings, provenance: dict[str, Any]) -> None:
    table, content, plot, page = (joined(directory, file) for file in _file_names(name))
    write_rows(table, findings.rows)
    text = json.dumps({"experiment": name, **provenance, "rows": findings.rows}, ensure_ascii=False, indent=1)
    with replacing(content) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    if why_no_figures() is None:
        write_figure(plot, [findings.charts], note="bars and bands: ± one standard error")
    write_page(
        experiment_page(
            name,
            headline=findings.headline,
            notes=findings.notes,
            charts=findings.charts,
            rows=findings.rows,
            provenance=provenance,
        ),
        page,
    )
