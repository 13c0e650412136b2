"""What identifies sets of examples, whatever their order: sums of digests, and a sample of ids small enough to store.

The ids with the smallest digests are a sample that nobody chooses, and the same whatever the order. If a share s of the
certified examples comes again, at least one of k in the sample does with probability 1 - (1 - s)^k, or more.
"""

import hashlib
import heapq
from collections.abc import Iterable

from calm_beam.inputs.examples import Example
from calm_beam.manifest import MOST_SAMPLED_IDS
from calm_beam.risk.totals import MODULUS


def content_sum_of(examples: Iterable[Example]) -> int:
    """Returns the sum of the examples' content digests modulo 2^256."""
    return merged_sums(int.from_bytes(example.content_digest(), "big") for example in examples)


def merged_sums(content_sums: Iterable[int]) -> int:
    """Returns the content sum of several sets together.

    >>> merged_sums([2**256 - 1, 3])
    2
    """
    return sum(content_sums) % MODULUS


def fingerprint_text(content_sum: int) -> str:
    """Returns `sha256-sum:` and 64 digits."""
    return f"sha256-sum:{content_sum:064x}"


def id_sample(ids: Iterable[str]) -> tuple[str, ...]:
    """Returns the smallest digests of ids, `MOST_SAMPLED_IDS` of them or all, ascending.

    Source: bottom-k sketches (Cohen and Kaplan, 2007, "Summarizing data using bottom-k sketches").
    """
    return tuple(heapq.nsmallest(MOST_SAMPLED_IDS, set(map(_digest, ids))))


def come_again(sample: Iterable[str], ids: Iterable[str]) -> int:
    """Returns how many ids of a sample are among others.

    >>> come_again(id_sample(["a", "b", "c"]), ["b", "c", "d"])
    2
    """
    wanted = set(sample)
    return len(wanted.intersection(map(_digest, ids)))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]
