"""A sample of examples that anybody can draw again."""

import hashlib
from collections.abc import Sequence

from calm_beam.inputs.examples import Example


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
