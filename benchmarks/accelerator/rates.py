"""What the machine can do at best: products of matrices in each precision, and bytes moved."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from .part import Case, Clock, Scale, fastest

# Products and copies of one call: a call costs some microseconds of its own.
_REPEATS = 8
_PRECISIONS = {"float32": "highest", "float32, high": "high", "float32, default": "default"}


def measure(scale: Scale, clock: Clock) -> Iterator[Case]:
    """Yields operations a second of a square product in each precision, and bytes a second of a copy."""
    yield from clock.within(_cases(scale))


def _cases(scale: Scale) -> Iterator[tuple[Case, Callable[[], Case]]]:
    side = scale.square
    for name, precision in _PRECISIONS.items():
        run = functools.partial(_product, scale, jnp.float32, precision, jnp.float32)
        yield {"measured": "square product", "in": name, "side": side}, run
    yield (
        {"measured": "square product", "in": "bfloat16", "side": side},
        functools.partial(_product, scale, jnp.bfloat16, "default", jnp.float32),
    )
    yield (
        {"measured": "square product", "in": "int8", "side": side},
        functools.partial(_product, scale, jnp.int8, "default", jnp.int32),
    )
    yield {"measured": "copy", "bytes": scale.copied_bytes}, functools.partial(_copy, scale)


def _product(scale: Scale, dtype: jnp.dtype, precision: str, made: jnp.dtype) -> Case:
    shape = (scale.square, scale.square)
    left, right = (
        (jax.random.normal(jax.random.key(seed), shape) * (40 if dtype == jnp.int8 else 1)).astype(dtype)
        for seed in range(2)
    )

    @jax.jit
    def products(left: jax.Array, right: jax.Array) -> jax.Array:
        def again(_: jax.Array, left: jax.Array) -> jax.Array:
            product = jax.lax.dot(left, right, precision=precision, preferred_element_type=made)
            # Each is made of the one before, in the factors' type.
            return product.astype(dtype)

        return jax.lax.fori_loop(0, _REPEATS, again, left)

    seconds = fastest(lambda: products(left, right), runs=scale.runs) / _REPEATS
    return {"operations_per_second": 2 * scale.square**3 / seconds}


def _copy(scale: Scale) -> Case:
    values = jax.random.normal(jax.random.key(0), (scale.copied_bytes // 4,))

    @jax.jit
    def copied(values: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _REPEATS, lambda _, values: values + jnp.float32(1), values)

    seconds = fastest(lambda: copied(values), runs=scale.runs) / _REPEATS
    # Read and written.
    return {"bytes_per_second": 2 * scale.copied_bytes / seconds}
