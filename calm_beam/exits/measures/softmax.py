"""The paper's softmax response: the gap between the two largest probabilities."""

from typing import TYPE_CHECKING

from .measure import Measure, Need

if TYPE_CHECKING:
    import jax

    from calm_beam.exits.decision import DistributionBounds, Summary


def softmax_gap(logits: "jax.Array") -> "jax.Array":
    """Returns the difference of the two largest softmax probabilities, the paper's softmax response.

    In float32 the gap of a very confident layer is exactly 1.0, so even a threshold of 1 can be met: "never exit" is
    not the same as threshold 1.

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


def _of_summary(summary: "Summary", _: int) -> "jax.Array":
    import jax.numpy as jnp

    return -jnp.expm1(summary.second - summary.largest) / summary.total


def _bounds(of: "DistributionBounds", _: int) -> tuple["jax.Array", "jax.Array"]:
    import jax.numpy as jnp

    return -jnp.expm1(of.gap_high) / of.total_high, -jnp.expm1(of.gap_low) / of.total_low


SOFTMAX = Measure(
    name="softmax",
    meaning="gap between the two largest probabilities",
    needs=Need.LOGITS,
    confidence=softmax_gap,
    of_summary=_of_summary,
    summary_parts=frozenset({"second", "total"}),
    bounds=_bounds,
    is_gap=True,
)
