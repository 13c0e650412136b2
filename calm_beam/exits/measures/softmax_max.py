"""The largest probability."""

from typing import TYPE_CHECKING

from .measure import Measure, Need

if TYPE_CHECKING:
    import jax

    from calm_beam.exits.decision import DistributionBounds, Summary


def softmax_max(logits: "jax.Array") -> "jax.Array":
    """Returns the largest softmax probability, shape (...), of logits (..., vocabulary)."""
    import jax.numpy as jnp

    return 1 / jnp.sum(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), axis=-1)


def _of_summary(summary: "Summary", _: int) -> "jax.Array":
    return 1 / summary.total


def _bounds(of: "DistributionBounds", _: int) -> tuple["jax.Array", "jax.Array"]:
    return 1 / of.total_high, 1 / of.total_low


SOFTMAX_MAX = Measure(
    name="softmax_max",
    meaning="largest probability",
    needs=Need.LOGITS,
    confidence=softmax_max,
    of_summary=_of_summary,
    summary_parts=frozenset({"total"}),
    bounds=_bounds,
)
