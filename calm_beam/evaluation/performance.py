"""Cost and quality of exit rules over a sample of prompts: layers per token, scores, and which rules to compare.

The sample can be drawn again by anyone; means over it have standard errors.

With the oracle, every token is the one that the last layer would give: outputs differ from the full model's only
through the cache that later tokens attend to (CALM, "State propagation").
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.isolation import DecodeError
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import Example
from calm_beam.inputs.prompts import Prompt, encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, ends_output
from calm_beam.metrics import NO_SETTINGS, MetricSettings
from calm_beam.metrics.registry import checked_score, get_metric
from calm_beam.options.groups import Decoding
from calm_beam.outputs import Generation
from calm_beam.outputs.generate import generate
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.precision import FLOAT32, Precision
from calm_beam.text import counted


def sampled(examples: Sequence[Example], count: int) -> list[Example]:
    """Returns at most `count` examples, in their order: those whose ids have the smallest hashes.

    The sample does not depend on the order of the data, and a larger one contains the smaller ones.

    Args:
      examples: All examples.
      count: At least 1.
    """

    def rank(example: Example) -> bytes:
        return hashlib.sha256(example.id.encode()).digest()

    chosen = sorted(examples, key=lambda example: (rank(example), example.file_index, example.line))[:count]
    return sorted(chosen, key=lambda example: (example.file_index, example.line))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate of a mean over all prompts like those of the sample.

    Attributes:
      mean: The estimate.
      standard_error: Its standard deviation over samples of this size; None if there is a single prompt.
      prompts: Size of the sample, at least 1.
    """

    mean: float
    standard_error: float | None
    prompts: int


def estimated_mean(values: Sequence[float]) -> Estimate:
    """Returns the mean of one value per prompt.

    Args:
      values: At least one.

    Raises:
      ValueError: If there is none.

    >>> estimated_mean([0.25, 0.75])
    Estimate(mean=0.5, standard_error=0.25, prompts=2)
    """
    return estimated_ratio(values, [1] * len(values))


