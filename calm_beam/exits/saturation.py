"""Confidence from how little a layer changed the hidden state."""

import jax
import jax.numpy as jnp


def hidden_state_saturation(state: jax.Array, below: jax.Array) -> jax.Array:
    """Returns the cosine similarity of a layer's output and the output of the layer below it.

    Defined from layer 2 on; layer 1 has confidence 0 by definition, so it exits at threshold 0 only.

    Args:
      state: shape (..., width). Output of layer i, without the final norm.
      below: shape (..., width). Output of layer i - 1.

    Returns:
      Shape (...), in [-1, 1].

    Source: CALM, "Local confidence measures" (hidden-state saturation).
    """
    norms = jnp.linalg.norm(state, axis=-1) * jnp.linalg.norm(below, axis=-1)
    return jnp.sum(state * below, axis=-1) / norms
