"""Bounds of all logits on accelerators: the product with a head of bfloat16 and all that follows, in one Pallas kernel.

The products are those of tensor units: bfloat16 factors with float32 sums, in whatever order, which the bounds allow.
Beside the product XLA passes over the logits half a dozen times; here they stay in the kernel until their bounds are
written, once.

An entry of the vocabulary is entry e of block b at place e * blocks + b (`quantised_head.BLOCK` entries a block), so
that blocks lie side by side: the kernel goes through the entries of many blocks one after the other, and keeps what
each block has come to. TPU (Mosaic): entries are the sequential last dimension of the grid. GPU (Triton): a program
has some blocks, and all of their entries.

As `decision_kernel`, it is compiled for both by their own compilers, and has run on neither: its numbers are compared
in interpret mode alone, and `screening` compares it with the plain code on the device at hand before it trusts it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from calm_beam.model.numerics import product

from .logit_summary import exp_below
from .quantised_head import BLOCK, UNIT, CertifiedHead
from .quantised_states import QuantisedStates
from .screening import BlockBounds

# TPU: rows and blocks of a tile; whole lanes, and weights of which VMEM has room for two tiles and more.
_TPU_ROWS, _TPU_BLOCKS, _TPU_WEIGHTS_BYTES, _TPU_LANES = 256, 512, 1 << 21, 128
# GPU: most rows of a tile, its blocks, and the numbers of a state that are multiplied at a time.
_GPU_ROWS, _GPU_BLOCKS, _GPU_WIDTH = 64, 64, 64
# Numbers of what is multiplied on either are a multiple of this.
_LEAST = 16
# Of an entry: of its error, of its quantised weights, and of those that are kept.
_NORMS = 3


def block_bounds(
    coarse: QuantisedStates, head: CertifiedHead, *, platform: str, interpret: bool = False
) -> BlockBounds:
    """Returns the bounds that a head of bfloat16 has of quantised states.

    Args:
      coarse: The states, in bfloat16.
      head: With weights quantised to bfloat16.
      platform: `tpu` or `gpu`.
      interpret: Whether the kernel is interpreted, on any platform.
    """
    rows = len(coarse.norm)
    run, most = {"tpu": (_on_tpu, _TPU_ROWS), "gpu": (_on_gpu, _GPU_ROWS)}[platform]
    block_rows = min(most, max(_LEAST, pl.next_power_of_2(rows)))

    def padded(values: jax.Array) -> jax.Array:
        return jnp.pad(values, ((0, -rows % block_rows), (0, _missing(values.shape[1]))))

    parts = [padded(values) for values, _ in coarse.parts]
    # Of each row: what errors, norms and norms of kept columns are multiplied by.
    factors = jnp.concatenate([coarse.norm, coarse.missing_norm, coarse.kept_norm], axis=1)
    by_row = [*parts, padded(factors), padded(coarse.kept)]
    blocks = len(head.errors) // BLOCK
    # [BLOCK, blocks, ...] of each entry
    weights = jnp.pad(head.quantised, ((0, 0), (0, _missing(head.quantised.shape[1]))))
    by_entry = [
        weights.reshape(BLOCK, blocks, -1),
        jnp.stack([head.errors, head.norms, head.kept_norms]).reshape(_NORMS, BLOCK, blocks).swapaxes(0, 1),
        _kept_by_entry(head, blocks, columns=by_row[-1].shape[1]),
    ]
    bounds = run(by_row, by_entry, len(parts), block_rows, interpret)
    return BlockBounds(*(values[:rows] for values in bounds))


def _kept_by_entry(head: CertifiedHead, blocks: int, *, columns: int) -> jax.Array:
    """Returns the columns that are kept, [BLOCK, columns, blocks], with zeros behind."""
    kept = jnp.pad(head.kept_weights, ((0, columns - len(head.kept)), (0, 0)))
    return kept.reshape(columns, BLOCK, blocks).swapaxes(0, 1)


def _on_tpu(
    by_row: Sequence[jax.Array], by_entry: Sequence[jax.Array], parts: int, block_rows: int, interpret: bool
) -> BlockBounds:
    from jax.experimental.pallas import tpu

    weights, norms, kept = by_entry
    rows, (_, blocks, width) = len(by_row[0]), weights.shape
    fitting = _TPU_WEIGHTS_BYTES // (weights.dtype.itemsize * width) // _TPU_LANES * _TPU_LANES
    tile = min(blocks, max(_TPU_LANES, min(_TPU_BLOCKS, fitting)))

    def kernel(*refs: Any) -> None:
        ins, (upper_ref, *kept_refs) = refs[: parts + 5], refs[parts + 5 :]
        states, (factors, own, weights_ref, norms_ref, kept_ref) = ins[:parts], ins[parts:]
        logits = _product(own[...], kept_ref[0], 0)
        for part in states:
            logits += _product(part[...], weights_ref[0], 1)
        each = [slice(norm, norm + 1) for norm in range(_NORMS)]
        upper = _upper(logits, [factors[:, norm] for norm in each], [norms_ref[0, norm] for norm in each])
        upper_ref[0] = upper
        entry = pl.program_id(2)

        @pl.when(entry == 0)
        def _first() -> None:
            _write(kept_refs, _of_first(upper))

        @pl.when(entry > 0)
        def _merge() -> None:
            _write(kept_refs, _merged([ref[...] for ref in kept_refs], upper))

    of_block = pl.BlockSpec((block_rows, tile), lambda row, place, entry: (row, place))
    return _in_order(
        pl.pallas_call(
            kernel,
            grid=(rows // block_rows, pl.cdiv(blocks, tile), BLOCK),
            in_specs=[
                *(pl.BlockSpec((block_rows, each.shape[1]), lambda row, place, entry: (row, 0)) for each in by_row),
                pl.BlockSpec((1, tile, width), lambda row, place, entry: (entry, place, 0)),
                *(
                    pl.BlockSpec((1, each.shape[1], tile), lambda row, place, entry: (entry, 0, place))
                    for each in (norms, kept)
                ),
            ],
            # Those of blocks are the same at every entry: they are written back after the last.
            out_specs=[
                pl.BlockSpec((1, block_rows, tile), lambda row, place, entry: (entry, row, place)),
                *[of_block] * 3,
            ],
            out_shape=_shapes(rows, blocks),
            compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            interpret=interpret,
        )(*by_row, *by_entry)
    )


def _on_gpu(
    by_row: Sequence[jax.Array], by_entry: Sequence[jax.Array], parts: int, block_rows: int, interpret: bool
) -> BlockBounds:
    from jax.experimental.pallas import triton

    weights, norms, kept = by_entry
    rows, (_, blocks, width), columns = len(by_row[0]), weights.shape, kept.shape[1]
    # A matrix each, since a program's blocks are matrices: [BLOCK * blocks, width], and twice [BLOCK * n, blocks].
    by_entry = [weights.reshape(-1, width), norms.reshape(-1, blocks), kept.reshape(-1, blocks)]

    def kernel(*refs: Any) -> None:
        ins, (upper_ref, *kept_refs) = refs[: parts + 5], refs[parts + 5 :]
        states, (factors_ref, own_ref, weights_ref, norms_ref, kept_ref) = ins[:parts], ins[parts:]
        first_row, first_block = pl.program_id(0) * block_rows, pl.program_id(1) * _GPU_BLOCKS
        of_rows, of_blocks = pl.ds(first_row, block_rows), pl.ds(first_block, _GPU_BLOCKS)

        def is_inside(shape: tuple[int, ...], axis: int) -> jax.Array:
            return first_block + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < blocks

        def of_columns(ref: Any, entry: jax.Array, count: int) -> jax.Array:
            index = pl.ds(entry * count, count), of_blocks
            return triton.load(ref.at[index], mask=is_inside((count, _GPU_BLOCKS), 1), other=0.0)

        def upper_of(entry: jax.Array) -> jax.Array:
            def add(step: jax.Array, logits: jax.Array) -> jax.Array:
                numbers = pl.ds(step * _GPU_WIDTH, _GPU_WIDTH)
                within = step * _GPU_WIDTH + jax.lax.broadcasted_iota(jnp.int32, (_GPU_BLOCKS, _GPU_WIDTH), 1) < width
                part = triton.load(
                    weights_ref.at[pl.ds(entry * blocks + first_block, _GPU_BLOCKS), numbers],
                    mask=is_inside(within.shape, 0) & within,
                    other=0.0,
                )
                of_states = step * _GPU_WIDTH + jax.lax.broadcasted_iota(jnp.int32, (block_rows, _GPU_WIDTH), 1) < width
                for each in states:
                    some = triton.load(each.at[of_rows, numbers], mask=of_states, other=0.0)
                    logits += _product(some, part, 1)
                return logits

            logits = _product(own_ref[of_rows, :], of_columns(kept_ref, entry, columns), 0)
            logits = jax.lax.fori_loop(0, pl.cdiv(width, _GPU_WIDTH), add, logits)
            factors = [factors_ref[of_rows, pl.ds(norm, 1)] for norm in range(_NORMS)]
            norms = [of_columns(norms_ref, entry * _NORMS + norm, 1) for norm in range(_NORMS)]
            upper = _upper(logits, factors, norms)
            shape = (block_rows, _GPU_BLOCKS)
            triton.store(upper_ref.at[entry, of_rows, of_blocks], upper, mask=is_inside(shape, 1))
            return upper

        def merge(entry: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return _merged(found, upper_of(entry))

        found = jax.lax.fori_loop(1, BLOCK, merge, _of_first(upper_of(jnp.int32(0))))
        for ref, values in zip(kept_refs, found, strict=True):
            triton.store(ref.at[of_rows, of_blocks], values, mask=is_inside((block_rows, _GPU_BLOCKS), 1))

    whole = pl.BlockSpec(memory_space=pl.ANY)
    return _in_order(
        pl.pallas_call(
            kernel,
            grid=(rows // block_rows, pl.cdiv(blocks, _GPU_BLOCKS)),
            in_specs=[whole] * (parts + 5),
            out_specs=[whole] * 4,
            out_shape=_shapes(rows, blocks),
            compiler_params=triton.CompilerParams(num_warps=8),
            interpret=interpret,
        )(*by_row, *by_entry)
    )


def _missing(numbers: int) -> int:
    """Returns how many more are multiplied."""
    return -numbers % _LEAST if numbers else _LEAST


def _product(rows: jax.Array, weights: jax.Array, axis: int) -> jax.Array:
    """Returns the products of rows with weights, whose axis of what is multiplied is given."""
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return product(rows, weights, (((1,), (axis,)), ((), ())), precision=precision)


def _upper(logits: jax.Array, factors: Sequence[jax.Array], norms: Sequence[jax.Array]) -> jax.Array:
    """Returns upper ends of logits, (rows, blocks), by factors of rows, (rows, 1), and norms of entries, (1, ...)."""
    terms = [of_row * of_entry for of_row, of_entry in zip(factors, norms, strict=True)]
    upper = logits + (terms[0] + terms[1] + terms[2]) * jnp.float32(1 + 16 * UNIT)
    return jnp.where(upper != upper, jnp.float32(jnp.inf), upper)


def _of_first(upper: jax.Array) -> tuple[jax.Array, ...]:
    """Returns what blocks come to, of which one entry has been seen."""
    return upper, exp_below(upper, upper), jnp.zeros_like(upper)


def _merged(found: Sequence[jax.Array], upper: jax.Array) -> tuple[jax.Array, ...]:
    """Returns what blocks come to with one more entry."""
    largest, total, weighted = found
    new = jnp.maximum(largest, upper)
    mine, others = exp_below(largest, new), exp_below(upper, new)
    zero = jnp.zeros_like(total)
    # What weighs nothing may be infinitely far below, and 0 times that is NaN.
    from_before = jnp.where(mine > 0, mine * (weighted + (new - largest) * total), zero)
    return new, mine * total + others, from_before + jnp.where(others > 0, others * (new - upper), zero)


def _write(refs: Sequence[Any], found: Sequence[jax.Array]) -> None:
    for ref, values in zip(refs, found, strict=True):
        ref[...] = values


def _shapes(rows: int, blocks: int) -> list[jax.ShapeDtypeStruct]:
    of_block = jax.ShapeDtypeStruct((rows, blocks), jnp.float32)
    return [jax.ShapeDtypeStruct((BLOCK, rows, blocks), jnp.float32), *[of_block] * 3]


def _in_order(made: Sequence[jax.Array]) -> BlockBounds:
    upper, *of_blocks = made
    return BlockBounds(jnp.swapaxes(upper, 0, 1), *of_blocks)
