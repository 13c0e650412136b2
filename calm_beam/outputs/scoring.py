"""The losses of one example at every threshold."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from calm_beam.inputs.examples import DataError, Example
from calm_beam.manifest import COUNT_NEAR_TIES, WORST_NEAR_TIES, Objective
from calm_beam.metrics import NO_SETTINGS, MetricSettings, sight_of
from calm_beam.metrics.registry import Metric, MetricError, checked_score, get_metric
from calm_beam.risk.losses import losses_of_scores, to_signed_fixed_point

from .finished import check_failures, failure_limit
from .job import OutputsError
from .metric_checks import Contrast, Unseen
from .rows import Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How outputs become losses, as far as a plan does not say it.

    Attributes:
      max_failures: Most examples that may fail, in decoding and scoring together; None for the default of
        `failure_limit`.
      metric_settings: Settings of metrics.
    """

    max_failures: int | None = None
    metric_settings: MetricSettings = NO_SETTINGS

    def metric(self, name: str) -> Metric:
        """Returns a metric; errors are those of `get_metric`."""
        return get_metric(name, self.metric_settings)

    def check_failures(self, failures: Sequence[tuple[str, str]], *, failed: int, examples: int) -> None:
        """Raises `DataError` if more of the examples failed than may; the arguments are those of `check_failures`."""
        check_failures(failures, failed=failed, limit=failure_limit(self.max_failures, examples=examples))


USUAL_SCORING = Scoring()
"""The defaults: few examples may fail, and metrics need no settings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredGeneration:
    """An example with its losses.

    Attributes:
      generation: The example; with a failure if it could not be scored.
      losses: The array that `score_generation` returns.
      contrast: What its scores distinguish; the contrast of no examples if it failed.
    """

    generation: Generation
    losses: np.ndarray
    contrast: Contrast


def score_generation(
    generation: Generation, objectives: Sequence[Objective], *, metrics: Mapping[str, Metric], num_thresholds: int
) -> np.ndarray:
    """Returns the losses of one example.

    Args:
      generation: The example's outputs, the full model's first.
      objectives: The losses to compute.
      metrics: Metrics by name, at least those of the objectives.
      num_thresholds: Size of the grid.

    Returns:
      Shape (objectives, thresholds), int64 in units of 2^-32, rounded up; each in [0, LOSS_SCALE], or for a signed
      loss in [-LOSS_SCALE, LOSS_SCALE]. All LOSS_SCALE, the worst loss, if the example failed.

    Raises:
      DataError: If an objective is risk consistency and the example has no references.
      MetricError: If a metric fails or leaves [0, 1]; names the example.

    Source: CALM, "Defining p-values for consistent early-exiting" (the losses of textual and risk consistency).
    """
    return _scored(generation, objectives, metrics=metrics, num_thresholds=num_thresholds).losses


def score_by_policy(
    generation: Generation,
    objectives: Sequence[Objective],
    *,
    metrics: Mapping[str, Metric],
    num_thresholds: int,
    on_error: str,
    near_ties: str = COUNT_NEAR_TIES,
) -> ScoredGeneration:
    """Returns an example with its losses; one that cannot be scored is returned as failed, with the worst losses.

    Args:
      generation: The example's outputs, the full model's first.
      objectives: The losses to compute.
      metrics: Metrics by name, at least those of the objectives.
      num_thresholds: Size of the grid.
      on_error: `fail` or `worst_case`, for examples that cannot be scored.
      near_ties: `count`, or `worst_case`: then an output has the worst loss if it, or the full model's output that it
        is compared with, depends on a near tie, since another engine may give any other output.

    Raises:
      DataError: If an objective is risk consistency and the example has no references, whatever `on_error` is.
      MetricError: If `on_error` is `fail`, and a metric fails or leaves [0, 1]; names the example.
      OutputsError: If near ties count as the worst, and the generation does not record them.
    """
    try:
        scored = _scored(generation, objectives, metrics=metrics, num_thresholds=num_thresholds)
        return _with_worst(scored) if near_ties == WORST_NEAR_TIES else scored
    except MetricError as error:
        if on_error == "fail":
            raise
        failed = dataclasses.replace(generation, failure=str(error))
        return _scored(failed, objectives, metrics=metrics, num_thresholds=num_thresholds)


def _with_worst(scored: ScoredGeneration) -> ScoredGeneration:
    """Returns an example with the worst loss at thresholds where a near tie decided."""
    generation = scored.generation
    if generation.failure is not None:
        return scored
    if any(output.near_tie is None for output in generation.outputs):
        raise OutputsError(
            f"{generation.example.in_words()}: its outputs do not say whether they hung on near ties, which are to "
            "count with loss 1. Decode again, by a measure whose near ties are seen, or take --near_ties=count."
        )
    losses = np.where(np.array(generation.near_ties()), to_signed_fixed_point(np.ones(())), scored.losses)
    return dataclasses.replace(scored, losses=losses)


def _scored(
    generation: Generation, objectives: Sequence[Objective], *, metrics: Mapping[str, Metric], num_thresholds: int
) -> ScoredGeneration:
    if generation.failure is not None:
        losses = to_signed_fixed_point(np.ones((len(objectives), num_thresholds)))
        return ScoredGeneration(generation=generation, losses=losses, contrast=Contrast())
    texts = [output.text for output in generation.outputs]
    assert len(texts) == 1 + num_thresholds
    scores = [
        _scores(generation.example, texts, objective=objective, metric=metrics[objective.metric])
        for objective in objectives
    ]
    rows = [
        losses_of_scores(objective.loss, early_score=row[1:], full_score=row[0])
        for row, objective in zip(map(np.array, scores), objectives, strict=True)
    ]
    return ScoredGeneration(
        generation=generation,
        losses=to_signed_fixed_point(np.stack(rows)),
        contrast=Contrast.of(
            generation.example,
            texts,
            scores=scores,
            unseen=_unseen(generation.example, texts, objectives=objectives, metrics=metrics),
        ),
    )


def _scores(example: Example, texts: Sequence[str], *, objective: Objective, metric: Metric) -> list[float]:
    """Returns the scores of an example's outputs, of which the first is the full model's."""
    if objective.consistency == "risk" and not example.references:
        raise DataError(f"{example.in_words()}: risk consistency needs references, it has none.")
    references = _references(example, texts, consistency=objective.consistency)
    # Many thresholds give the same text, so each distinct text is scored once.
    scores = {
        text: checked_score(metric, objective.metric, candidate=text, references=references, example_id=example.id)
        for text in dict.fromkeys(texts)
    }
    return [scores[text] for text in texts]


def _references(example: Example, texts: Sequence[str], *, consistency: str) -> Sequence[str]:
    """Returns the texts that outputs are compared with; the first output is the full model's."""
    return example.references if consistency == "risk" else texts[:1]


def _unseen(
    example: Example, texts: Sequence[str], *, objectives: Sequence[Objective], metrics: Mapping[str, Metric]
) -> Iterator[Unseen]:
    """Yields what each metric does not see of an example's outputs, and of the texts they are compared with."""
    outputs = tuple(dict.fromkeys(texts))
    kinds = dict.fromkeys((objective.metric, objective.consistency) for objective in objectives)
    for name in dict.fromkeys(metric for metric, _ in kinds):
        sight = sight_of(metrics[name])
        if sight is not None:
            compared = [
                (outputs, _references(example, texts, consistency=consistency))
                for metric, consistency in kinds
                if metric == name
            ]
            yield from Unseen.of(name, sight, example_id=example.id, compared=compared)
