"""The output head in few bits, with a proof of what it decides.

A confidence of the output distribution costs a projection onto the whole vocabulary at every layer, more than the
layer. Most of that is spent on tokens that nobody would choose. Here the projection is made with a head of 8 or 16
bits, and for every logit a bound says how far off it can be:

    |W_v h - Q_v q| <= ||W_v - Q_v|| ||h|| + ||Q_v|| ||h - q||        (Cauchy-Schwarz, twice)

where Q_v are the quantised weights of token v and q is the quantised state; rounding is added. The tokens whose bounds
reach highest, some dozens, are then computed with float32 sums. If none of the others can reach the largest of them,
the token is known. The others are bounded, and with them every sum over the vocabulary: so the confidence lies in an
interval. A threshold outside of that interval is decided, and nearly all are. What stays open is left to the caller,
who asks the exact head.

All of this is about the numbers that real arithmetic would give. The exact head rounds as well: the two may differ
where two tokens, or confidence and threshold, are closer than float32 can tell. Of a model that computes in bfloat16,
states and weights are bfloat16 numbers, whose products are exact in float32: all of this holds as it stands.
"""

import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.arithmetic import FLOAT32
from calm_beam.model.numerics import einsum, matrix_product, widened

from .distribution_bounds import DistributionBounds
from .measures import Measure
from .parts import in_parts

# Entries of the vocabulary that are compared first by the largest bound among them. They are far apart in it, so that
# the reduction runs along memory.
_BLOCK = 16
# Entries that are computed in float32 for a row, looked for in half as many blocks.
_CANDIDATES = 64
# With few rows the product takes as long as reading the weights: twice the rows, for states of twice the bits, cost
# nothing, and so do more candidates.
_FEW_ROWS, _MORE_CANDIDATES = 8, 256
# Most rows at a time, whose logits stay near the processor.
_ROWS = 128
# If the largest weight of a column is so many times that of the median column, so many columns are kept in float32.
_OUTLIER, _KEPT = 8.0, 16
# Half the distance from 1 to the next float32.
_UNIT = 2.0**-24
# Of a dozen operations.
_CONFIDENCE_ROUNDING = 16 * _UNIT
# The smallest normal float32.
_SMALLEST = np.finfo(np.float32).tiny
# Weights that are quantised at a time, while they are float64.
_AT_A_TIME = 1 << 22

_Values = TypeVar("_Values")


