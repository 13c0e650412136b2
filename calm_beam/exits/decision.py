"""What a decision needs of the output distribution: the best token, and how sure it is."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Bytes of logits that are held at a time: they stay in the cache, and a large vocabulary never fills the memory.
_LOGITS_BYTES = 1 << 23
# Vocabulary entries that are reduced side by side: a reduction along the innermost axis alone is not vectorised on CPU.
_ABREAST = 128


def decide(
    project: Callable[[jax.Array], jax.Array], states: jax.Array, *, measure: str, vocab_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns token, confidence and finiteness of every state, without ever holding all logits.

    Args:
      project: Turns states (rows, width) into logits (rows, vocabulary).
      states: shape (rows, width).
      measure: `softmax`, `softmax_max`, or another, for which the confidence is 0 here: it does not come from logits.
      vocab_size: Size of the vocabulary.

    Returns:
      int32, float32 and bool, each of shape (rows,). The token is the first of the largest logits.
    """
    rows = states.shape[0]
    chunk = rows
    while chunk % 2 == 0 and chunk * vocab_size * 4 > _LOGITS_BYTES:
        chunk //= 2
    if chunk == rows:
        return _decide(project(states), measure)
    parts = jax.lax.map(lambda part: _decide(project(part), measure), states.reshape(rows // chunk, chunk, -1))
    return tuple(values.reshape(rows) for values in parts)


def _decide(logits: jax.Array, measure: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, vocab_size = logits.shape
    abreast = _ABREAST if vocab_size % _ABREAST == 0 else 1
    # [rows, vocabulary] -> [rows, blocks, abreast]: first over blocks, then over what is left.
    blocked = logits.reshape(rows, -1, abreast)

    def reduced(reduce: Callable[..., jax.Array], values: jax.Array) -> jax.Array:
        return reduce(reduce(values, axis=1), axis=1)[:, None, None]

    shape = blocked.shape[1:]
    # [1, blocks, abreast]
    index = (jax.lax.broadcasted_iota(jnp.int32, shape, 0) * abreast + jax.lax.broadcasted_iota(jnp.int32, shape, 1))[
        None
    ]
    largest = reduced(jnp.max, blocked)
    # Not argmax: a reduction of pairs, which is many times slower on CPU. A row of NaN has no largest: token 0.
    token = reduced(jnp.min, jnp.where(blocked == largest, index, vocab_size))
    token = jnp.where(token == vocab_size, 0, token)
    if measure == "softmax":
        second = reduced(jnp.max, jnp.where(index == token, -jnp.inf, blocked))
        confidence = -jnp.expm1(second - largest) / reduced(jnp.sum, jnp.exp(blocked - largest))
    elif measure == "softmax_max":
        confidence = 1 / reduced(jnp.sum, jnp.exp(blocked - largest))
    else:
        confidence = jnp.zeros_like(largest)
    # A NaN that the maximum has passed over (on CPU, XLA's may) is one in the sum of the softmax, if there is a sum.
    has_nan = jnp.isnan(confidence) if measure in ("softmax", "softmax_max") else reduced(jnp.any, jnp.isnan(blocked))
    return token[:, 0, 0], confidence[:, 0, 0], (jnp.isfinite(largest) & ~has_nan)[:, 0, 0]
