"""A sample of the ids that were certified, small enough for a manifest: to notice them among examples that are fresh.

The ids with the smallest digests are a sample that nobody chooses, and the same whatever the order. If a share s of the
certified examples comes again, at least one of k in the sample does with probability 1 - (1 - s)^k, or more.
"""

import hashlib
import heapq
from collections.abc import Iterable

from calm_beam.manifest import MOST_SAMPLED_IDS


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
