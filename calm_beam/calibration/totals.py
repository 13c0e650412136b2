"""What is summed over a calibration set."""

import dataclasses
from typing import Self

import numpy as np

from calm_beam.generations import Generation
from calm_beam.risk.totals import RiskTotals

_FINGERPRINT_MODULUS = 2**256


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationTotals:
    """Sums and counts over a calibration set; merging is exact, associative and commutative.

    Attributes:
      risk: Number of examples and sums of losses.
      layer_sums: For the full model and each threshold, decoder layers used by all tokens; length 1 + thresholds.
      token_counts: For the full model and each threshold, tokens generated; same length.
      failed: Examples that could not be decoded, counted with loss 1.
      truncated: Examples whose prompt was cut.
      duplicates: Examples whose prompt another one has too, each prompt's first not counted.
      content_sum: Sum of the examples' content digests modulo 2^256: a fingerprint of the set, whatever its order.
    """

    risk: RiskTotals
    layer_sums: tuple[int, ...]
    token_counts: tuple[int, ...]
    failed: int = 0
    truncated: int = 0
    duplicates: int = 0
    content_sum: int = 0

    @classmethod
    def zero(cls, *, objectives: int, thresholds: int) -> Self:
        """Returns the totals of no examples."""
        nothing = (0,) * (thresholds + 1)
        risk = RiskTotals.zero(objectives=objectives, thresholds=thresholds)
        return cls(risk=risk, layer_sums=nothing, token_counts=nothing)

    @classmethod
    def of(cls, generation: Generation, losses: np.ndarray) -> Self:
        """Returns the totals of one example.

        Args:
          generation: Its outputs.
          losses: shape (objectives, thresholds), from `score_generation`.
        """
        objectives, thresholds = losses.shape
        outputs = generation.outputs
        nothing = (0,) * (thresholds + 1)
        return cls(
            risk=RiskTotals.zero(objectives=objectives, thresholds=thresholds).add(losses),
            layer_sums=tuple(sum(output.exit_layers) for output in outputs) or nothing,
            token_counts=tuple(len(output.tokens) for output in outputs) or nothing,
            failed=int(generation.failure is not None),
            truncated=int(generation.truncated),
            duplicates=int(generation.duplicate),
            content_sum=int.from_bytes(generation.example.content_digest(), "big"),
        )

    def merge(self, other: Self) -> Self:
        """Returns the totals of both sets together.

        Raises:
          ValueError: If they are over other objectives or grids.
        """
        return dataclasses.replace(
            self,
            risk=self.risk.merge(other.risk),
            layer_sums=_sum(self.layer_sums, other.layer_sums),
            token_counts=_sum(self.token_counts, other.token_counts),
            failed=self.failed + other.failed,
            truncated=self.truncated + other.truncated,
            duplicates=self.duplicates + other.duplicates,
            content_sum=(self.content_sum + other.content_sum) % _FINGERPRINT_MODULUS,
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
        return f"sha256-sum:{self.content_sum:064x}"


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))
