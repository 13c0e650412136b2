"""The matrix products of a sweep, and how fast the machine can do these."""

import time
from collections.abc import Callable

import jax

from calm_beam.decoding.engine import Work
from calm_beam.model import T5Config
from calm_beam.model.numerics import matrix_product
from calm_beam.precision import FLOAT32

_SIDE = 2048
_SECONDS = 0.3
_FEWEST_CALLS = 3


def layer_row(config: T5Config) -> int:
    """Returns the multiply-adds of a decoder layer's dense kernels for one row.

    Self-attention has four kernels. Cross-attention has two; its keys and values are made once per prompt. Attention
    over positions is left out.
    """
    attention = config.emb_dim * config.num_heads * config.head_dim
    return 6 * attention + (3 if config.gated_mlp else 2) * config.emb_dim * config.mlp_dim


def projection_row(config: T5Config) -> int:
    """Returns the multiply-adds of the output head for one row."""
    return config.emb_dim * config.vocab_size


def large_steps(config: T5Config, work: Work) -> int:
    """Returns the multiply-adds of layers, projections and propagated keys and values, without rows of padding."""
    fill_row = 2 * config.emb_dim * config.num_heads * config.head_dim
    return (
        work.layer_rows * layer_row(config) + work.projection_rows * projection_row(config) + work.fill_rows * fill_row
    )


def square_rate() -> float:
    """Returns the machine's multiply-adds per second in a float32 product of two 2048 x 2048 matrices."""
    return _product_rate(_SIDE, _SIDE, columns=_SIDE)


def projection_rate(config: T5Config, *, rows: int) -> float:
    """Returns the machine's multiply-adds per second in a bare float32 product of the output head's shape."""
    return _product_rate(rows, config.emb_dim, columns=config.vocab_size)


def seconds_per_call(call: Callable[[], object]) -> float:
    """Returns the fastest of several calls, compiled before: other work on the machine only adds to a time."""
    jax.block_until_ready(call())
    seconds: list[float] = []
    while len(seconds) < _FEWEST_CALLS or sum(seconds) < _SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _product_rate(rows: int, inner: int, *, columns: int) -> float:
    left, right = (
        jax.random.normal(jax.random.key(index), shape) for index, shape in enumerate([(rows, inner), (inner, columns)])
    )
    product = jax.jit(lambda left, right: matrix_product(left, right, FLOAT32))
    return rows * inner * columns / seconds_per_call(lambda: product(left, right))
