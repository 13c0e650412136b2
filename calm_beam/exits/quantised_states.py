"""States in few bits, and the norms by which bounds of their products grow."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .quantised_head import UNIT, CertifiedHead


class QuantisedStates(NamedTuple):
    """States without the columns that a head keeps, as sums of one or two arrays of few bits.

    Attributes:
      parts: The arrays, each (rows, width), with the step that it counts, (rows, 1).
      norm: shape (rows, 1). Of the states, rounded up; NaN for zeros.
      missing_norm: shape (rows, 1). Of what the parts leave out, with rounding.
      kept: shape (rows, columns). The columns that the head keeps.
      kept_norm: shape (rows, 1). Their rounding, as a multiple of the norm of a token's kept weights.
    """

    parts: list[tuple[jax.Array, jax.Array]]
    norm: jax.Array
    missing_norm: jax.Array
    kept: jax.Array
    kept_norm: jax.Array


def quantised_states(states: jax.Array, head: CertifiedHead, *, parts: int) -> QuantisedStates:
    """Returns states, float32 of shape (rows, width), as a head's products take them, in so many parts."""
    width, is_integer = states.shape[1], head.quantised.dtype != jnp.bfloat16
    kept = states[:, head.kept]
    states = states.at[:, head.kept].set(0)
    most = jnp.max(jnp.abs(states), axis=1, keepdims=True)
    made, missing = _in_parts(states, most, parts=parts, is_integer=is_integer)
    norm = norm_of(states, most)
    missing_norm = norm_of(missing, most) + 8 * UNIT * width**0.5 * most
    # Integers add without an error; sums of bfloat16 products do not.
    missing_norm += (8 + (0 if is_integer else width)) * UNIT * (norm + missing_norm)
    most_kept = jnp.max(jnp.abs(kept), axis=1, keepdims=True, initial=0)
    kept_norm = jnp.where(most_kept == 0, 0, norm_of(kept, most_kept)) * ((2 * head.kept.size + 8) * UNIT)
    return QuantisedStates(made, norm, missing_norm, kept, kept_norm)


def _in_parts(
    states: jax.Array, most: jax.Array, *, parts: int, is_integer: bool
) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array]:
    """Returns states as one or two arrays of few bits, each with the step that it counts, and what they leave out."""
    made = []
    step = most / 127
    for _ in range(parts):
        if is_integer:
            multiples = jnp.clip(jnp.round(states / jnp.where(step > 0, step, 1)), -127, 127)
            made.append((multiples.astype(jnp.int8), step))
            states = states - multiples * step
            # What is left is at most half a step.
            step = step / 254
        else:
            made.append((states.astype(jnp.bfloat16), jnp.ones_like(step)))
            states = states - made[-1][0].astype(jnp.float32)
    return made, states


def norm_of(states: jax.Array, most: jax.Array) -> jax.Array:
    """Returns the norm of every row, (rows, 1), rounded up; NaN for zeros.

    Args:
      states: shape (rows, width).
      most: shape (rows, 1). A number of their size, without which small squares would vanish.
    """
    norm: jax.Array = jnp.linalg.norm(states / most, axis=1, keepdims=True) * most * (1 + states.shape[1] * UNIT)
    return norm
