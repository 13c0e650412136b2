"""Attention of packed rows by native code, `native/attend.c`: keys and values are read where they stand.

It is for float32, on one device. Elsewhere XLA gathers them, and the networks do the rest.
"""

import jax
import jax.numpy as jnp

from calm_beam.arithmetic import Arithmetic
from calm_beam.native.library import TO_PATH, TO_SOURCE, is_available

from .interface import KeysValues, Numbers
from .share import Share


def is_for(arithmetic: Arithmetic, *, devices: int) -> bool:
    """Returns whether a model of an arithmetic, on so many devices, may attend by native code on this machine."""
    return arithmetic.dtype == "float32" and devices == 1 and is_available()


def share_of_path(
    queries: jax.Array,
    store: KeysValues,
    *,
    paths: Numbers,
    steps: Numbers,
    biases: jax.Array,
    first: int,
    window: Numbers | int,
) -> Share:
    """Returns what rows have of the keys on their paths, of which each sees those of its own and earlier steps.

    Args:
      queries: float32, shape (rows, heads, head_dim).
      store: Keys and values, each (nodes, heads of keys * head_dim).
      paths: int32, shape (rows, length). The node of each step.
      steps: int32, shape (rows,). Of the queries, below `length`.
      biases: float32, shape (heads or 1, ages). By how many steps a key is older; shape (0, 0) for none.
      first: The first step whose key is seen.
      window: int32 scalar. How many keys are seen, a query's own included.
    """
    scalars = [jnp.asarray(number, jnp.int32) for number in (first, window)]
    return _called(TO_PATH, queries, *store, paths, steps, biases, *scalars)


def share_of_source(
    queries: jax.Array, source: KeysValues, *, places: Numbers, mask: jax.Array, seen_from: jax.Array
) -> Share:
    """Returns what rows have of the keys of their sources.

    Args:
      queries: float32, shape (rows, heads, head_dim).
      source: Keys and values, each (places, heads of keys, source, head_dim).
      places: int32, shape (rows,). Of each row's source; a row whose place is none of these sees nothing.
      mask: bool, shape (places, source). Which positions are no padding.
      seen_from: int32, shape (rows,). The first position that a row sees.
    """
    return _called(TO_SOURCE, queries, *source, places, mask, seen_from)


def _called(name: str, queries: jax.Array, *others: Numbers) -> Share:
    by_head = jax.ShapeDtypeStruct(queries.shape[:-1], jnp.float32)
    call = jax.ffi.ffi_call(name, (jax.ShapeDtypeStruct(queries.shape, jnp.float32), by_head, by_head))
    return Share(*call(queries, *others))
