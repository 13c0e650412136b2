"""Measures of the output distribution.

They are the paper's softmax response, which is the gap between the two largest probabilities; the largest probability;
and how far the distribution is from uniform, by its entropy. Each can also be had from a few sums over the logits, and
has bounds where those are known within bounds.
"""

import math
from typing import TYPE_CHECKING

from .measure import Measure, Need

if TYPE_CHECKING:
    import jax

    from calm_beam.exits.logit_summary import DistributionBounds, Summary


def softmax_gap(logits: "jax.Array") -> "jax.Array":
    """Returns the difference of the two largest softmax probabilities, the paper's softmax response.

    In float32 the gap of a very sure layer is exactly 1.0, so even a threshold of 1 can be met: "never exit" is not the
    same as threshold 1.

    Args:
      logits: shape (..., vocabulary).

    Returns:
      Shape (...), in [0, 1]. 0 where the largest logit occurs twice.

    Source: CALM, "Local confidence measures" (softmax response).
    """
    import jax.numpy as jnp

    largest = jnp.max(logits, axis=-1, keepdims=True)
    is_largest = logits == largest
    # Two maxima and a sum instead of a sort or top_k over the vocabulary, which are many times slower on CPU.
    second = jnp.max(jnp.where(is_largest, -jnp.inf, logits), axis=-1)
    tied = jnp.sum(is_largest, axis=-1) > 1
    gap = -jnp.expm1(second - largest[..., 0]) / jnp.sum(jnp.exp(logits - largest), axis=-1)
    return jnp.where(tied, jnp.zeros_like(gap), gap)


def _gap_of_summary(summary: "Summary", _: int) -> "jax.Array":
    import jax.numpy as jnp

    return -jnp.expm1(summary.second - summary.largest) / summary.total


def _gap_bounds(of: "DistributionBounds", _: int) -> tuple["jax.Array", "jax.Array"]:
    import jax.numpy as jnp

    return -jnp.expm1(of.gap_high) / of.total_high, -jnp.expm1(of.gap_low) / of.total_low


SOFTMAX = Measure(
    name="softmax",
    meaning="gap between the two largest probabilities",
    needs=Need.LOGITS,
    confidence=softmax_gap,
    of_summary=_gap_of_summary,
    summary_parts=frozenset({"second", "total"}),
    bounds=_gap_bounds,
    is_gap=True,
)


def softmax_max(logits: "jax.Array") -> "jax.Array":
    """Returns the largest softmax probability, shape (...), of logits (..., vocabulary)."""
    import jax.numpy as jnp

    return 1 / jnp.sum(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), axis=-1)


def _max_of_summary(summary: "Summary", _: int) -> "jax.Array":
    return 1 / summary.total


def _max_bounds(of: "DistributionBounds", _: int) -> tuple["jax.Array", "jax.Array"]:
    return 1 / of.total_high, 1 / of.total_low


SOFTMAX_MAX = Measure(
    name="softmax_max",
    meaning="largest probability",
    needs=Need.LOGITS,
    confidence=softmax_max,
    of_summary=_max_of_summary,
    summary_parts=frozenset({"total"}),
    bounds=_max_bounds,
)


def entropy_confidence(logits: "jax.Array") -> "jax.Array":
    """Returns 1 - H / log V, where H is the entropy of the softmax distribution over V tokens.

    Unlike the gap it takes the whole distribution into account: two tokens of probability 1/2 each leave the gap at 0,
    and this close to 1.

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
    # exp(-inf) (-inf) is NaN, and stands for 0.
    weighted = jnp.sum(jnp.where(weights > 0, weights * below, jnp.float32(0)), axis=-1)
    return _entropy_of_sums(total, weighted, logits.shape[-1])


def _entropy_of_summary(summary: "Summary", vocab_size: int) -> "jax.Array":
    return _entropy_of_sums(summary.total, summary.weighted, vocab_size)


def _entropy_of_sums(total: "jax.Array", weighted: "jax.Array", entries: int) -> "jax.Array":
    """Returns the confidence, given the sums of exp(x) and of x exp(x), with x the logits less their largest."""
    import jax.numpy as jnp

    entropy = jnp.log(total) - weighted / total
    # Rounding may leave a few units in the last place beyond either end.
    return jnp.clip(1 - entropy / jnp.float32(math.log(entries)), 0, 1)


def _entropy_bounds(of: "DistributionBounds", vocab_size: int) -> tuple["jax.Array", "jax.Array"]:
    import jax.numpy as jnp

    # The entropy is log t + w / t. As a function of t it falls until t = w and rises from there.
    lowest_at = jnp.clip(of.weighted_low, of.total_low, of.total_high)
    high = _entropy_of_sums(lowest_at, -of.weighted_low, vocab_size)
    ends = [_entropy_of_sums(total, -of.weighted_high, vocab_size) for total in (of.total_low, of.total_high)]
    return jnp.minimum(*ends), high


ENTROPY = Measure(
    name="entropy",
    meaning="1 - H / log V, with the entropy H of the distribution over V tokens",
    needs=Need.LOGITS,
    confidence=entropy_confidence,
    of_summary=_entropy_of_summary,
    summary_parts=frozenset({"total", "weighted"}),
    bounds=_entropy_bounds,
)
