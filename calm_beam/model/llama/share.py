"""What queries have of some of their keys, so that several parts merge into one softmax."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Share(NamedTuple):
    """What queries have of a part of their keys.

    Attributes:
      mixed: float32, shape (..., heads, head_dim). Sum of the values, each times the exponential of its logit, which is
        divided by 2 to the power of `largest`.
      largest: float32, shape (..., heads). The least whole number that leaves no exponential above 1; far below any
        other if no key was seen.
      total: float32, shape (..., heads). Sum of the exponentials, divided likewise; 0 if no key was seen.
    """

    mixed: jax.Array
    largest: jax.Array
    total: jax.Array

    def merged(self, other: "Share") -> jax.Array:
        """Returns what queries attend to of both parts, (..., heads, head_dim); at least one key must be seen."""
        largest = jnp.maximum(self.largest, other.largest)
        mine, theirs = jnp.exp2(self.largest - largest), jnp.exp2(other.largest - largest)
        total = mine * self.total + theirs * other.total
        mixed = mine[..., None] * self.mixed + theirs[..., None] * other.mixed
        return mixed / total[..., None]
