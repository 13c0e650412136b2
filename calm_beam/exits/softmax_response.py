"""Confidence from the output distribution."""

import jax
import jax.numpy as jnp


def softmax_gap(logits: jax.Array) -> jax.Array:
    """Returns the difference of the two largest softmax probabilities, the paper's softmax response.

    In float32 the gap of a very sure layer is exactly 1.0, so even a threshold of 1 can be met: "never exit" is not the
    same as threshold 1.

    Args:
      logits: shape (..., vocabulary).

    Returns:
      Shape (...), in [0, 1]. 0 where the largest logit occurs twice.

    Source: CALM, "Local confidence measures" (softmax response).
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)
    is_largest = logits == largest
    # Two maxima and a sum instead of a sort or top_k over the vocabulary, which are many times slower on CPU.
    second = jnp.max(jnp.where(is_largest, -jnp.inf, logits), axis=-1)
    tied = jnp.sum(is_largest, axis=-1) > 1
    gap = -jnp.expm1(second - largest[..., 0]) / _normaliser(logits, largest)
    return jnp.where(tied, jnp.zeros_like(gap), gap)


def softmax_max(logits: jax.Array) -> jax.Array:
    """Returns the largest softmax probability, shape (...), of logits (..., vocabulary)."""
    return 1 / _normaliser(logits, jnp.max(logits, axis=-1, keepdims=True))


def _normaliser(logits: jax.Array, largest: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(logits - largest), axis=-1)
