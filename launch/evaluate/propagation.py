"""`--experiment=propagation`: what the cache of skipped layers does to outputs whose tokens are right."""

import argparse
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from calm_beam.decoding.settings import DecodeSettings, descending_grid
from calm_beam.evaluation.performance import Measured
from calm_beam.evaluation.propagation import propagation_variants
from calm_beam.evaluation.task import Task
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.flags import arithmetic_of
from calm_beam.model.input_length import USUAL_INPUT_LENGTH
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.report.figures import BLACK, COLOURS, GREY, tidy

from .experiment import Experiment, Findings, PreparedSweeps
from .performance_rows import MEANING, performance_row, performance_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from calm_beam.report.line_chart import LineChart


def _settings(flags: argparse.Namespace) -> DecodeSettings:
    return DecodeSettings(
        rule=ExitRule(confidence=flags.confidence, token_from="last_layer"),
        thresholds=descending_grid(flags.thresholds),
        max_input_length=flags.max_input_length or USUAL_INPUT_LENGTH,
        max_decode_length=flags.max_decode_length,
        task_prefix=flags.task_prefix,
        arithmetic=arithmetic_of(flags),
    )


def _prepare(flags: argparse.Namespace, run: PreparedSweep) -> PreparedSweeps:
    variants = propagation_variants(run.settings.rule.confidence, run.settings.thresholds)
    return PreparedSweeps(variants=variants, findings=_findings)


def _findings(task: Task, found: Sequence[Measured]) -> Findings:
    return Findings(
        rows=[performance_row(measured) for measured in found],
        tables=[
            performance_table(
                "Exits that change the cache alone",
                {_name(measured): measured.performance for measured in found},
                metric=task.metric,
                num_layers=task.checkpoint.config.num_decoder_layers,
            )
        ],
        notes=(
            "Every token is the last layer's prediction, so only the cache can make outputs differ. Oracle: exit at "
            "the first layer that agrees with the last. Noisy cache: exit by a confidence measure, as far as the cache "
            f"is concerned. {MEANING}"
        ),
        draw=functools.partial(_draw, found, task.metric),
        headline=_headline([measured.performance.similarity.mean for measured in found[1:]], metric=task.metric),
        charts=_charts(found, metric=task.metric),
    )


def _name(measured: Measured) -> str:
    rule = measured.rule
    if rule is None:
        return "full model"
    if rule.token_from == "last_layer":
        return f"noisy cache, {rule.confidence} {measured.threshold:g}"
    return f"oracle, {rule.state_propagation}"


def _headline(similarities: Sequence[float], *, metric: str) -> tuple[str, ...]:
    return (
        "Outputs of which exits have changed the cache alone score ",
        f"{min(similarities):.3f} to {max(similarities):.3f} {metric}",
        " against the full model’s outputs.",
    )


def _charts(found: Sequence[Measured], *, metric: str) -> "list[LineChart]":
    from calm_beam.report.line_chart import FULL, Line, LineChart, around

    fields = [("Similarity", "score against the full model's output", "similarity")]
    if found[0].performance.quality is not None:
        fields.insert(0, ("Change of quality", "score against the references, less the full model's", "quality_change"))
    styles = {name: place for place, name in enumerate(dict.fromkeys(map(_name, found[1:])))}
    return [
        LineChart(
            title=title,
            x_name="decoder layers per token",
            y_name=f"{metric}, {label}",
            lines=[
                Line(
                    name=_name(measured),
                    points=[(measured.performance.layers.mean, score.mean)],
                    ends=around([score.mean], [score.standard_error]),
                    style=styles[_name(measured)] % FULL if measured.rule else FULL,
                )
                for measured, score in ((each, getattr(each.performance, field)) for each in found)
            ],
        )
        for title, label, field in fields
    ]


def _draw(found: Sequence[Measured], metric: str, figure: "Figure") -> None:
    names = [f"{_name(measured)}\n{measured.performance.layers.mean:.2f} layers per token" for measured in found]
    panels = [("score against the\nfull model's output", "similarity")]
    if found[0].performance.quality is not None:
        panels.insert(0, ("score against the references,\nless the full model's", "quality_change"))
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (label, field) in zip(all_axes, panels, strict=True):
        estimates = [getattr(measured.performance, field) for measured in found]
        axes.axvline(estimates[0].mean, color=GREY, linestyle="--", linewidth=1)
        for row, (measured, estimate) in enumerate(zip(found, estimates, strict=True)):
            axes.errorbar(
                estimate.mean, row, xerr=estimate.standard_error, color=_colour(measured), marker="o", capsize=3
            )
        axes.set_xlabel(label)
        tidy(axes)
    all_axes[0].set_yticks(range(len(found)), names)
    all_axes[0].invert_yaxis()
    figure.supxlabel(f"{metric}; bars: ± one standard error", fontsize="medium")


def _colour(measured: Measured) -> str:
    if measured.rule is None:
        return BLACK
    return COLOURS[0] if measured.rule.token_from == "exit_layer" else COLOURS[1]


PROPAGATION = Experiment(settings=_settings, prepare=_prepare)
