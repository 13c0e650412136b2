"""What can be known of a softmax distribution when only its largest logits are."""

from typing import NamedTuple

import jax


class DistributionBounds(NamedTuple):
    """Bounds of the sums that a confidence is made of, each float32 of shape (rows,); x is a logit less the largest.

    Attributes:
      gap_low: Of the second largest x, at most 0.
      gap_high: Of the same.
      total_low: Of the sum of exp(x), at least 1.
      total_high: Of the same.
      weighted_low: Of the sum of -x exp(x), at least 0.
      weighted_high: Of the same.
    """

    gap_low: jax.Array
    gap_high: jax.Array
    total_low: jax.Array
    total_high: jax.Array
    weighted_low: jax.Array
    weighted_high: jax.Array
