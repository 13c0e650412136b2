"""The oracle: whether a layer already predicts what the last one would."""

from typing import TYPE_CHECKING

from .measure import Measure, Need

if TYPE_CHECKING:
    import jax


def agreement(logits: "jax.Array", last_logits: "jax.Array") -> "jax.Array":
    """Returns 1 where both predict the same token, else 0.

    Not a confidence measure that can be served, since it needs the last layer: the bound that measures are compared to.

    Args:
      logits: shape (..., vocabulary). Of any layer.
      last_logits: Of layer L, same shape.

    Returns:
      float32, shape (...).

    Source: CALM, "State propagation" (oracle confidence measure).
    """
    import jax.numpy as jnp

    return (jnp.argmax(logits, axis=-1) == jnp.argmax(last_logits, axis=-1)).astype(jnp.float32)


ORACLE = Measure(
    name="oracle",
    meaning="1 where a layer predicts the token that the last one would, else 0; for analysis",
    needs=Need.LAST_LOGITS,
    confidence=agreement,
    takes_schedule=False,
)
