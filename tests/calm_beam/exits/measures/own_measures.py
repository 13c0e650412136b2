"""Confidence measures as a user would write them, each complete in this file."""

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.exits.measures import Measure, Need


def largest_logit(logits: jax.Array) -> jax.Array:
    """Returns the largest logit, squashed into (0, 1)."""
    return jax.nn.sigmoid(jnp.max(logits, axis=-1) - 4)


def small_change(state: jax.Array, below: jax.Array) -> jax.Array:
    """Returns a value that grows as the change of a state gets smaller relative to the state."""
    return 1 / (1 + jnp.linalg.norm(state - below, axis=-1) / jnp.linalg.norm(below, axis=-1))


def _margin(logits: jax.Array) -> jax.Array:
    best, second = jnp.moveaxis(jax.lax.top_k(logits, 2)[0], -1, 0)
    return jnp.tanh((best - second) / 8)


MARGIN = Measure(
    name="margin",
    meaning="margin of the two largest logits, squashed",
    needs=Need.LOGITS,
    confidence=_margin,
    of_summary=lambda summary, _: jnp.tanh((summary.largest - summary.second) / 8),
    summary_parts=frozenset({"second"}),
)


def _change(state: jax.Array, below: jax.Array, layer: jax.Array) -> jax.Array:
    return jnp.where(layer > 1, small_change(state, below), jnp.float32(0.4))


# Has the name of a built-in measure, which it is not.
CHANGE = Measure(name="state", meaning="small change, but after layer 1", needs=Need.STATES, confidence=_change)
SCORE = Measure(
    name="score", meaning="squared score", needs=Need.CLASSIFIER, confidence=lambda score: jnp.square(score)
)


def of_nothing(anything: jax.Array) -> jax.Array:
    """Has a parameter of another name."""
    return anything


def beside_others(logits: jax.Array) -> jax.Array:
    """Compares a row with all rows that it is given."""
    largest = jnp.max(jax.nn.softmax(logits), axis=-1)
    return largest / jnp.max(largest)


def of_one_number(logits: jax.Array) -> jax.Array:
    """Ignores that there are rows."""
    return jnp.max(logits)


def breaks(logits: jax.Array) -> jax.Array:
    """Raises an error."""
    raise KeyError("missing")


def in_numpy(logits: jax.Array) -> np.ndarray:
    """Computes with NumPy, which cannot be traced."""
    return np.max(np.asarray(logits), axis=-1)


BAD_CHANGE = Measure(
    name="bad", meaning="a number for each part of a state", needs=Need.STATES, confidence=lambda state, below, _: state
)
CHEAT = Measure(
    name="cheat", meaning="looks at the last layer", needs=Need.LAST_TOKEN, confidence=lambda logits, last: last
)
NUMBER = 5
