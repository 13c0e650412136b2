"""Totals together with what was counted in them, so that it can be checked that every example was, and once."""

import collections
import dataclasses
from typing import Self

from calm_beam.counted import counted
from calm_beam.generations import GenerationsError
from calm_beam.generations.folder import FinishedSweep

from .contrast import Contrast
from .layout import Layout
from .totals import CalibrationTotals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tally:
    """Totals, and whose they are; merging is exact, associative and commutative.

    Attributes:
      totals: Sums and counts.
      contrast: What the scores of the examples tell apart.
      scored: Number of examples whose losses are in the totals, by themselves or within their cluster.
      by_shard: For every shard, ascending, how many of its examples were counted.
      failures: Id and reason of every example that counts as failed, sorted.
    """

    totals: CalibrationTotals
    contrast: Contrast = dataclasses.field(default_factory=Contrast)
    scored: int = 0
    by_shard: tuple[tuple[int, int], ...] = ()
    failures: tuple[tuple[str, str], ...] = ()

    @classmethod
    def zero(cls, layout: Layout) -> Self:
        """Returns the tally of no examples."""
        return cls(totals=CalibrationTotals.zero(layout))

    def merge(self, other: Self) -> Self:
        """Returns the tally of both together; counts of the same shard add up, so that counting twice shows."""
        return type(self)(
            totals=self.totals.merge(other.totals),
            contrast=Contrast.merged((self.contrast, other.contrast)),
            scored=self.scored + other.scored,
            by_shard=_added(self.by_shard, other.by_shard),
            failures=tuple(sorted((*self.failures, *other.failures))),
        )

    def check(self, finished: FinishedSweep) -> None:
        """Raises unless every example of a folder of generations was counted, and once.

        Raises:
          GenerationsError: If a shard or an example was left out or counted twice. The number of losses is the same at
            every threshold, since each example brings one for each.
        """
        expected = tuple((shard.shard, shard.examples) for shard in finished.shards)
        if self.by_shard != expected:
            wrong = sorted(set(self.by_shard) ^ set(expected))[0][0]
            raise GenerationsError(
                f"shard {wrong}: {counted(dict(self.by_shard).get(wrong, 0), 'example was', several='examples were')} "
                "counted, but it has "
                f"{dict(expected).get(wrong, 0)}. A shard that is missing or counts twice would void the guarantee."
            )
        for what, count in (("described", self.totals.examples), ("scored", self.scored)):
            if count != finished.examples:
                raise GenerationsError(
                    f"{counted(count, 'example was', several='examples were')} {what}, but {finished.examples} decoded."
                )
        kept = sum(len(keys) for keys, _ in self.totals.table.chunks)
        if self.totals.layout.tabled and kept != self.totals.risk.n:
            raise GenerationsError(f"{kept} single losses were kept, but {self.totals.risk.n} summed.")


def _added(counts: tuple[tuple[int, int], ...], others: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    if not counts or not others:
        return counts or others
    added = collections.Counter(dict(counts))
    for shard, count in others:
        added[shard] += count
    return tuple(sorted(added.items()))
