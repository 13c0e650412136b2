"""The oracle: whether a layer already predicts what the last one would."""

import jax
import jax.numpy as jnp


def agreement(logits: jax.Array, last_logits: jax.Array) -> jax.Array:
    """Returns 1 where both predict the same token, else 0.

    Not a confidence measure that can be served, since it needs the last layer: the bound that measures are compared to.

    Args:
      logits: shape (..., vocabulary). Of any layer.
      last_logits: Of layer L, same shape.

    Returns:
      float32, shape (...).

    Source: CALM, "State propagation" (oracle confidence measure).
    """
    return (jnp.argmax(logits, axis=-1) == jnp.argmax(last_logits, axis=-1)).astype(jnp.float32)
