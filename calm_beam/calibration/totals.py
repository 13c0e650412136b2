"""What is summed over a calibration set, and of which examples: so that it can be checked that every one was, once."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from calm_beam.counted import counted
from calm_beam.generations import FinishedSweep, Generation, GenerationsError
from calm_beam.risk.evidence import Evidence
from calm_beam.risk.loss_table import LossTable
from calm_beam.risk.totals import RiskTotals

from .contrast import Contrast
from .fingerprint import content_sum_of, fingerprint_text, merged_sums
from .layout import Layout
from .specs import Objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationTotals:
    """Sums and counts over a calibration set; merging is exact, associative and commutative.

    Attributes:
      layout: What the sums are of.
      risk: Number of independent units (examples, or clusters of them) and sums over their losses.
      table: Single losses, where a p-value needs them.
      scored: Number of examples whose losses are in these sums, by themselves or within their cluster.
      layer_sums: For the full model and each threshold, decoder layers used by all tokens; length 1 + thresholds.
      token_counts: For the full model and each threshold, tokens generated; same length.
      by_shard: For every shard, ascending, how many of its examples are counted.
      failures: Id and reason of every example that counts with loss 1, sorted.
      truncated: Examples whose prompt was cut.
      duplicates: Examples whose prompt another one has too, each prompt's first not counted.
      content_sum: Sum of the examples' content digests modulo 2^256: a fingerprint of the set, whatever its order.
      contrast: What the scores of the examples tell apart.
    """

    layout: Layout
    risk: RiskTotals
    table: LossTable = dataclasses.field(default_factory=LossTable)
    scored: int = 0
    layer_sums: tuple[int, ...]
    token_counts: tuple[int, ...]
    by_shard: tuple[tuple[int, int], ...] = ()
    failures: tuple[tuple[str, str], ...] = ()
    truncated: int = 0
    duplicates: int = 0
    content_sum: int = 0
    contrast: Contrast = dataclasses.field(default_factory=Contrast)

    @property
    def examples(self) -> int:
        """Number of examples, failed ones included."""
        return sum(count for _, count in self.by_shard)

    @property
    def failed(self) -> int:
        """Examples that could not be decoded or scored."""
        return len(self.failures)

    @classmethod
    def zero(cls, layout: Layout) -> Self:
        """Returns the totals of no examples."""
        nothing = (0,) * (layout.thresholds + 1)
        risk = RiskTotals.zero(rows=len(layout.rows), thresholds=layout.thresholds)
        return cls(layout=layout, risk=risk, layer_sums=nothing, token_counts=nothing)

    @classmethod
    def of_examples(
        cls, generations: Sequence[Generation], layout: Layout, *, shard: int = 0, contrast: Contrast | None = None
    ) -> Self:
        """Returns the totals of some examples, all but their losses.

        Args:
          generations: One per example, with a failure where it could not be scored.
          layout: What is gathered.
          shard: Number of the shard that they are in.
          contrast: What their scores tell apart; None for nothing.
        """
        nothing = (0,) * (layout.thresholds + 1)
        layers = [tuple(sum(output.exit_layers) for output in item.outputs) or nothing for item in generations]
        tokens = [tuple(len(output.tokens) for output in item.outputs) or nothing for item in generations]
        return dataclasses.replace(
            cls.zero(layout),
            layer_sums=_sum(nothing, *layers),
            token_counts=_sum(nothing, *tokens),
            by_shard=((shard, len(generations)),) if generations else (),
            failures=tuple(sorted((item.example.id, item.failure) for item in generations if item.failure is not None)),
            truncated=sum(item.truncated for item in generations),
            duplicates=sum(item.duplicate for item in generations),
            content_sum=content_sum_of(item.example for item in generations),
            contrast=contrast or Contrast(),
        )

    @classmethod
    def of_losses(
        cls, keys: Sequence[str], fixed_losses: np.ndarray, *, layout: Layout, salt: str, scored: int | None = None
    ) -> Self:
        """Returns the totals of the losses of some units, and of nothing else.

        Args:
          keys: One per unit: ids of examples, or names of clusters.
          fixed_losses: shape (units, objectives, thresholds), int64 in units of 2^-32.
          layout: What to gather.
          salt: Decides the order of those single losses that are kept.
          scored: Number of examples that the units are of; None if each is one.
        """
        table = LossTable.of(keys, layout.tabled_losses(fixed_losses), salt=salt) if layout.tabled else LossTable()
        return dataclasses.replace(
            cls.zero(layout),
            risk=RiskTotals.of(layout.values(fixed_losses)),
            table=table,
            scored=len(keys) if scored is None else scored,
        )

    def merge(self, other: Self) -> Self:
        """Returns the totals of both sets together; counts of the same shard add up, so that counting twice shows.

        Raises:
          ValueError: If they are over other objectives, statistics or grids.
        """
        if other.layout != self.layout:
            raise ValueError("only totals with the same layout (objectives, statistics and grid) can be added.")
        return dataclasses.replace(
            self,
            risk=self.risk.merge(other.risk),
            table=self.table.merge(other.table),
            scored=self.scored + other.scored,
            layer_sums=_sum(self.layer_sums, other.layer_sums),
            token_counts=_sum(self.token_counts, other.token_counts),
            by_shard=_added(self.by_shard, other.by_shard),
            failures=tuple(sorted((*self.failures, *other.failures))),
            truncated=self.truncated + other.truncated,
            duplicates=self.duplicates + other.duplicates,
            content_sum=merged_sums((self.content_sum, other.content_sum)),
            contrast=Contrast.merged((self.contrast, other.contrast)),
        )

    def check(self, finished: FinishedSweep) -> None:
        """Raises unless every example of a sweep was counted, and once.

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
        if self.scored != finished.examples:
            raise GenerationsError(
                f"{counted(self.scored, 'example was', several='examples were')} scored, but {finished.examples} "
                "decoded."
            )
        kept = sum(len(keys) for keys, _ in self.table.chunks)
        if self.layout.tabled and kept != self.risk.n:
            raise GenerationsError(f"{kept} single losses were kept, but {self.risk.n} summed.")

    def evidence(self, objective: Objective) -> Evidence:
        """Returns what was gathered about one loss.

        Raises:
          ValueError: If there are no examples.
        """
        if self.risk.n == 0:
            raise ValueError("evidence needs at least one example, got n = 0. Is the calibration set empty?")
        tabled = self.layout.tabled
        return Evidence(
            n=self.risk.n,
            sums=self.layout.sums_of(objective, self.risk.sums),
            table=self.table.in_order()[:, tabled.index(objective)] if objective in tabled else None,
        )

    def mean_layers(self, num_layers: int) -> tuple[float, ...]:
        """Returns decoder layers per generated token, for the full model and then each threshold.

        Args:
          num_layers: Decoder depth, reported where no token was generated.
        """
        pairs = zip(self.layer_sums, self.token_counts, strict=True)
        return tuple(layers / tokens if tokens else float(num_layers) for layers, tokens in pairs)

    def data_fingerprint(self) -> str:
        """Returns `sha256-sum:` and 64 digits: equal for the same examples in any order and sharding."""
        return fingerprint_text(self.content_sum)


def _added(counts: tuple[tuple[int, int], ...], others: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    if not counts or not others:
        return counts or others
    added = collections.Counter(dict(counts))
    for shard, count in others:
        added[shard] += count
    return tuple(sorted(added.items()))


def _sum(*rows: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))
