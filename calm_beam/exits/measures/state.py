"""Hidden-state saturation: how little a layer changed the state."""

from typing import TYPE_CHECKING

from .measure import Measure, Need

if TYPE_CHECKING:
    import jax


def hidden_state_saturation(state: "jax.Array", below: "jax.Array") -> "jax.Array":
    """Returns the cosine similarity of a layer's output and the output of the layer below it.

    Defined from layer 2 on; layer 1 has confidence 0 by definition, so it exits at threshold 0 only.

    Args:
      state: shape (..., width). Output of layer i, without the final norm.
      below: shape (..., width). Output of layer i - 1.

    Returns:
      Shape (...), in [-1, 1].

    Source: CALM, "Local confidence measures" (hidden-state saturation).
    """
    import jax.numpy as jnp

    norms = jnp.linalg.norm(state, axis=-1) * jnp.linalg.norm(below, axis=-1)
    cosines: jax.Array = jnp.sum(state * below, axis=-1) / norms
    return cosines


def _confidence(state: "jax.Array", below: "jax.Array", layer: "jax.Array | int") -> "jax.Array":
    import jax.numpy as jnp

    # Layer 1 has no layer below to compare with: CALM lets it exit at threshold 0 only.
    return jnp.where(layer > 1, hidden_state_saturation(state, below), jnp.float32(0))


STATE = Measure(
    name="state",
    meaning="cosine similarity of a layer's output to the one below",
    needs=Need.STATES,
    confidence=_confidence,
)
