"""`--experiment=sensitivity`: what one wrong token does to the whole output, by its position."""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from calm_beam.evaluation.sensitivity import KINDS, Sensitivity, measure_sensitivity
from calm_beam.evaluation.task import Task
from calm_beam.inputs.examples import DataError
from calm_beam.launch.setup_run import full_model_settings
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.report.experiment_page import sensitivity_charts

from .experiment import Experiment, Findings, PreparedExperiment, estimate_cells, shown
from .flags import DEFAULT_POSITIONS

if TYPE_CHECKING:
    from calm_beam.evaluation.perturbation import PerturbationDecoder


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
        headline=_headline([point for point in found if point.kind == KINDS[0]], metric=task.metric),
        charts=sensitivity_charts(found, labels, metric=task.metric),
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


SENSITIVITY = Experiment(settings=full_model_settings, prepare=_prepare)
