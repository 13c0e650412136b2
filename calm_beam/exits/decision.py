"""What a decision needs of the output distribution: the best token, and how sure it is."""

import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.model.attention import PRECISION

_LOGGER = logging.getLogger(__name__)
# Where the kernel takes over.
_KERNEL_PLATFORMS = ("gpu", "tpu")
# Of what the kernel is tried on: not divisible by its blocks, and more than one of them.
_PROBE_ROWS, _PROBE_ENTRIES = 300, 2500
# Bytes of logits that are held at a time: they stay in the cache, and a large vocabulary never fills the memory.
_LOGITS_BYTES = 1 << 23
# Vocabulary entries that are reduced side by side: a reduction along the innermost axis alone is not vectorised on CPU.
_ABREAST = 128


def decide(
    states: jax.Array, weights: jax.Array, *, vocab_axis: int, measure: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns token, confidence and finiteness of every state, without ever holding all logits.

    On GPU and TPU by `decision_kernel`, if it gives there what the code for CPU does; else, with a warning, by that.

    Args:
      states: float32, shape (rows, width). What the head's weights multiply (`EarlyExitT5.head_inputs`).
      weights: float32, shape (width, vocabulary), or its transpose (`EarlyExitT5.head_weights`).
      vocab_axis: Axis of the vocabulary in `weights`.
      measure: `softmax`, `softmax_max`, or another, for which the confidence is 0 here: it does not come from logits.

    Returns:
      int32, float32 and bool, each of shape (rows,). The token is the first of the largest logits.
      Where a logit is NaN, the token is 0 and nothing is finite.
    """
    platform = jax.default_backend()
    if platform in _KERNEL_PLATFORMS and _kernel_agrees(platform, *weights.shape, vocab_axis):
        return _decide_fused(platform, states, weights, vocab_axis, measure)
    return _decide_in_chunks(states, weights, vocab_axis, measure)


@functools.cache
def _kernel_agrees(platform: str, *shape_and_axis: int) -> bool:
    """Returns whether the kernel, for weights of a shape, compiles here and decides as the chunked code does.

    Compared on more rows and entries of the vocabulary than a block has, at the full width: on that, the kernel's need
    of memory depends.
    """
    *shape, vocab_axis = shape_and_axis
    shape[vocab_axis] = min(shape[vocab_axis], _PROBE_ENTRIES)
    generator = np.random.default_rng(0)
    states = generator.standard_normal((_PROBE_ROWS, shape[1 - vocab_axis])).astype(np.float32)
    weights = generator.standard_normal(shape).astype(np.float32) * np.float32(2 / np.sqrt(shape[1 - vocab_axis]))
    states[1, 0] = np.nan
    try:
        for measure in ("softmax", "softmax_max"):
            fused = _run_now(functools.partial(_decide_fused, platform), states, weights, vocab_axis, measure)
            plain = _run_now(_decide_in_chunks, states, weights, vocab_axis, measure)
            for values, expected in zip(fused, plain, strict=True):
                np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)
    except Exception as error:  # Whatever the compiler raises: the chunked code computes the same, only slower.
        _LOGGER.warning(
            "The decision kernel is not used on this %s, for a head of width %d: it does not compile, or gives other "
            "numbers than the plain code, which is used instead: the results stand, decoding is slower. Report this "
            "with the versions of jax and jaxlib. Cause: %s: %s",
            platform,
            shape[1 - vocab_axis],
            type(error).__name__,
            error,
        )
        return False
    return True


def _run_now(
    decided: Callable[..., tuple[jax.Array, ...]],
    states: np.ndarray,
    weights: np.ndarray,
    vocab_axis: int,
    measure: str,
) -> tuple[jax.Array, ...]:
    """Returns what a function decides. It runs at once, compiled, also where the caller is being traced."""
    compute = functools.partial(decided, vocab_axis=vocab_axis, measure=measure)
    return jax.jit(compute).lower(states, weights).compile()(states, weights)


def _decide_fused(
    platform: str, states: jax.Array, weights: jax.Array, vocab_axis: int, measure: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # Imported here: nothing but an accelerator needs Pallas.
    from calm_beam.exits.decision_kernel import summarise

    largest, token, second, total = summarise(states, weights, vocab_axis=vocab_axis, platform=platform)
    if measure == "softmax":
        confidence = -jnp.expm1(second - largest) / total
    elif measure == "softmax_max":
        confidence = 1 / total
    else:
        confidence = jnp.zeros_like(largest)
    return token, confidence, jnp.isfinite(largest)


def _decide_in_chunks(
    states: jax.Array, weights: jax.Array, vocab_axis: int, measure: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    kernel = weights if vocab_axis else weights.T
    return _in_chunks(
        lambda part: jnp.dot(part, kernel, precision=PRECISION), states, vocab_size=kernel.shape[1], measure=measure
    )


def _in_chunks(
    project: Callable[[jax.Array], jax.Array], states: jax.Array, *, vocab_size: int, measure: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
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
    # A maximum alone passes over a NaN among numbers on CPU (jaxlib 0.10.2), and a broken model would go unnoticed.
    largest = jnp.where(reduced(jnp.any, jnp.isnan(blocked)), jnp.float32(jnp.nan), reduced(jnp.max, blocked))
    # Not argmax: a reduction of pairs, which is many times slower on CPU. A row with NaN has no largest: token 0.
    token = reduced(jnp.min, jnp.where(blocked == largest, index, vocab_size))
    token = jnp.where(token == vocab_size, 0, token)
    if measure == "softmax":
        second = reduced(jnp.max, jnp.where(index == token, -jnp.inf, blocked))
        confidence = -jnp.expm1(second - largest) / reduced(jnp.sum, jnp.exp(blocked - largest))
    elif measure == "softmax_max":
        confidence = 1 / reduced(jnp.sum, jnp.exp(blocked - largest))
    else:
        confidence = jnp.zeros_like(largest)
    return token[:, 0, 0], confidence[:, 0, 0], jnp.isfinite(largest)[:, 0, 0]
