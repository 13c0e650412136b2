"""`--experiment=sensitivity`: what one wrong token does to the whole output, by its position."""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from calm_beam.evaluation.sensitivity import KINDS, Sensitivity, measure_sensitivity
from calm_beam.evaluation.task import Task
from calm_beam.inputs.examples import DataError
from calm_beam.launch.setup_run import full_model_settings
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.report.figures import COLOURS, GREY, tidy

from .experiment import Experiment, Findings, PreparedExperiment, estimate_cells, shown
from .flags import DEFAULT_POSITIONS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from calm_beam.evaluation.perturbation import PerturbationDecoder
    from calm_beam.report.line_chart import LineChart


def _prepare(flags: argparse.Namespace, run: PreparedSweep) -> PreparedExperiment:
    from calm_beam.evaluation.perturbation import PerturbationDecoder

    positions = flags.positions or tuple(range(min(DEFAULT_POSITIONS, flags.max_decode_length)))
    decoder = PerturbationDecoder(
        run.checkpoint,
        positions=positions,
        rank=flags.rank,
        max_decode_length=flags.max_decode_length,
        max_input_length=run.settings.max_input_length,
        batch_size=flags.batch_size,
        arithmetic=run.settings.arithmetic,
    )
    return PreparedExperiment(measure=functools.partial(_measure, decoder, flags.rank))


def _measure(decoder: "PerturbationDecoder", rank: int, task: Task, decoded: Callable[[], None]) -> Findings:
    found = measure_sensitivity(task, decoder, decoded=decoded)
    if not found:
        raise DataError("no output is long enough to have one of the --positions. Name lower ones.")
    labels = {"sampling": f"last layer's choice of rank {rank}", "layer": "first layer's prediction"}
    return Findings(
        rows=[
            {
                "kind": point.kind,
                "position": point.position,
                **estimate_cells("similarity", point.similarity),
                "replaced": point.replaced,
                "prompts": point.similarity.prompts,
            }
            for point in found
        ],
        tables=[_table(found, rank)],
        notes=(
            f"Similarity ({task.metric}) of the whole output to the unperturbed one if the token at that position is "
            "replaced, ± one standard error, over the prompts whose output is that long. Replaced: how often the first "
            "layer's prediction was another token."
        ),
        draw=functools.partial(_draw, found, labels, task.metric),
        headline=_headline([point for point in found if point.kind == KINDS[0]], metric=task.metric),
        charts=[_chart(found, labels, metric=task.metric)],
    )


def _table(found: Sequence[Sensitivity], rank: int) -> Table:
    table = Table(title="Similarity after one wrong token", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("position", "prompts", f"sampling\n(rank {rank})", "layer\n(layer 1)", "replaced"):
        table.add_column(name, justify="right")
    points = {(point.kind, point.position): point for point in found}
    for position in sorted({point.position for point in found}):
        sampling, layer = (points[kind, position] for kind in KINDS)
        table.add_row(
            str(position),
            str(sampling.similarity.prompts),
            shown(sampling.similarity),
            shown(layer.similarity),
            f"{layer.replaced:.0%}",
        )
    return table


def _headline(points: Sequence[Sensitivity], *, metric: str) -> tuple[str, ...]:
    first, last = points[0], points[-1]
    return (
        "After one wrong token at position ",
        str(first.position),
        ", outputs score ",
        f"{first.similarity.mean:.3f} {metric}",
        f" against the unperturbed ones{'.' if first is last else '; at position '}",
        *([] if first is last else [str(last.position), ", ", f"{last.similarity.mean:.3f}", "."]),
    )


def _chart(found: Sequence[Sensitivity], labels: Mapping[str, str], *, metric: str) -> "LineChart":
    from calm_beam.report.line_chart import Line, LineChart, around

    lines = []
    for place, kind in enumerate(KINDS):
        points = [point for point in found if point.kind == kind]
        lines.append(
            Line(
                name=labels[kind],
                points=[(point.position, point.similarity.mean) for point in points],
                ends=around(
                    [point.similarity.mean for point in points], [point.similarity.standard_error for point in points]
                ),
                style=place,
                has_band=True,
            )
        )
    return LineChart(
        title="Similarity after one wrong token",
        x_name="position of the replaced token",
        y_name=f"{metric} against the unperturbed output",
        lines=lines,
    )


def _draw(found: Sequence[Sensitivity], labels: Mapping[str, str], metric: str, figure: "Figure") -> None:
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for kind, colour in zip(KINDS, COLOURS, strict=False):
        points = [point for point in found if point.kind == kind]
        positions = [point.position for point in points]
        means = [point.similarity.mean for point in points]
        errors = [point.similarity.standard_error or 0.0 for point in points]
        above.plot(positions, means, color=colour, marker="o", markersize=3, label=labels[kind])
        low = [mean - error for mean, error in zip(means, errors, strict=True)]
        high = [mean + error for mean, error in zip(means, errors, strict=True)]
        above.fill_between(positions, low, high, color=colour, alpha=0.2, linewidth=0)
    above.set_ylabel(f"similarity to the\nunperturbed output ({metric})")
    figure.legend(title="token replaced by", loc="outside upper center", ncols=len(KINDS), frameon=False)
    points = [point for point in found if point.kind == KINDS[0]]
    below.bar([point.position for point in points], [point.similarity.prompts for point in points], color=GREY)
    below.set_ylabel("prompts")
    below.set_xlabel("position of the replaced token (0 = first of the output); bands: ± one standard error")
    below.xaxis.get_major_locator().set_params(integer=True)
    tidy(above)
    tidy(below)


SENSITIVITY = Experiment(settings=full_model_settings, prepare=_prepare)
