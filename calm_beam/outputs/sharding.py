"""The shards of a data set: their default number, the order of examples in each, and which prompts repeat."""

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
# Prompts that are answered at one threshold: together as much work as some hundred examples at all thresholds.
_PROMPTS_OF_A_SHARD = 5000
_SHARDS_OF_A_WORKER = 8
# Two, so that two workers share a round, and rounds of nearly equal size consist of whole shards.
_SHARDS_OF_A_ROUND = 2


def default_shards(data: DataFiles, *, round_examples: int | None = None) -> int:
    """Returns the number of shards for a data set, by its size; the same files always give the same number.

    Args:
      data: The files.
      round_examples: Examples of a round, if tests look at the losses after each round; None if all examples count.

    Raises:
      OSError: If a file cannot be read.
    """
    return shards_for(estimated_examples(data), round_examples=round_examples)


def prompt_shards(data: DataFiles) -> int:
    """Returns the number of shards for prompts that are answered at one threshold each, by their size.

    The same files always give the same number. A shard holds more such prompts than examples that are decoded at every
    threshold: a decoder with hundreds of slots idles at the end of a shard, and a lost worker still costs little.

    Args:
      data: The files.

    Raises:
      OSError: If a file cannot be read.
    """
    prompts = estimated_examples(data)
    return LEAST_SHARDS if prompts is None else min(MOST_SHARDS, max(LEAST_SHARDS, -(-prompts // _PROMPTS_OF_A_SHARD)))


def shards_for(examples: int | None, *, workers: int | None = None, round_examples: int | None = None) -> int:
    """Returns a good number of shards for some examples.

    A shard holds a thousand examples: that keeps decode steps full, and a lost worker costs little. Each worker should
    have several shards, and all the same number, so that none waits long for the last; shards may be smaller for that,
    but not so small that decode steps run empty (docs/measurements.md, "Cost, forecast").

    Args:
      examples: Number of examples; None if unknown.
      workers: Processes that decode; None to use the number of examples only.
      round_examples: Examples of a round, if tests look at the losses after each round; None if all examples count.

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
    """Returns the examples sorted, with a number added to equal derived ids.

    Args:
      examples: The examples of one shard or of a whole data set: equal derived ids always come into one shard.
    """
    ordered = sorted(examples, key=_place)
    taken = {example.id for example in ordered}
    seen: dict[str, int] = {}
    unique = []
    for example in ordered:
        # An id from the data occurs once; otherwise the run has ended before.
        count = seen.get(example.id, 0) + 1
        # Skips ids from the data: files written by an earlier run have numbered ids, too.
        while count > 1 and f"{example.id}-{count}" in taken:
            count += 1
        seen[example.id] = count
        unique.append(dataclasses.replace(example, id=f"{example.id}-{count}") if count > 1 else example)
        taken.add(unique[-1].id)
    return unique


def _place(example: Example) -> tuple[str, int, int, str, str]:
    """Returns the sort key of an example; prompts of a pipeline have no file and line, and ids ignore groups."""
    return example.id, example.file_index, example.line, example.cluster or "", example.group or ""


def duplicate_prompts(examples: Iterable[Example]) -> frozenset[str]:
    """Returns the ids of examples whose prompt an earlier example has.

    Equal prompts are in one shard; in an order by ids they are not, and the examples say it themselves.
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
    """Returns the number of an example's shard if tests look at some shards before others.

    Units (examples or clusters) are spread at random by their names, which do not depend on losses. Prompts cannot be
    used for this, since equal prompts would come together.

    Args:
      example: The example, with a unique id.
      salt: Fixed before any loss is seen.
      num_shards: Number of shards.
    """
    unit = example.id if example.cluster is None else example.cluster
    # JSON, so that two pairs of salt and unit never give the same text.
    digest = hashlib.sha256(json.dumps([salt, example.cluster is None, unit]).encode()).digest()
    return int.from_bytes(digest[:8], "big") % num_shards