def estimated_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Returns the ratio of two sums over prompts, such as layers and tokens: the mean per token, not per prompt.

    Args:
      numerators: One per prompt, at least one.
      denominators: As many positive numbers.

    Returns:
      The ratio; its standard error is that of the ratio's linear approximation, exact where all denominators are equal.

    Raises:
      ValueError: If there is no prompt.

    Source: Cochran, Sampling Techniques (1977), section 2.11 (estimation of a ratio), for an infinite population.

    >>> estimated_ratio([30, 10], [10, 10]).mean
    2.0
    """
    if not numerators:
        raise ValueError("an estimate needs at least one prompt, got none.")
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    ratio = math.fsum(above) / math.fsum(below)
    count = len(above)
    if count == 1:
        return Estimate(mean=ratio, standard_error=None, prompts=1)
    # Summed exactly, so the order in which prompts were decoded does not matter.
    variance = math.fsum((above - ratio * below) ** 2) / (count - 1)
    return Estimate(mean=ratio, standard_error=math.sqrt(variance / count) / (math.fsum(below) / count), prompts=count)


def encoded_prompts(run: PreparedSweep, examples: Sequence[Example]) -> list[Prompt]:
    """Returns the examples as prompts of token ids.

    Raises:
      ValueError: If one cannot be encoded, or is too long and `on_long` makes that an error.
    """
    vocab_size = run.checkpoint.config.vocab_size
    return [
        encode_prompt(
            example, run.vocabulary, settings=run.settings, vocab_size=vocab_size, on_long=run.request.on_long
        )
        for example in examples
    ]


def sample_in_words(prompts: Sequence[Prompt], total: int) -> str:
    """Returns a description of a sample: its size, and how it was drawn."""
    used = len(prompts)
    which = (
        "all examples" if used == total else f"of {counted(total, 'example')}, those whose ids have the smallest hashes"
    )
    cut = sum(prompt.truncated for prompt in prompts)
    return f"{counted(used, 'prompt')}: {which}; {cut} cut."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Decoding):
    """A task: a model, prompts and a metric.

    Attributes:
      checkpoint: The model.
      vocabulary: Its vocabulary; None if there is none, and all prompts are token ids.
      prompts: The sample.
      metric: Name of the metric, as in `get_metric`.
      metric_settings: Settings that the metric needs.
      max_input_length: Largest number of tokens of a prompt.
      max_decode_length: Largest number of tokens of an output, eos included.
      precision: Precision in which the model computes.
    """

    checkpoint: Checkpoint
    vocabulary: Vocabulary | None
    prompts: Sequence[Prompt]
    metric: str
    max_input_length: int
    max_decode_length: int
    precision: Precision = FLOAT32
    metric_settings: MetricSettings = NO_SETTINGS

    def scores(self, prompt_id: str, texts: Iterable[str], *, references: Sequence[str]) -> dict[str, float]:
        """Returns the metric of each text, each distinct one scored once.

        Args:
          prompt_id: Id of the example, for messages.
          texts: Texts to score.
          references: At least one text.

        Raises:
          MetricError: If the metric fails or leaves [0, 1].
        """
        metric = get_metric(self.metric, self.metric_settings)
        return {
            text: checked_score(metric, self.metric, candidate=text, references=references, example_id=prompt_id)
            for text in dict.fromkeys(texts)
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Performance:
    """Cost and quality of one exit rule and threshold.

    Attributes:
      layers: Decoder layers per generated token.
      similarity: Score against the full model's output.
      quality: Score against the references; None without references.
      quality_change: Score against the references minus the full model's on the same prompt, so its standard error is
        that of the difference; None without references.
    """

    layers: Estimate
    similarity: Estimate
    quality: Estimate | None
    quality_change: Estimate | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """An exit rule with one or more thresholds."""

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
    """Returns the performances as `measure_variants` does, from outputs decoded elsewhere.

    Args:
      task: Names the metric.
      variants: At least one.
      generations: For each variant in order, the generations of all prompts, none of which failed.

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
    """Returns the performance of each branch of decoded outputs; the first is the full model's.

    Args:
      task: Names the metric.
      generations: At least one; either all have references or none.

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


def tradeoff_variants(
    rule: ExitRule, confidences: Sequence[str], *, thresholds: Sequence[float], num_layers: int
) -> tuple[Variant, ...]:
    """Returns every confidence measure over the grid, then the static layers and the oracle.

    Args:
      rule: Schedule, state propagation and exit layers of the measures; static layers and oracle have no schedule.
      confidences: The measures.
      thresholds: The grid, in the order to measure it.
      num_layers: Decoder depth L.

    Source: CALM, "Experimental Results", Figure 3 (empirical performance-efficiency tradeoffs).
    """
    measures = [
        Variant(rule=dataclasses.replace(rule, confidence=confidence), thresholds=tuple(thresholds))
        for confidence in confidences
    ]
    static = dataclasses.replace(rule, confidence="static", schedule="constant", tau=None, patience=None)
    layers = tuple(layer / num_layers for layer in reversed(rule.exit_layers(num_layers)))
    oracle = dataclasses.replace(static, confidence="oracle")
    return (*measures, Variant(rule=static, thresholds=layers), Variant(rule=oracle, thresholds=(1.0,)))


def propagation_variants(confidence: str, thresholds: Sequence[float]) -> tuple[Variant, ...]:
    """Returns the oracle with every state propagation, then the noisy cache.

    In the noisy cache, tokens exit by a real confidence measure as far as the cache is concerned, while the tokens
    themselves are the last layer's (T5X's `oracle_tok_noisy_cache`). At threshold 0 all layers attend to the first
    layer's states.

    Args:
      confidence: Measure of the noisy cache.
      thresholds: Its thresholds, in the order to measure them.

    Source: CALM, "State propagation". Its ROUGE-L on CNN/DM, 8 layers: 38.32 for the full model, 38.24 for `from_exit`
    at 1.53 layers, 38.31 with the first layer's states, 23.02 for `projected`.
    """
    oracles = [
        Variant(rule=ExitRule(confidence="oracle", state_propagation=name), thresholds=(1.0,)) for name in PROPAGATIONS
    ]
    noisy = ExitRule(confidence=confidence, token_from="last_layer")
    return (*oracles, Variant(rule=noisy, thresholds=tuple(thresholds)))


def _generations(task: Task, variant: Variant, *, decoded: Callable[[], None]) -> list[Generation]:
    from calm_beam.decoding.decoder import Decoder

    decoder = Decoder(
        task.checkpoint,
        sweep_branches(variant.rule, variant.thresholds, max_decode_length=task.max_decode_length),
        max_input_length=task.max_input_length,
        precision=task.precision,
        ends_output=ends_output(task.vocabulary),
        **task.asked_of_decoder(),
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