class CertifiedHead(NamedTuple):
    """A head and its quantised form; the vocabulary is padded to whole blocks with tokens that are none.

    Attributes:
      weights: float32 or bfloat16, shape (vocabulary, width).
      quantised: int8 or bfloat16, shape (padded vocabulary, width). 0 in the columns that are kept.
      scales: float32, shape (padded vocabulary,). What int8 is a multiple of; 1 for bfloat16.
      errors: float32, shape (padded vocabulary,). ||W_v - Q_v|| without the kept columns, rounded up; -inf for padding.
      norms: float32, shape (padded vocabulary,). ||Q_v||, rounded up.
      kept: int32, shape (columns,). Columns that stand out, which would make all others coarse.
      kept_weights: float32, shape (padded vocabulary, columns).
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


class Certificate(NamedTuple):
    """What is known of every row, each of shape (rows,).

    Attributes:
      token: int32. The first of the largest logits.
      low: float32. The confidence is at least this, with a measure of logits; else 0.
      high: float32. And at most this.
      is_certain: bool. Whether the three hold. Where not, they mean nothing.
    """

    token: jax.Array
    low: jax.Array
    high: jax.Array
    is_certain: jax.Array


def quantised_head(exact: jax.Array, dtype: str) -> CertifiedHead:
    """Returns a head with its quantised form.

    Args:
      exact: float32 or bfloat16, shape (vocabulary, width).
      dtype: "int8" or "bfloat16".
    """
    weights = np.asarray(exact)
    if not (is_finite := bool(np.isfinite(weights).all())):
        weights = np.zeros_like(weights)
    vocab_size, width = weights.shape
    padded_size = -(-vocab_size // _BLOCK) * _BLOCK
    reach = np.abs(weights).max(axis=0).astype(np.float32)
    stands_out = (reach > _OUTLIER * np.median(reach)).any()
    kept = np.argsort(-reach, kind="stable")[: _KEPT if stands_out else 0].astype(np.int32)
    quantised = np.zeros((padded_size, width), np.int8 if dtype == "int8" else jnp.bfloat16)
    scales = np.ones(padded_size, np.float32)
    errors = np.full(padded_size, -np.inf, np.float32)
    norms = np.zeros(padded_size, np.float32)
    kept_weights = np.zeros((padded_size, len(kept)), np.float32)
    kept_weights[:vocab_size] = weights[:, kept]
    for first in range(0, vocab_size, at_a_time := max(1, _AT_A_TIME // width)):
        rows = slice(first, min(first + at_a_time, vocab_size))
        part = weights[rows].astype(np.float64)
        part[:, kept] = 0
        if dtype == "int8":
            scales[rows] = np.abs(part).max(axis=1) / 127
            # Processors may take smaller numbers for 0.
            scales[rows][scales[rows] < _SMALLEST] = 0
            multiples = np.divide(part, scales[rows, None], out=np.zeros_like(part), where=scales[rows, None] > 0)
            quantised[rows] = np.rint(multiples).clip(-127, 127)
        else:
            quantised[rows] = np.where(np.abs(part) < _SMALLEST, 0, part)
        coarse = quantised[rows].astype(np.float64) * scales[rows, None]
        errors[rows] = _rounded_up(np.linalg.norm(part - coarse, axis=1))
        norms[rows] = _rounded_up(np.linalg.norm(coarse, axis=1))
    if not is_finite:
        # Then nothing is certain.
        errors[:] = np.inf
    return CertifiedHead(
        weights=exact,
        quantised=jnp.asarray(quantised),
        scales=jnp.asarray(scales),
        errors=jnp.asarray(errors),
        norms=jnp.asarray(norms),
        kept=jnp.asarray(kept),
        kept_weights=jnp.asarray(kept_weights),
        kept_norms=jnp.asarray(_rounded_up(np.linalg.norm(kept_weights.astype(np.float64), axis=1))),
    )


def _rounded_up(values: np.ndarray) -> np.ndarray:
    """Returns normal float32 numbers that are no smaller than float64 ones which rounding may have made too small."""
    return np.maximum(np.nextafter((values * (1 + 1e-9)).astype(np.float32), np.float32(np.inf)), _SMALLEST)


def certify(states: jax.Array, head: CertifiedHead, *, measure: Measure) -> Certificate:
    """Returns what the quantised head proves of every state.

    Args:
      states: Of the type of the head's weights, shape (rows, width). What they multiply (`EarlyExitT5.head_inputs`).
      head: Of `quantised_head`.
      measure: Of logits with `Measure.bounds`; with another, the token alone is looked for.
    """
    return in_parts(functools.partial(_certify, head=head, measure=measure), widened(states), most=_ROWS)


def _certify(states: jax.Array, *, head: CertifiedHead, measure: Measure) -> Certificate:
    rows, vocab_size = states.shape[0], head.weights.shape[0]
    count = min(_MORE_CANDIDATES if rows <= _FEW_ROWS else _CANDIDATES, vocab_size // 2)
    upper, reach = _logit_bounds(states, head)
    block_upper = _stored(jnp.max(upper, axis=1))
    highest, chosen = _stored(jax.lax.top_k(block_upper, min(count // 2, block_upper.shape[1] - 1)))
    is_block_left = block_upper < highest[:, -1:]
    # The entries of the chosen blocks, by their place in the vocabulary: [rows, entries of a block * chosen]
    firsts = np.arange(_BLOCK, dtype=np.int32)[None, :, None] * block_upper.shape[1]
    entries = (firsts + chosen[:, None]).reshape(rows, -1)
    entry_upper = _stored(jnp.take_along_axis(upper.reshape(rows, -1), entries, axis=1))
    highest_entries, places = _stored(jax.lax.top_k(entry_upper, count))
    is_entry_left = entry_upper < highest_entries[:, -1:]
    candidates = jnp.take_along_axis(entries, places, axis=1)
    # If several reach as high as the lowest that was chosen, some of them are neither chosen nor left.
    has_all = (jnp.sum(~is_block_left, axis=1) == chosen.shape[1]) & (jnp.sum(~is_entry_left, axis=1) == count)

    logits, rounding = _exact_logits(states, head, candidates=candidates)
    largest = jnp.max(logits, axis=1)
    token = jnp.min(jnp.where(logits == largest[:, None], candidates, vocab_size - 1), axis=1)
    second = jnp.max(jnp.where(candidates == token[:, None], -jnp.inf, logits), axis=1)
    left = jnp.maximum(
        jnp.max(jnp.where(is_block_left, block_upper, -jnp.inf), axis=1),
        jnp.max(jnp.where(is_entry_left, entry_upper, -jnp.inf), axis=1),
    )
    is_finite = jnp.all(jnp.isfinite(logits), axis=1)
    is_known = has_all & is_finite & (second + 2 * rounding < largest) & (left + rounding < largest)
    if measure.bounds is None:
        nothing = jnp.zeros(rows)
        return Certificate(token, nothing, nothing, is_known)
    of_blocks, of_one = _sums(upper - block_upper[:, None]), _Sums(jnp.ones(()), jnp.zeros(()))
    rests = (
        _rest_of(block_upper, reach, sums=of_blocks, is_left=is_block_left, largest=largest),
        _rest_of(
            entry_upper, jnp.max(reach, axis=1, keepdims=True), sums=of_one, is_left=is_entry_left, largest=largest
        ),
    )
    terms = block_upper.shape[1] + _BLOCK + entry_upper.shape[1]
    bounds = _distribution_bounds(
        jnp.where(candidates == token[:, None], -jnp.inf, logits - largest[:, None]),
        _Rest(*map(jnp.add, *rests)),
        second_low=second - largest,
        second_high=jnp.maximum(second, left - rounding) - largest,
        rounding=rounding,
        terms=terms,
    )
    low, high = measure.bounds(bounds, vocab_size)
    # What a confidence is made of is bounded with its rounding; the confidence itself, of a few operations on numbers
    # between 0 and 1, is rounded here. NaN stays, and is no interval.
    low, high = jnp.maximum(low - _CONFIDENCE_ROUNDING, 0), jnp.minimum(high + _CONFIDENCE_ROUNDING, 1)
    return Certificate(token, low, high, is_known & (low <= high))


def _stored(values: _Values) -> _Values:
    """Returns the same values, which XLA is kept from computing again wherever they are read."""
    stored: _Values = jax.lax.optimization_barrier(values)
    return stored


def _logit_bounds(states: jax.Array, head: CertifiedHead) -> tuple[jax.Array, jax.Array]:
    """Returns the upper end of every logit's interval, and the most of half the widths of each block's intervals.

    Returns:
      Shapes (rows, entries of a block, blocks), and (rows, blocks).
    """
    width = states.shape[1]
    kept_states = states[:, head.kept]
    states = states.at[:, head.kept].set(0)
    most = jnp.max(jnp.abs(states), axis=1, keepdims=True)
    parts, missing = _quantised_states(states, most, head)
    is_integer = head.quantised.dtype == jnp.int8
    product = jax.lax.dot_general(
        jnp.concatenate([values for values, _ in parts]),
        head.quantised,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32 if is_integer else jnp.float32,
    )
    logits = sum(
        values.astype(jnp.float32) * (step * head.scales[None])
        for values, (_, step) in zip(jnp.split(product, len(parts)), parts, strict=True)
    )
    if head.kept.size:
        logits += matrix_product(kept_states, head.kept_weights.T, FLOAT32)
    norm = _norm(states, most)
    missing_norm = _norm(missing, most) + 8 * _UNIT * width**0.5 * most
    # Integers add without an error; sums of bfloat16 products do not.
    missing_norm += (8 + (0 if is_integer else width)) * _UNIT * (norm + missing_norm)
    kept_norm = jnp.linalg.norm(kept_states, axis=1, keepdims=True) * ((2 * head.kept.size + 8) * _UNIT)

    def reach(errors: jax.Array, norms: jax.Array, kept_norms: jax.Array) -> jax.Array:
        terms = errors[None] * norm + norms[None] * missing_norm + kept_norms[None] * kept_norm
        half_width: jax.Array = terms * (1 + 16 * _UNIT)
        return half_width

    of_entries = head.errors, head.norms, head.kept_norms
    upper = logits + reach(*of_entries)
    # A maximum passes over a NaN among numbers on CPU (jaxlib 0.10.2), and what overflows could be anything.
    upper = _stored(jnp.where(jnp.isnan(upper), jnp.inf, upper))
    of_blocks = (jnp.max(values.reshape(_BLOCK, -1), axis=0) for values in of_entries)
    return upper.reshape(len(states), _BLOCK, -1), reach(*of_blocks)


def _quantised_states(
    states: jax.Array, most: jax.Array, head: CertifiedHead
) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array]:
    """Returns states as one or two arrays of few bits, each with the step that it counts, and what they leave out."""
    parts = []
    step = most / 127
    for _ in range(2 if len(states) <= _FEW_ROWS else 1):
        if head.quantised.dtype == jnp.int8:
            multiples = jnp.clip(jnp.round(states / jnp.where(step > 0, step, 1)), -127, 127)
            parts.append((multiples.astype(jnp.int8), step))
            states = states - multiples * step
            # What is left is at most half a step.
            step = step / 254
        else:
            parts.append((states.astype(jnp.bfloat16), jnp.ones_like(step)))
            states = states - parts[-1][0].astype(jnp.float32)
    return parts, states


def _exact_logits(states: jax.Array, head: CertifiedHead, *, candidates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the logits of the candidates, (rows, candidates), in float32, and the most that rounding did, (rows,)."""
    rows, width = states.shape
    # Sums of shorter sums: the error grows with the longest of them, in whatever order their numbers are added.
    chunk = next(size for size in (64, 32, 16, 8, 4, 2, 1) if width % size == 0)
    weights = widened(head.weights[candidates]).reshape(rows, candidates.shape[1], -1, chunk)
    products = einsum("rnkc,rnc->rnk", jnp.swapaxes(weights, 1, 2), states.reshape(rows, -1, chunk), FLOAT32)
    logits = _stored(jnp.sum(products, axis=1))
    norms = jnp.max((head.errors + head.norms + head.kept_norms)[candidates], axis=1)
    additions = chunk + width // chunk + 4
    norm = _norm(states, jnp.max(jnp.abs(states), axis=1, keepdims=True))[:, 0]
    return logits, additions * _UNIT * norms * norm


