"""The examples of a shard: in which order they are, and which of them have the prompt of another."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable

from calm_beam.inputs.examples import Example


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
