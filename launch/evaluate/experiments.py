"""The experiments of `calm-beam evaluate` on a sample of prompts: what each measures, and what is told of it.

`propagation`: what the cache of skipped layers does to outputs whose tokens are right. `sensitivity`: what one wrong
token does to the whole output, by its position. `tradeoff`: layers per token against quality, for every confidence
measure over the grid.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from calm_beam.errors import UsageError
from calm_beam.evaluation.performance import (
    Measured,
    Performance,
    Task,
    Variant,
    propagation_variants,
    tradeoff_variants,
)
from calm_beam.evaluation.sample import Estimate
from calm_beam.evaluation.sensitivity import KINDS, Sensitivity, measure_sensitivity
from calm_beam.exits.measures import COMPARABLE, Need, measure_named
from calm_beam.inputs.examples import DataError
from calm_beam.launch.terminal.tables import PlainTable
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.report.experiment_page import (
    propagation_charts,
    propagation_headline,
    propagation_name,
    sensitivity_charts,
    sensitivity_headline,
    tradeoff_charts,
    tradeoff_headline,
)
from calm_beam.report.line_chart import LineChart

from .output import Cell
from .request import PropagationRequest, SampleRequest, SensitivityRequest, TradeoffRequest

if TYPE_CHECKING:
    from calm_beam.checkpoints import Checkpoint
    from calm_beam.evaluation.perturbation import PerturbationDecoder

# What the columns of a performance mean, for a note below the table.
_MEANING = (
    "Quality: score against the references; change: less the full model's; similarity: score against the full model's "
    "output; ± one standard error."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What an experiment found.

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
    """An experiment that has been found good.

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
    from calm_beam.evaluation.perturbation import PerturbationDecoder

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


def _sensitivity_findings(
    decoder: "PerturbationDecoder", rank: int, task: Task, decoded: Callable[[], None]
) -> Findings:
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
            _tradeoff_table(curves, metric=task.metric),
            _performance_table("Bounds and baselines", bounds, metric=task.metric, num_layers=num_layers),
        ],
        notes=(
            "Oracle: exit at the first layer that predicts what the last would. Static: every token exits at that "
            f"layer. {_MEANING}{caution}"
        ),
        headline=tradeoff_headline(full.performance, curves["oracle"][0].performance, metric=task.metric),
        charts=tradeoff_charts(full, curves, metric=task.metric),
    )


def _tradeoff_table(curves: dict[str, list[Measured]], *, metric: str) -> Table:
    """Returns layers and score of every measure at every threshold."""
    measures = [name for name in curves if name in COMPARABLE]
    has_references = curves[measures[0]][0].performance.quality is not None
    title = f"Layers per token and {'quality' if has_references else 'similarity'} ({metric})"
    table = PlainTable(title)
    table.add_numbers("threshold", *measures)
    for row in zip(*(curves[name] for name in measures), strict=True):
        cells = []
        for measured in row:
            score = measured.performance.quality if has_references else measured.performance.similarity
            assert score is not None
            cells.append(f"{measured.performance.layers.mean:.2f}  {score.mean:.4f}")
        table.add_row(f"{row[0].threshold:g}", *cells)
    return table


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
