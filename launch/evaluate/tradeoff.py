"""`--experiment=tradeoff`: layers per token against quality, for every confidence measure over the grid."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.evaluation.performance import Measured, Performance
from calm_beam.evaluation.task import Task
from calm_beam.evaluation.tradeoff import tradeoff_variants
from calm_beam.exits.measures import COMPARABLE, Need, measure_named
from calm_beam.launch.flags import UsageError
from calm_beam.launch.setup_run import decode_settings
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.report.experiment_page import tradeoff_charts

from .experiment import Experiment, Findings, PreparedSweeps
from .performance_rows import MEANING, performance_row, performance_table

if TYPE_CHECKING:
    from calm_beam.checkpoints import Checkpoint


def _settings(flags: argparse.Namespace) -> DecodeSettings:
    for name in flags.confidences or ():
        if name not in COMPARABLE:
            raise UsageError(
                f"--confidence must list measures of {', '.join(COMPARABLE)}, got {name!r}. Static layers and the "
                "oracle are always measured beside them."
            )
    if len(set(flags.confidences or ())) < len(flags.confidences or ()):
        raise UsageError(f"--confidence must list different measures, got {', '.join(flags.confidences)}.")
    # The first stands for all of them.
    return decode_settings(flags, confidence=COMPARABLE[0])


def _prepare(flags: argparse.Namespace, run: PreparedSweep) -> PreparedSweeps:
    variants = tradeoff_variants(
        run.settings.rule,
        _confidences(flags, run.checkpoint),
        thresholds=run.settings.thresholds,
        num_layers=run.checkpoint.config.num_decoder_layers,
    )
    return PreparedSweeps(variants=variants, findings=_findings)


def _confidences(flags: argparse.Namespace, checkpoint: "Checkpoint") -> tuple[str, ...]:
    has_classifier = bool(checkpoint.config.exit_classifier)
    if flags.confidences is None:
        return tuple(name for name in COMPARABLE if has_classifier or not _needs_classifier(name))
    needing = next((name for name in flags.confidences if _needs_classifier(name)), None)
    if needing is not None and not has_classifier:
        raise UsageError(
            f"--confidence={needing} needs decoder/meta_cls in the checkpoint; {flags.checkpoint} has none."
        )
    confidences: tuple[str, ...] = flags.confidences
    return confidences


def _needs_classifier(name: str) -> bool:
    return measure_named(name).needs is Need.CLASSIFIER


def _findings(task: Task, found: Sequence[Measured]) -> Findings:
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
        rows=[performance_row(measured) for measured in (full, *others)],
        tables=[
            _grid_table(curves, metric=task.metric),
            performance_table("Bounds and baselines", bounds, metric=task.metric, num_layers=num_layers),
        ],
        notes=(
            "Oracle: exit at the first layer that predicts what the last would. Static: every token exits at that "
            f"layer. {MEANING}{caution}"
        ),
        headline=_headline(full.performance, curves["oracle"][0].performance, metric=task.metric),
        charts=tradeoff_charts(full, curves, metric=task.metric),
    )


def _headline(full: Performance, oracle: Performance, *, metric: str) -> tuple[str, ...]:
    scores = [each.similarity if each.quality is None else each.quality for each in (full, oracle)]
    against = "the full model’s outputs" if full.quality is None else "the references"
    return (
        "The full model uses ",
        f"{full.layers.mean:g} layers",
        " and scores ",
        f"{scores[0].mean:.3f} {metric}",
        f" against {against}. The oracle, which exits as early as the last layer’s token allows, uses ",
        f"{oracle.layers.mean:.2f}",
        " and scores ",
        f"{scores[1].mean:.3f}",
        ".",
    )


def _grid_table(curves: dict[str, list[Measured]], *, metric: str) -> Table:
    """Returns layers and score of every measure at every threshold."""
    measures = [name for name in curves if name in COMPARABLE]
    has_references = curves[measures[0]][0].performance.quality is not None
    title = f"Layers per token and {'quality' if has_references else 'similarity'} ({metric})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("threshold", justify="right", no_wrap=True)
    for name in measures:
        table.add_column(name, justify="right", no_wrap=True)
    for row in zip(*(curves[name] for name in measures), strict=True):
        cells = []
        for measured in row:
            score = measured.performance.quality if has_references else measured.performance.similarity
            assert score is not None
            cells.append(f"{measured.performance.layers.mean:.2f}  {score.mean:.4f}")
        table.add_row(f"{row[0].threshold:g}", *cells)
    return table


TRADEOFF = Experiment(settings=_settings, prepare=_prepare)
