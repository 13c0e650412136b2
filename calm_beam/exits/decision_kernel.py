"""What a decision needs of the logits, on accelerators: projection and reduction in one Pallas kernel.

The logits of a block of rows and a block of the vocabulary live in the kernel alone; what leaves it is five numbers a
row. The products are of the precision that the model computes in, as everywhere: a calibrated threshold must meet the
confidences it was calibrated on. Their sums are float32.

TPU (Mosaic): the blocks of the vocabulary are the sequential last dimension of the grid, and the numbers of a row are
merged where they stay in VMEM. GPU (Triton): programs run side by side, so each takes a span of the vocabulary, and
the spans are merged outside. Mosaic GPU, the default of JAX 0.10, has matrix products of float32 only as tensor-core
instructions, which round the factors to TF32; Triton has true ones. JAX 0.11 deprecates Pallas on Triton.

It is compiled for both by their own compilers (`make accelerators`), and has run on neither: its numbers are compared
in interpret mode alone. `decide` therefore compares it with the plain code on the device at hand before it trusts it.
Triton needs compute capability 8.0 or more: on a T4 (7.5) the plain code decides.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from calm_beam.model.numerics import product

from .logit_summary import Summary, merged, nothing, settled, union

# TPU: rows and vocabulary entries of a block, and bytes of weights in one, of which VMEM (16 MiB) holds two and more.
_TPU_ROWS, _TPU_ENTRIES, _TPU_WEIGHTS_BYTES = 256, 1024, 1 << 21
# The vocabulary is blocked by whole lanes.
_TPU_LANES = 128
# GPU: most rows, entries of the vocabulary and of the width of a block; powers of two, from 16.
_GPU_ROWS, _GPU_ENTRIES, _GPU_WIDTH = 64, 128, 32
# Programs that fill a large GPU twice.
_GPU_PROGRAMS = 256


def summarise(
    states: jax.Array,
    weights: jax.Array,
    *,
    vocab_axis: int,
    precision: jax.lax.Precision,
    platform: str,
    interpret: bool = False,
) -> Summary:
    """Returns the summary of every row's logits, each of shape (rows,), settled.

    Args:
      states: float32 or bfloat16, shape (rows, width). What the head's weights multiply.
      weights: Of that type, shape (width, vocabulary), or its transpose.
      vocab_axis: Axis of the vocabulary in `weights`.
      precision: Of products of float32 numbers; those of bfloat16 numbers are exact at any.
      platform: `tpu` or `gpu`.
      interpret: Whether the kernel is interpreted, on any platform.
    """
    rows = states.shape[0]
    run, block_rows = {"tpu": (_on_tpu, _TPU_ROWS), "gpu": (_on_gpu, _GPU_ROWS)}[platform]
    # Powers of two: a block of rows is a tile of the matrix unit, or a vector of a program.
    block_rows = min(block_rows, max(16, pl.next_power_of_2(rows)))
    padded = jnp.pad(states, ((0, -rows % block_rows), (0, 0)))
    summary = run(padded, weights, vocab_axis, precision, block_rows, interpret)
    return settled(Summary(*(values[:rows] for values in summary)))


def _on_tpu(
    states: jax.Array,
    weights: jax.Array,
    vocab_axis: int,
    precision: jax.lax.Precision,
    block_rows: int,
    interpret: bool,
) -> Summary:
    from jax.experimental.pallas import tpu

    rows, width = states.shape
    vocab_size = weights.shape[vocab_axis]
    fitting = _TPU_WEIGHTS_BYTES // (weights.dtype.itemsize * width) // _TPU_LANES * _TPU_LANES
    block = min(vocab_size, max(_TPU_LANES, min(_TPU_ENTRIES, fitting)))

    def kernel(states_ref: Any, weights_ref: Any, *kept: Any) -> None:
        step = pl.program_id(1)
        logits = _product(states_ref[...], weights_ref[...], vocab_axis, precision)
        new = _of_block(logits, step * block, vocab_size)

        @pl.when(step == 0)
        def _first() -> None:
            _write(kept, new)

        @pl.when(step > 0)
        def _merge() -> None:
            _write(kept, merged(Summary(*(ref[...] for ref in kept)), new))

    return _column(
        pl.pallas_call(
            kernel,
            grid=(rows // block_rows, pl.cdiv(vocab_size, block)),
            in_specs=[
                pl.BlockSpec((block_rows, width), lambda row, step: (row, 0)),
                pl.BlockSpec((width, block), lambda row, step: (0, step))
                if vocab_axis
                else pl.BlockSpec((block, width), lambda row, step: (step, 0)),
            ],
            # The same block at every step: it is written back after the last.
            out_specs=[pl.BlockSpec((block_rows, 1), lambda row, step: (row, 0))] * len(Summary._fields),
            out_shape=_shapes(rows, 1),
            compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            cost_estimate=_cost(states, weights, vocab_size),
            interpret=interpret,
        )(states, weights)
    )


def _on_gpu(
    states: jax.Array,
    weights: jax.Array,
    vocab_axis: int,
    precision: jax.lax.Precision,
    block_rows: int,
    interpret: bool,
) -> Summary:
    from jax.experimental.pallas import triton

    rows, width = states.shape
    vocab_size = weights.shape[vocab_axis]
    blocks = pl.cdiv(vocab_size, _GPU_ENTRIES)
    span = pl.cdiv(blocks, max(1, _GPU_PROGRAMS * block_rows // rows))
    spans = pl.cdiv(blocks, span)

    def kernel(states_ref: Any, weights_ref: Any, *parts: Any) -> None:
        first_row, first_entry = pl.program_id(0) * block_rows, pl.program_id(1) * span * _GPU_ENTRIES

        def logits_from(entry: jax.Array) -> jax.Array:
            def add(step: jax.Array, logits: jax.Array) -> jax.Array:
                column = step * _GPU_WIDTH
                part = _load(triton.load, states_ref, (first_row, column), (block_rows, _GPU_WIDTH))
                corner, shape = (column, entry), (_GPU_WIDTH, _GPU_ENTRIES)
                if vocab_axis == 0:
                    corner, shape = corner[::-1], shape[::-1]
                columns = _load(triton.load, weights_ref, corner, shape)
                return logits + _product(part, columns, vocab_axis, precision)

            zero = jnp.zeros((block_rows, _GPU_ENTRIES), jnp.float32)
            logits: jax.Array = jax.lax.fori_loop(0, pl.cdiv(width, _GPU_WIDTH), add, zero)
            return logits

        def merge(step: jax.Array, kept: Summary) -> Summary:
            entry = first_entry + step * _GPU_ENTRIES
            return merged(kept, _of_block(logits_from(entry), entry, vocab_size))

        _write(parts, jax.lax.fori_loop(0, span, merge, nothing((block_rows, 1))))

    whole = pl.BlockSpec(memory_space=pl.ANY)
    made = pl.pallas_call(
        kernel,
        grid=(rows // block_rows, spans),
        in_specs=[whole, whole],
        out_specs=[pl.BlockSpec((block_rows, 1), lambda row, part: (row, part))] * len(Summary._fields),
        out_shape=_shapes(rows, spans),
        compiler_params=triton.CompilerParams(num_warps=8),
        cost_estimate=_cost(states, weights, vocab_size),
        interpret=interpret,
    )(states, weights)
    # [rows, spans] -> [rows]
    return _column(union(Summary(*made)))


def _cost(states: jax.Array, weights: jax.Array, vocab_size: int) -> pl.CostEstimate:
    """Returns what compilers, who cannot look into a kernel, are told that it takes."""
    return pl.CostEstimate(
        flops=2 * states.shape[0] * weights.size,
        transcendentals=states.shape[0] * vocab_size,
        bytes_accessed=weights.size * weights.dtype.itemsize + states.size * states.dtype.itemsize,
    )


def _product(states: jax.Array, weights: jax.Array, vocab_axis: int, precision: jax.lax.Precision) -> jax.Array:
    if weights.dtype == jnp.bfloat16:
        # Products of bfloat16 numbers are exact in float32 at any precision, and Mosaic refuses to be asked for more.
        precision = jax.lax.Precision.DEFAULT
    return product(states, weights, (((1,), (1 - vocab_axis,)), ((), ())), precision=precision)


def _load(load: Callable[..., jax.Array], ref: Any, corner: tuple[Any, Any], shape: tuple[int, int]) -> jax.Array:
    """Returns a block of a matrix, 0 where it reaches beyond."""
    inside = [
        start + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < ref.shape[axis] for axis, start in enumerate(corner)
    ]
    block = tuple(pl.ds(start, size) for start, size in zip(corner, shape, strict=True))
    return load(ref.at[block], mask=inside[0] & inside[1], other=0.0)


def _of_block(logits: jax.Array, first: Any, vocab_size: int) -> Summary:
    """Returns the summary, each (rows, 1), of a block of logits, (rows, entries), that starts at entry `first`."""
    index = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    # What lies beyond the vocabulary may be anything, NaN too.
    logits = jnp.where(index < vocab_size, logits, -jnp.inf)
    # Whether a maximum passes NaN on differs from device to device; inf and an index below all others do everywhere.
    is_nan = logits != logits
    logits, index = jnp.where(is_nan, jnp.inf, logits), jnp.where(is_nan, -1, index)
    lowest, one, zero = jnp.full_like(logits, -jnp.inf), jnp.ones_like(logits), jnp.zeros_like(logits)
    return union(Summary(logits, index, lowest, one, zero))


def _write(refs: Any, summary: Summary) -> None:
    for ref, values in zip(refs, summary, strict=True):
        ref[...] = values


def _shapes(rows: int, parts: int) -> list[jax.ShapeDtypeStruct]:
    number, index = (jax.ShapeDtypeStruct((rows, parts), dtype) for dtype in (jnp.float32, jnp.int32))
    return [number, index, number, number, number]


def _column(made: Any) -> Summary:
    return Summary(*(values[:, 0] for values in made))
