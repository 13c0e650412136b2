"""What is summed over a calibration set."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from calm_beam.generations import Generation
from calm_beam.risk.evidence import Evidence
from calm_beam.risk.loss_table import LossTable
from calm_beam.risk.totals import RiskTotals

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
      layer_sums: For the full model and each threshold, decoder layers used by all tokens; length 1 + thresholds.
      token_counts: For the full model and each threshold, tokens generated; same length.
      examples: Number of examples.
      failed: Examples that could not be decoded, counted with loss 1.
      truncated: Examples whose prompt was cut.
      duplicates: Examples whose prompt another one has too, each prompt's first not counted.
      content_sum: Sum of the examples' content digests modulo 2^256: a fingerprint of the set, whatever its order.
    """

    layout: Layout
    risk: RiskTotals
    table: LossTable = dataclasses.field(default_factory=LossTable)
    layer_sums: tuple[int, ...]
    token_counts: tuple[int, ...]
    examples: int = 0
    failed: int = 0
    truncated: int = 0
    duplicates: int = 0
    content_sum: int = 0

    @classmethod
    def zero(cls, layout: Layout) -> Self:
        """Returns the totals of no examples."""
        nothing = (0,) * (layout.thresholds + 1)
        risk = RiskTotals.zero(rows=len(layout.rows), thresholds=layout.thresholds)
        return cls(layout=layout, risk=risk, layer_sums=nothing, token_counts=nothing)

    @classmethod
    def of_examples(cls, generations: Sequence[Generation], layout: Layout) -> Self:
        """Returns the totals of some examples, all but their losses."""
        nothing = (0,) * (layout.thresholds + 1)
        layers = [tuple(sum(output.exit_layers) for output in item.outputs) or nothing for item in generations]
        tokens = [tuple(len(output.tokens) for output in item.outputs) or nothing for item in generations]
        return dataclasses.replace(
            cls.zero(layout),
            layer_sums=_sum(nothing, *layers),
            token_counts=_sum(nothing, *tokens),
            examples=len(generations),
            failed=sum(item.failure is not None for item in generations),
            truncated=sum(item.truncated for item in generations),
            duplicates=sum(item.duplicate for item in generations),
            content_sum=content_sum_of(item.example for item in generations),
        )

    @classmethod
    def of_losses(cls, keys: Sequence[str], fixed_losses: np.ndarray, layout: Layout, *, salt: str) -> Self:
        """Returns the totals of the losses of some units, and of nothing else.

        Args:
          keys: One per unit: ids of examples, or names of clusters.
          fixed_losses: shape (units, objectives, thresholds), int64 in units of 2^-32.
          layout: What to gather.
          salt: Decides the order of those single losses that are kept.
        """
        table = LossTable.of(keys, layout.tabled_losses(fixed_losses), salt=salt) if layout.tabled else LossTable()
        return dataclasses.replace(cls.zero(layout), risk=RiskTotals.of(layout.values(fixed_losses)), table=table)

    def merge(self, other: Self) -> Self:
        """Returns the totals of both sets together.

        Raises:
          ValueError: If they are over other objectives, statistics or grids.
        """
        if other.layout != self.layout:
            raise ValueError("only totals with the same layout (objectives, statistics and grid) can be added.")
        return dataclasses.replace(
            self,
            risk=self.risk.merge(other.risk),
            table=self.table.merge(other.table),
            layer_sums=_sum(self.layer_sums, other.layer_sums),
            token_counts=_sum(self.token_counts, other.token_counts),
            examples=self.examples + other.examples,
            failed=self.failed + other.failed,
            truncated=self.truncated + other.truncated,
            duplicates=self.duplicates + other.duplicates,
            content_sum=merged_sums((self.content_sum, other.content_sum)),
        )

    def evidence(self, objective: Objective) -> Evidence:
        """Returns what was gathered about one loss.

        Raises:
          ValueError: If there are no examples.
        """
        if self.risk.n == 0:
            raise ValueError("evidence needs at least one example, got n = 0. Is the calibration set empty?")
        sums = zip(self.layout.rows, self.risk.sums, strict=True)
        tabled = self.layout.tabled
        return Evidence(
            n=self.risk.n,
            sums={statistic: row for (of, statistic), row in sums if of == objective},
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


def _sum(*rows: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))
