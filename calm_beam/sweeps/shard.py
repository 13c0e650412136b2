"""The examples of a shard: in which order they are, and which of them have the prompt of another."""

import dataclasses
from collections.abc import Iterable

from calm_beam.examples import Example


def with_unique_ids(examples: Iterable[Example]) -> list[Example]:
    """Returns the examples in an order of their own, with equal derived ids told apart by a number.

    Args:
      examples: Of one shard, or of a whole data set: equal derived ids always meet in one shard.
    """
    ordered = sorted(examples, key=lambda example: (example.id, example.file_index, example.line))
    seen: dict[str, int] = {}
    unique = []
    for example in ordered:
        # An id that stood in the data occurs once, or the run has ended before.
        count = seen[example.id] = seen.get(example.id, 0) + 1
        unique.append(dataclasses.replace(example, id=f"{example.id}-{count}") if count > 1 else example)
    return unique


def duplicate_prompts(examples: Iterable[Example]) -> frozenset[str]:
    """Returns the ids of examples whose prompt an earlier one has; equal prompts are always in one shard."""
    seen: set[bytes] = set()
    duplicates = set()
    for example in examples:
        digest = example.input_digest()
        if digest in seen:
            duplicates.add(example.id)
        seen.add(digest)
    return frozenset(duplicates)
