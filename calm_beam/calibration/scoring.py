"""The losses of one example at every threshold."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from calm_beam.examples import DataError
from calm_beam.generations import Generation
from calm_beam.metrics.registry import Metric, MetricError, checked_score
from calm_beam.risk.fixed_point import to_signed_fixed_point
from calm_beam.risk.losses import relu_risk_loss, signed_risk_loss, textual_loss

from .specs import Objective


def score_generation(
    generation: Generation, objectives: Sequence[Objective], metrics: Mapping[str, Metric], *, num_thresholds: int
) -> np.ndarray:
    """Returns the losses of one example.

    Args:
      generation: The example's outputs, the full model's first.
      objectives: Which losses.
      metrics: Metrics by name, at least those of the objectives.
      num_thresholds: Size of the grid.

    Returns:
      Shape (objectives, thresholds), int64 in units of 2^-32, rounded up; each in [0, LOSS_SCALE], where the loss is
      signed in [-LOSS_SCALE, LOSS_SCALE]. All LOSS_SCALE, the worst there is, if the example failed.

    Raises:
      DataError: If risk consistency is asked for and the example has no references.
      MetricError: If a metric fails or leaves [0, 1]; names the example.

    Source: CALM, "Defining p-values for consistent early-exiting" (the losses of textual and risk consistency).
    """
    if generation.failure is not None:
        return to_signed_fixed_point(np.ones((len(objectives), num_thresholds)))
    full, *early = (output.text for output in generation.outputs)
    assert len(early) == num_thresholds
    example = generation.example
    rows = []
    for objective in objectives:
        if objective.consistency == "risk" and not example.references:
            raise DataError(f"example {example.id}: risk consistency needs references, it has none.")
        references = example.references if objective.consistency == "risk" else (full,)
        metric = metrics[objective.metric]
        # Many thresholds give the same text: each distinct one is scored once.
        scores = {
            text: checked_score(metric, objective.metric, text, references, example_id=example.id)
            for text in dict.fromkeys((full, *early))
        }
        early_scores = np.array([scores[text] for text in early])
        match objective.loss:
            case "dissimilarity":
                rows.append(textual_loss(early_scores))
            case "signed":
                rows.append(signed_risk_loss(early_score=early_scores, full_score=scores[full]))
            case "relu":
                rows.append(relu_risk_loss(early_score=early_scores, full_score=scores[full]))
    return to_signed_fixed_point(np.stack(rows))


def score_by_policy(
    generation: Generation,
    objectives: Sequence[Objective],
    metrics: Mapping[str, Metric],
    *,
    num_thresholds: int,
    on_error: str,
) -> tuple[Generation, np.ndarray]:
    """Returns an example and its losses; one that cannot be scored comes back as failed, with the losses of that.

    Args:
      generation: As in `score_generation`.
      objectives: As there.
      metrics: As there.
      num_thresholds: As there.
      on_error: `fail` or `worst_case`, for examples that cannot be scored.

    Raises:
      DataError: As there.
      MetricError: As there, if `on_error` is `fail`.
    """
    try:
        return generation, score_generation(generation, objectives, metrics, num_thresholds=num_thresholds)
    except MetricError as error:
        if on_error == "fail":
            raise
        failed = dataclasses.replace(generation, failure=str(error))
        return failed, score_generation(failed, objectives, metrics, num_thresholds=num_thresholds)
