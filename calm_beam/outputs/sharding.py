"""The shards of a data set: how many there are where the user does not say, and in which order each has its examples.

It is also known which examples of a shard have the prompt of another.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable

from calm_beam.inputs import DataFiles
from calm_beam.inputs.examples import Example
from calm_beam.inputs.preview import estimated_examples

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


def with_unique_ids(examples: Iterable[Example]) -> list[Example]:
    """Returns the examples in an order of their own, with equal derived ids told apart by a number.

    Args:
      examples: Of one shard, or of a whole data set: equal derived ids always meet in one shard.
    """
    ordered = sorted(examples, key=_place)
    taken = {example.id for example in ordered}
    seen: dict[str, int] = {}
    unique = []
    for example in ordered:
        # An id that stood in the data occurs once, or the run has ended before.
        count = seen.get(example.id, 0) + 1
        # Not one that stood in the data: those of an earlier run's files have numbers, too.
        while count > 1 and f"{example.id}-{count}" in taken:
            count += 1
        seen[example.id] = count
        unique.append(dataclasses.replace(example, id=f"{example.id}-{count}") if count > 1 else example)
        taken.add(unique[-1].id)
    return unique


def _place(example: Example) -> tuple[str, int, int, str, str]:
    """Returns where an example stands among others: prompts of a pipeline have no place, and ids know no group."""
    return example.id, example.file_index, example.line, example.cluster or "", example.group or ""


def duplicate_prompts(examples: Iterable[Example]) -> frozenset[str]:
    """Returns the ids of examples whose prompt an earlier one has.

    Equal prompts are in one shard, or examples are in an order by ids and say it themselves.
    """
    seen: set[bytes] = set()
    duplicates = set()
    for example in examples:
        digest = example.input_digest()
        if example.repeats_prompt or digest in seen:
            duplicates.add(example.id)
        seen.add(digest)
    return frozenset(duplicates)


def shard_in_order(example: Example, *, salt: str, num_shards: int) -> int:
    """Returns the number of the shard that an example is in where some shards are looked at before others.

    Units, which are examples or clusters, are spread at random: by what names them, which no loss has a part in. Of
    their prompts they must not be, since those with equal prompts would come together.

    Args:
      example: With an id that no other has.
      salt: Settled before any loss is seen.
      num_shards: How many there are.
    """
    unit = example.id if example.cluster is None else example.cluster
    # JSON, so that no salt and unit run together as others do.
    digest = hashlib.sha256(json.dumps([salt, example.cluster is None, unit]).encode()).digest()
    return int.from_bytes(digest[:8], "big") % num_shards
