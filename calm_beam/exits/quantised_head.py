"""The output head in 8 bits, and how far off they are."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Half the distance from 1 to the next float32.
UNIT = 2.0**-24
# Entries of the vocabulary that native code takes at a time.
BLOCK = 64
# Columns whose largest weight is so many times that of the median column are kept in float32, but no more than so many.
_OUTLIER, _MOST_KEPT = 8.0, 16
# The smallest normal float32.
_SMALLEST = np.finfo(np.float32).tiny
# Weights that are quantised at a time, while they are float64.
_AT_A_TIME = 1 << 22


class CertifiedHead(NamedTuple):
    """A head and its quantised form; the vocabulary is padded to whole blocks with tokens that are none.

    Attributes:
      weights: float32 or bfloat16, shape (vocabulary, width).
      quantised: uint8, shape (padded vocabulary / 16, width / 4, 16, 4), the width rounded up: the order in which
        native code reads. Integers in [-127, 127], plus 128, since the processor multiplies numbers without a sign by
        such with one; 128, which stands for 0, in the columns that are kept.
      scales: float32, shape (padded vocabulary,). What an integer is a multiple of.
      errors: float32, shape (padded vocabulary,). ||W_v - Q_v|| without the kept columns, rounded up; -inf for padding.
      norms: float32, shape (padded vocabulary,). ||Q_v||, rounded up.
      kept: int32, shape (columns,). Columns that stand out, which would make all others coarse.
      kept_weights: float32, shape (columns, padded vocabulary).
      kept_norms: float32, shape (padded vocabulary,). Of their rows, rounded up.
    """

    weights: jax.Array
    quantised: jax.Array
    scales: jax.Array
    errors: jax.Array
    norms: jax.Array
    kept: jax.Array
    kept_weights: jax.Array
    kept_norms: jax.Array


def heads_of_form(form: str, weights: Sequence[tuple[jax.Array, int]]) -> list[CertifiedHead | None]:
    """Returns the heads that certify decisions, one for each kernel of a model; None where exact heads decide.

    Args:
      form: As `head_forms.head_form` returns it.
      weights: Of each head, shape (width, vocabulary) or its transpose, with the axis of the vocabulary.
    """
    if form == "exact":
        return [None] * len(weights)
    return [quantised_head(jnp.moveaxis(each, axis, 0)) for each, axis in weights]


def quantised_head(exact: jax.Array) -> CertifiedHead:
    """Returns a head, float32 or bfloat16 of shape (vocabulary, width), with its quantised form."""
    weights = np.asarray(exact)
    if not (is_finite := bool(np.isfinite(weights).all())):
        weights = np.zeros_like(weights)
    vocab_size, width = weights.shape
    padded_size = -(-vocab_size // BLOCK) * BLOCK
    reach = np.abs(weights).max(axis=0).astype(np.float32)
    # Of those that are used: some models leave columns empty.
    usual = np.median(reach[reach > 0]) if reach.any() else 0
    stand_out = min(_MOST_KEPT, int((reach > _OUTLIER * usual).sum()))
    kept = np.argsort(-reach, kind="stable")[:stand_out].astype(np.int32)
    quantised = np.zeros((padded_size, width), np.int8)
    scales = np.ones(padded_size, np.float32)
    errors = np.full(padded_size, -np.inf, np.float32)
    norms = np.zeros(padded_size, np.float32)
    kept_weights = np.zeros((len(kept), padded_size), np.float32)
    kept_weights[:, :vocab_size] = weights[:, kept].T
    for first in range(0, vocab_size, at_a_time := max(1, _AT_A_TIME // width)):
        rows = slice(first, min(first + at_a_time, vocab_size))
        part = weights[rows].astype(np.float64)
        part[:, kept] = 0
        scales[rows] = np.abs(part).max(axis=1) / 127
        # Processors may take smaller numbers for 0.
        scales[rows][scales[rows] < _SMALLEST] = 0
        multiples = np.divide(part, scales[rows, None], out=np.zeros_like(part), where=scales[rows, None] > 0)
        quantised[rows] = np.rint(multiples).clip(-127, 127)
        coarse = quantised[rows].astype(np.float64) * scales[rows, None]
        errors[rows] = _rounded_up(np.linalg.norm(part - coarse, axis=1))
        norms[rows] = _rounded_up(np.linalg.norm(coarse, axis=1))
    if not is_finite:
        # Then nothing is certain.
        errors[:] = np.inf
    return CertifiedHead(
        weights=exact,
        quantised=jnp.asarray(_packed(quantised)),
        scales=jnp.asarray(scales),
        errors=jnp.asarray(errors),
        norms=jnp.asarray(norms),
        kept=jnp.asarray(kept),
        kept_weights=jnp.asarray(kept_weights),
        kept_norms=jnp.asarray(_rounded_up(np.linalg.norm(kept_weights.astype(np.float64), axis=0))),
    )


def _packed(quantised: np.ndarray) -> np.ndarray:
    """Returns integers, int8 of shape (padded vocabulary, width), as `CertifiedHead.quantised` has them."""
    width = quantised.shape[1]
    shifted = (np.pad(quantised, ((0, 0), (0, -width % 4))).view(np.uint8)) ^ np.uint8(128)
    return np.ascontiguousarray(shifted.reshape(len(quantised) // 16, 16, -1, 4).transpose(0, 2, 1, 3))


def _rounded_up(values: np.ndarray) -> np.ndarray:
    """Returns normal float32 numbers that are no smaller than float64 ones which rounding may have made too small."""
    return np.maximum(np.nextafter((values * (1 + 1e-9)).astype(np.float32), np.float32(np.inf)), _SMALLEST)
