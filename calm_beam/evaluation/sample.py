"""A sample of examples that anybody can draw again, and means over it with their standard errors."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import numpy as np

from calm_beam.inputs.examples import Example
from calm_beam.inputs.prompts import Prompt, encode_prompt
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.text import counted


def sampled(examples: Sequence[Example], count: int) -> list[Example]:
    """Returns at most `count` examples, in their order: those whose ids have the smallest hashes.

    The sample does not depend on the order of the data, and a larger one holds the smaller ones.

    Args:
      examples: All of them.
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
      denominators: As many, positive.

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
    # Summed exactly, so that the order in which prompts were decoded does not show.
    variance = math.fsum((above - ratio * below) ** 2) / (count - 1)
    return Estimate(mean=ratio, standard_error=math.sqrt(variance / count) / (math.fsum(below) / count), prompts=count)


def encoded_prompts(run: PreparedSweep, examples: Sequence[Example]) -> list[Prompt]:
    """Returns the examples as the model sees them.

    Raises:
      ValueError: If one cannot be encoded, or is too long where that is an error.
    """
    vocab_size = run.checkpoint.config.vocab_size
    return [
        encode_prompt(
            example, run.vocabulary, settings=run.settings, vocab_size=vocab_size, on_long=run.request.on_long
        )
        for example in examples
    ]


def sample_in_words(prompts: Sequence[Prompt], total: int) -> str:
    """Returns which examples, of how many, a sample has."""
    used = len(prompts)
    which = (
        "all examples" if used == total else f"of {counted(total, 'example')}, those whose ids have the smallest hashes"
    )
    cut = sum(prompt.truncated for prompt in prompts)
    return f"{counted(used, 'prompt')}: {which}; {cut} cut."
