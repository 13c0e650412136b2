"""`--experiment=propagation`: what the cache of skipped layers does to outputs whose tokens are right."""

import argparse
from collections.abc import Sequence

from calm_beam.decoding.settings import DecodeSettings, descending_grid
from calm_beam.evaluation.performance import Measured
from calm_beam.evaluation.propagation import propagation_variants
from calm_beam.evaluation.task import Task
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.flags import arithmetic_of
from calm_beam.model.input_length import USUAL_INPUT_LENGTH
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.report.experiment_page import propagation_charts, propagation_name

from .experiment import Experiment, Findings, PreparedSweeps
from .performance_rows import MEANING, performance_row, performance_table


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
                {propagation_name(measured): measured.performance for measured in found},
                metric=task.metric,
                num_layers=task.checkpoint.config.num_decoder_layers,
            )
        ],
        notes=(
            "Every token is the last layer's prediction, so only the cache can make outputs differ. Oracle: exit at "
            "the first layer that agrees with the last. Noisy cache: exit by a confidence measure, as far as the cache "
            f"is concerned. {MEANING}"
        ),
        headline=_headline([measured.performance.similarity.mean for measured in found[1:]], metric=task.metric),
        charts=propagation_charts(found, metric=task.metric),
    )


def _headline(similarities: Sequence[float], *, metric: str) -> tuple[str, ...]:
    return (
        "Outputs of which exits have changed the cache alone score ",
        f"{min(similarities):.3f} to {max(similarities):.3f} {metric}",
        " against the full model’s outputs.",
    )


PROPAGATION = Experiment(settings=_settings, prepare=_prepare)
