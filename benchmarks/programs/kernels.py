"""The kernels by themselves, at sizes of real heads."""

import functools
from collections.abc import Iterator
from typing import Any

import jax

from calm_beam.arithmetic import Arithmetic
from calm_beam.exits import decision_kernel, screening_kernel
from calm_beam.exits.quantised_head import BLOCK, CertifiedHead
from calm_beam.exits.quantised_states import quantised_states
from calm_beam.model.numerics import precision_of

from .placement import Placement
from .program import Program

# Columns of a head that are kept in float32 where some stand out.
KEPT_COLUMNS = 16


def decision(
    placement: Placement, arithmetic: Arithmetic, *, platform: str, vocabulary: int, width: int, rows: int, axis: int
) -> Program:
    """Returns the decision kernel for a head whose vocabulary lies on an axis of its weights."""
    run = functools.partial(
        decision_kernel.summarise, vocab_axis=axis, precision=precision_of(arithmetic), platform=platform
    )
    shape = (width, vocabulary) if axis else (vocabulary, width)
    return Program(
        name=f"decision kernel, {vocabulary:,} x {width:,}, {rows} rows, vocabulary on axis {axis}",
        placement=placement,
        function=jax.jit(run),
        arguments=(
            placement.array(rows, width, dtype=arithmetic.dtype),
            placement.array(*shape, dtype=arithmetic.dtype),
        ),
        kernels=1,
        logits=(rows, vocabulary),
    )


def screening(
    placement: Placement, *, platform: str, vocabulary: int, width: int, rows: int, parts: int, columns: int
) -> Program:
    """Returns the kernel of certified heads of bfloat16, for states of one or two parts."""

    def bounds(states: jax.Array, head: CertifiedHead) -> Any:
        return screening_kernel.block_bounds(quantised_states(states, head, parts=parts), head, platform=platform)

    head = certified_head(placement, Arithmetic(), form="bfloat16", vocabulary=vocabulary, width=width, columns=columns)
    return Program(
        name=f"screening kernel, {vocabulary:,} x {width:,}, {rows} rows, {parts} parts, {columns} columns kept",
        placement=placement,
        function=jax.jit(bounds),
        arguments=(placement.array(rows, width, dtype="float32"), head),
        kernels=1,
    )


def certified_head(
    placement: Placement,
    arithmetic: Arithmetic,
    *,
    form: str,
    vocabulary: int,
    width: int,
    columns: int = KEPT_COLUMNS,
) -> CertifiedHead:
    """Returns a certified head without numbers, of a form of `EXIT_HEADS`."""
    padded = -(-vocabulary // BLOCK) * BLOCK
    numbers = {name: placement.array(padded, dtype="float32") for name in ("scales", "errors", "norms", "kept_norms")}
    return CertifiedHead(
        weights=placement.array(vocabulary, width, dtype=arithmetic.dtype),
        quantised=placement.array(padded, width, dtype=form),
        kept=placement.array(columns),
        kept_weights=placement.array(columns, padded, dtype="float32"),
        **numbers,
    )


def kernels(placement: Placement, arithmetic: Arithmetic, *, platform: str) -> Iterator[Program]:
    """Yields both kernels for heads like T5-large's, and for larger ones.

    Args:
      placement: One device.
      arithmetic: Of the model; the screening kernel is the same for both.
      platform: `tpu` or `gpu`.
    """
    for vocabulary, width, rows, axis in (
        (32_128, 1024, 16, 0),
        (32_128, 1024, 256, 1),
        (32_128, 512, 8, 1),
        (128_256, 2048, 64, 0),
        (128_256, 4096, 256, 0),
    ):
        yield decision(
            placement, arithmetic, platform=platform, vocabulary=vocabulary, width=width, rows=rows, axis=axis
        )
    if arithmetic.dtype == "float32":
        for vocabulary, width, rows, parts, columns in ((32_128, 1024, 8, 2, 16), (128_256, 2048, 256, 1, 0)):
            yield screening(
                placement,
                platform=platform,
                vocabulary=vocabulary,
                width=width,
                rows=rows,
                parts=parts,
                columns=columns,
            )
