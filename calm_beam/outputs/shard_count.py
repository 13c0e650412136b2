"""Into how many shards examples are divided, where the user does not say."""

import math

from calm_beam.inputs import DataFiles
from calm_beam.inputs.size import estimated_examples

LEAST_SHARDS, MOST_SHARDS = 4, 10_000
_EXAMPLES_OF_A_SHARD = 1000
_LEAST_EXAMPLES_OF_A_SHARD = 500
# Prompts that are answered at one threshold, which are as much work as some hundred examples at all.
_PROMPTS_OF_A_SHARD = 5000
_SHARDS_OF_A_WORKER = 8
# So that two workers share it, and rounds of nearly the same size can be made of whole shards.
_SHARDS_OF_A_ROUND = 2


def default_shards(data: DataFiles, *, round_examples: int | None = None) -> int:
    """Returns the number for a data set, by its size: the same each time, for the same files.

    Args:
      data: The files.
      round_examples: Examples of a round, where tests are looked at after each; None where all examples count.

    Raises:
      OSError: If a file cannot be read.
    """
    return shards_for(estimated_examples(data), round_examples=round_examples)


def prompt_shards(data: DataFiles) -> int:
    """Returns the number for prompts that are answered at one threshold each, by their size: the same each time.

    A shard holds more of them than of examples that are decoded at every threshold: a decoder that holds hundreds of
    prompts runs empty at its end, and what is lost with a worker is still little.

    Args:
      data: The files.

    Raises:
      OSError: If a file cannot be read.
    """
    prompts = estimated_examples(data)
    return LEAST_SHARDS if prompts is None else min(MOST_SHARDS, max(LEAST_SHARDS, -(-prompts // _PROMPTS_OF_A_SHARD)))


def shards_for(examples: int | None, *, workers: int | None = None, round_examples: int | None = None) -> int:
    """Returns into how many shards examples are best divided.

    A shard holds a thousand: so its steps are full, and what is lost with a worker is little. Workers want several
    each, and one number of them each, so that none waits long for the last; for that, shards may be smaller, but not
    so small that their steps run empty (docs/measurements.md, "Cost, forecast").

    Args:
      examples: How many; None where nobody knows.
      workers: Processes that decode; None to go by the examples alone.
      round_examples: As in `default_shards`.

    >>> [shards_for(examples) for examples in (100, 5_000, 1_000_000, 100_000_000)]
    [4, 5, 1000, 10000]
    >>> [shards_for(examples, workers=20) for examples in (5_000, 50_000, 1_000_000)]
    [20, 100, 1000]
    >>> shards_for(5_000, round_examples=500)
    20
    """
    if examples is None:
        return LEAST_SHARDS
    found = max(LEAST_SHARDS, math.ceil(examples / _EXAMPLES_OF_A_SHARD))
    if round_examples is not None:
        found = max(found, math.ceil(_SHARDS_OF_A_ROUND * examples / round_examples))
    if workers is not None:
        wanted = max(found, min(_SHARDS_OF_A_WORKER * workers, examples // _LEAST_EXAMPLES_OF_A_SHARD))
        found = workers * math.ceil(wanted / workers)
    return min(MOST_SHARDS, found)
