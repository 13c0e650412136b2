"""Entropy as a confidence: how far the output distribution is from uniform."""

import math
from typing import TYPE_CHECKING

from .measure import Measure, Need

if TYPE_CHECKING:
    import jax

    from calm_beam.exits.decision import DistributionBounds, Summary


def entropy_confidence(logits: "jax.Array") -> "jax.Array":
    """Returns 1 - H / log V, where H is the entropy of the softmax distribution over V tokens.

    Unlike the gap, it takes the whole distribution into account: with two tokens of probability 1/2 each, the gap is 0,
    and this confidence is close to 1.

    Args:
      logits: shape (..., vocabulary), of two or more tokens.

    Returns:
      Shape (...), in [0, 1]: 0 for a uniform distribution, 1 for a certain one.

    Source: the exit criterion of BranchyNet (Teerapittayanon et al., 2016), turned into a confidence.
    """
    import jax.numpy as jnp

    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(below)
    total = jnp.sum(weights, axis=-1)
    # exp(-inf) (-inf) is NaN, but must be 0.
    weighted = jnp.sum(jnp.where(weights > 0, weights * below, jnp.float32(0)), axis=-1)
    return _of_sums(total, weighted, logits.shape[-1])


def _of_summary(summary: "Summary", vocab_size: int) -> "jax.Array":
    return _of_sums(summary.total, summary.weighted, vocab_size)


def _of_sums(total: "jax.Array", weighted: "jax.Array", entries: int) -> "jax.Array":
    """Returns the confidence, given the sums of exp(x) and of x exp(x), with x the logits less their largest."""
    import jax.numpy as jnp

    entropy = jnp.log(total) - weighted / total
    # Rounding may exceed either end by a few units in the last place.
    return jnp.clip(1 - entropy / jnp.float32(math.log(entries)), 0, 1)


def _bounds(of: "DistributionBounds", vocab_size: int) -> tuple["jax.Array", "jax.Array"]:
    import jax.numpy as jnp

    # The entropy is log t + w / t. As a function of t it falls until t = w and rises from there.
    lowest_at = jnp.clip(of.weighted_low, of.total_low, of.total_high)
    high = _of_sums(lowest_at, -of.weighted_low, vocab_size)
    ends = [_of_sums(total, -of.weighted_high, vocab_size) for total in (of.total_low, of.total_high)]
    return jnp.minimum(*ends), high


ENTROPY = Measure(
    name="entropy",
    meaning="1 - H / log V, with the entropy H of the distribution over V tokens",
    needs=Need.LOGITS,
    confidence=entropy_confidence,
    of_summary=_of_summary,
    summary_parts=frozenset({"total", "weighted"}),
    bounds=_bounds,
)