def _norm(states: jax.Array, most: jax.Array) -> jax.Array:
    """Returns the norm of every row, (rows, 1), rounded up; NaN for zeros.

    Args:
      states: shape (rows, width).
      most: shape (rows, 1). A number of their size, without which small squares would vanish.
    """
    norm: jax.Array = jnp.linalg.norm(states / most, axis=1, keepdims=True) * most * (1 + states.shape[1] * _UNIT)
    return norm


class _Sums(NamedTuple):
    """Sums over some logits, of what each is below the largest of them: of exp(x), and of -x exp(x)."""

    total: jax.Array
    weighted: jax.Array


class _Rest(NamedTuple):
    """Bounds of the sums over all that are no candidates, as in `DistributionBounds`."""

    total_low: jax.Array
    total_high: jax.Array
    weighted_low: jax.Array
    weighted_high: jax.Array


def _sums(below: jax.Array) -> _Sums:
    """Returns the sums along axis 1."""
    weights = jnp.exp(below)
    # 0 times -inf is NaN, and stands for 0: what is no logit.
    weighted = jnp.where(weights > 0, -below * weights, 0)
    return _Sums(_stored(jnp.sum(weights, axis=1)), _stored(jnp.sum(weighted, axis=1)))


def _rest_of(upper: jax.Array, reach: jax.Array, *, sums: _Sums, is_left: jax.Array, largest: jax.Array) -> _Rest:
    """Returns the bounds of what is left, (rows,), of blocks or entries, (rows, number).

    Args:
      upper: Largest upper end in each.
      reach: Largest half-width in each, or in all of a row.
      sums: Of each, relative to `upper`.
      is_left: Whether it is no candidate.
      largest: shape (rows,). The largest logit.
    """
    weight = jnp.where(is_left, jnp.exp(upper - largest[:, None]), 0)
    shift = jnp.where(weight > 0, largest[:, None] - upper, 0)
    lower_weight = weight * jnp.exp(-2 * reach)
    return _Rest(
        total_low=jnp.sum(lower_weight * sums.total, axis=1),
        total_high=jnp.sum(weight * sums.total, axis=1),
        weighted_low=jnp.sum(lower_weight * (sums.weighted + shift * sums.total), axis=1),
        weighted_high=jnp.sum(weight * (sums.weighted + (shift + 2 * reach) * sums.total), axis=1),
    )


