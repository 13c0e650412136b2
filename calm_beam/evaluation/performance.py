"""What a way of exiting costs and gains: layers per token, and quality, over a sample of prompts."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.isolation import DecodeError
from calm_beam.exits.rule import ExitRule
from calm_beam.outputs import Generation
from calm_beam.outputs.generate import generate

from .estimates import Estimate, estimated_mean, estimated_ratio
from .task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Performance:
    """Cost and quality of one way of exiting.

    Attributes:
      layers: Decoder layers per generated token.
      similarity: Score against the full model's output.
      quality: Score against the references; None without references.
      quality_change: Score against the references less the full model's on the same prompt, so that its standard error
        is that of the difference; None without references.
    """

    layers: Estimate
    similarity: Estimate
    quality: Estimate | None
    quality_change: Estimate | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A way of exiting, at one or more thresholds."""

    rule: ExitRule
    thresholds: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The performance of a rule at a threshold; both are None for the full model."""

    rule: ExitRule | None
    threshold: float | None
    performance: Performance


def measure_variants(task: Task, variants: Sequence[Variant], *, decoded: Callable[[], None]) -> list[Measured]:
    """Returns the performance of the full model, then of every variant at each of its thresholds, in the order given.

    Args:
      task: What to decode.
      variants: At least one.
      decoded: Called after every prompt, once per variant.

    Raises:
      ValueError: If a rule does not fit the model.
      DecodeError: If logits are not finite; names the example.
      MetricError: If the metric fails or leaves [0, 1]; names the example.
    """
    return measured_variants(task, variants, (_generations(task, variant, decoded=decoded) for variant in variants))


def measured_variants(
    task: Task, variants: Sequence[Variant], generations: Iterable[list[Generation]]
) -> list[Measured]:
    """Returns the same as `measure_variants`, of outputs that somebody else decodes.

    Args:
      task: Names the metric.
      variants: At least one.
      generations: Of each variant, in their order, those of all prompts, none of which failed.

    Raises:
      MetricError: If the metric fails or leaves [0, 1]; names the example.
    """
    measured: list[Measured] = []
    for variant, decoded in zip(variants, generations, strict=True):
        full, *others = performances(task, decoded)
        if not measured:
            measured.append(Measured(rule=None, threshold=None, performance=full))
        measured += [
            Measured(rule=variant.rule, threshold=threshold, performance=performance)
            for threshold, performance in zip(variant.thresholds, others, strict=True)
        ]
    return measured


def performances(task: Task, generations: list[Generation]) -> list[Performance]:
    """Returns the performance of each lane of outputs that have been decoded; the first is the full model's.

    Args:
      task: Names the metric.
      generations: At least one; with references either all or none.

    Raises:
      MetricError: If the metric fails or leaves [0, 1]; names the example.
    """
    similarities, qualities = [], []
    for generation in generations:
        example, texts = generation.example, [output.text for output in generation.outputs]
        scores = task.scores(example.id, texts, references=texts[:1])
        similarities.append([scores[text] for text in texts])
        if example.references:
            scores = task.scores(example.id, texts, references=example.references)
            qualities.append([scores[text] for text in texts])
    found = []
    for lane in range(len(generations[0].outputs)):
        outputs = [generation.outputs[lane] for generation in generations]
        found.append(
            Performance(
                layers=estimated_ratio(
                    [sum(output.exit_layers) for output in outputs], [len(output.tokens) for output in outputs]
                ),
                similarity=estimated_mean([scores[lane] for scores in similarities]),
                quality=estimated_mean([scores[lane] for scores in qualities]) if qualities else None,
                quality_change=estimated_mean([scores[lane] - scores[0] for scores in qualities])
                if qualities
                else None,
            )
        )
    return found


def _generations(task: Task, variant: Variant, *, decoded: Callable[[], None]) -> list[Generation]:
    from calm_beam.decoding.decoder import Decoder

    decoder = Decoder(
        task.checkpoint,
        sweep_branches(variant.rule, variant.thresholds, max_decode_length=task.max_decode_length),
        max_input_length=task.max_input_length,
        batch_size=task.batch_size,
        token_budget=task.token_budget,
        model_parallelism=task.model_parallelism,
        exit_head=task.exit_head,
        engine=task.engine,
        arithmetic=task.arithmetic,
    )
    generations = []
    for (generation,) in generate(
        decoder, task.prompts, vocabulary=task.vocabulary, on_error="worst_case", duplicates=frozenset()
    ):
        if generation.failure is not None:
            raise DecodeError(f"{generation.example.in_words()}: {generation.failure}. Check the checkpoint.")
        generations.append(generation)
        decoded()
    return generations