def _distribution_bounds(
    below: jax.Array,
    rest: _Rest,
    *,
    second_low: jax.Array,
    second_high: jax.Array,
    rounding: jax.Array,
    terms: int,
) -> DistributionBounds:
    """Returns the bounds, given what logits are below the largest.

    Args:
      below: shape (rows, candidates). Of the candidates; -inf for the largest, whose own terms are 1 and 0.
      rest: Of all that are no candidates.
      second_low: shape (rows,). Of the second largest, at least.
      second_high: shape (rows,). And at most.
      rounding: shape (rows,). A difference of two logits may be off by twice as much.
      terms: How many numbers the longest sum over the rest has added.
    """
    others, weighted = _sums(below)
    # Sums may be off by as many units as they have numbers.
    error, rest_error = 2 * (below.shape[1] + 16) * _UNIT, 2 * (terms + 16) * _UNIT
    shift = 2 * rounding
    slack = jnp.exp(shift) * (1 + error)
    # The derivative of x exp(x) is (1 + x) exp(x).
    moved = shift * slack * (others + weighted)
    rest_weighted_low = jnp.maximum(rest.weighted_low - shift * rest.total_low, 0)
    rest_weighted_high = rest.weighted_high + shift * rest.total_high
    return DistributionBounds(
        gap_low=second_low - shift,
        gap_high=jnp.minimum(second_high + shift, 0),
        total_low=jnp.maximum((1 + (others + rest.total_low * (1 - rest_error)) / slack) * (1 - 4 * _UNIT), 1),
        total_high=(1 + (others + rest.total_high * (1 + rest_error)) * slack) * (1 + 4 * _UNIT),
        weighted_low=(jnp.maximum(weighted - moved, 0) + rest_weighted_low * (1 - rest_error)) / slack,
        weighted_high=(weighted + moved + rest_weighted_high * (1 + rest_error)) * slack,
    )
