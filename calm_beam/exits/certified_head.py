"""The certified head: a quantised output head in 8 bits, and proofs of its decisions, by native code.

A confidence of the output distribution costs a projection onto the whole vocabulary at every layer, more than the
layer. Most of that is spent on tokens that no exit could choose. The certified head projects with weights of 8 bits,
and bounds the error of every logit:

`|W_v h - Q_v q| <= ||W_v - Q_v|| ||h|| + ||Q_v|| ||h - q||` (Cauchy-Schwarz, twice)

where Q_v are the quantised weights of token v and q is the quantised state; rounding is added. The logits of the
tokens with the highest upper bounds, the candidates, are then computed with float32 sums. If no other token can reach
the largest of them, the token is known. The other logits are bounded, and with them every sum over the vocabulary, so
that the confidence lies in an interval. A threshold outside that interval is decided, and nearly all are. The caller
asks the exact head about rows that stay open.

The bounds hold for real arithmetic. The exact head rounds as well: the two may differ where two tokens, or confidence
and threshold, are closer than float32 resolves. For a model that computes in bfloat16, states and weights are bfloat16
numbers, whose products are exact in float32: the bounds hold unchanged.

One call of `native/screen.c` computes the bounds of all logits; it quantises states in the form that suits the
processor. Columns that a head keeps are multiplied in float32. The norms of a state and of its quantisation error are
rounded up.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.model.native import library
from calm_beam.model.numerics import widened

from .decision import DistributionBounds, in_parts
from .measures import Measure

# Half the distance from 1 to the next float32.
UNIT = 2.0**-24
# Entries of the vocabulary that native code processes at a time.
BLOCK = 64
# Columns whose largest weight is this many times that of the median column are kept in float32, but at most this many.
_OUTLIER, _MOST_KEPT = 8.0, 16
# The smallest normal float32.
_SMALLEST = np.finfo(np.float32).tiny
# Weights that are quantised at a time, while they are float64.
_AT_A_TIME = 1 << 22


class CertifiedHead(NamedTuple):
    """A head and its quantised form; the vocabulary is padded to whole blocks.

    Attributes:
      weights: float32 or bfloat16, shape (vocabulary, width).
      quantised: uint8, shape (padded vocabulary / 16, width / 4, 16, 4), the width rounded up: the order in which
        native code reads. Integers in [-127, 127], plus 128, since the processor multiplies unsigned numbers by signed
        ones; 128, which encodes 0, in the columns that are kept.
      scales: float32, shape (padded vocabulary,). The value of one unit of an entry's integers.
      errors: float32, shape (padded vocabulary,). ||W_v - Q_v|| without the kept columns, rounded up; -inf for padding.
      norms: float32, shape (padded vocabulary,). ||Q_v||, rounded up.
      kept: int32, shape (columns,). Outlier columns, whose scale would make all others coarse.
      kept_weights: float32, shape (columns, padded vocabulary).
      kept_norms: float32, shape (padded vocabulary,). Norms of each entry's kept weights, rounded up.
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
    """Returns the certified heads, one for each kernel of a model; None where exact heads decide.

    Args:
      form: The form that `head_forms.head_form` returns.
      weights: Weights of each head, shape (width, vocabulary) or its transpose, with the axis of the vocabulary.
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
    # The median is over columns in use: some models leave columns empty.
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
        # Processors may flush smaller numbers to 0.
        scales[rows][scales[rows] < _SMALLEST] = 0
        multiples = np.divide(part, scales[rows, None], out=np.zeros_like(part), where=scales[rows, None] > 0)
        quantised[rows] = np.rint(multiples).clip(-127, 127)
        coarse = quantised[rows].astype(np.float64) * scales[rows, None]
        errors[rows] = _rounded_up(np.linalg.norm(part - coarse, axis=1))
        norms[rows] = _rounded_up(np.linalg.norm(coarse, axis=1))
    if not is_finite:
        # With infinite errors, nothing is certain.
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
    """Returns integers, int8 of shape (padded vocabulary, width), in the layout of `CertifiedHead.quantised`."""
    width = quantised.shape[1]
    shifted = (np.pad(quantised, ((0, 0), (0, -width % 4))).view(np.uint8)) ^ np.uint8(128)
    return np.ascontiguousarray(shifted.reshape(len(quantised) // 16, 16, -1, 4).transpose(0, 2, 1, 3))


def _rounded_up(values: np.ndarray) -> np.ndarray:
    """Returns normal float32 numbers that are not below the exact values of float64 numbers with rounding errors."""
    return np.maximum(np.nextafter((values * (1 + 1e-9)).astype(np.float32), np.float32(np.inf)), _SMALLEST)


FEW_ROWS = 8
"""Up to this many rows, a call quantises states in two parts, and leaves less open: `kFewRows`."""

# Most rows at a time, so that their logits stay in the cache.
_ROWS = 128
# Candidates of a row, computed in float32: as many blocks are searched for them.
_CANDIDATES, _MORE_CANDIDATES = 64, 512
# Numbers in a vector of sums, and additions to reduce it.
_LANES, _REDUCTION = 16, 8
# Numbers that native code returns for each row.
_FACTS = 11
# Above these bounds, loss by factors or products below the smallest normal float32, 2**-126, is less than rounding.
_LEAST_NORM, _LEAST_ROUNDING = 2.0**-90, 2.0**-80
# Rounding of a dozen operations.
_CONFIDENCE_ROUNDING = 16 * UNIT


class Certificate(NamedTuple):
    """The certified decision of every row, each of shape (rows,).

    Attributes:
      token: int32. The first of the largest logits.
      low: float32. Lower bound of the confidence, with a measure of logits; else 0.
      high: float32. Upper bound of the confidence, with a measure of logits; else 0.
      is_certain: bool. Whether token and bounds are proved; if not, they are meaningless.
    """

    token: jax.Array
    low: jax.Array
    high: jax.Array
    is_certain: jax.Array


class Rest(NamedTuple):
    """Bounds of the sums over all tokens that are not candidates, as in `DistributionBounds`."""

    total_low: jax.Array
    total_high: jax.Array
    weighted_low: jax.Array
    weighted_high: jax.Array


class Screened(NamedTuple):
    """The bounds of every row's logits by native code, each of shape (rows,).

    Attributes:
      token: int32. The first of the largest candidates.
      largest: float32. Its logit. NaN if a candidate's logit is NaN.
      second: float32. The largest logit of the other candidates.
      others_total: float32. Sum over the other candidates of exp(x), where x is a logit less `largest`.
      others_weighted: float32. Sum over the other candidates of -x exp(x).
      left: float32. Upper bound of the logits of all tokens that are not candidates.
      rest: Bounds of the sums over these tokens, with `left` in place of `largest`.
      rounding: float32. Largest rounding error of a candidate's logit.
    """

    token: jax.Array
    largest: jax.Array
    second: jax.Array
    others_total: jax.Array
    others_weighted: jax.Array
    left: jax.Array
    rest: Rest
    rounding: jax.Array


def certify(states: jax.Array, head: CertifiedHead, *, measure: Measure, is_thorough: bool = False) -> Certificate:
    """Returns what the quantised head proves about every state; needs native code.

    Args:
      states: Inputs of the head (`EarlyExitT5.head_inputs`), shape (rows, width), of the type of its weights.
      head: A head that `quantised_head` returned.
      measure: A measure of logits with `Measure.bounds`; with any other, only the token is certified.
      is_thorough: Whether to compute eight times as many candidates, so that less is left to bounds.
    """
    certify_part = functools.partial(_certify, head=head, measure=measure, is_thorough=is_thorough)
    return in_parts(certify_part, widened(states), most=_ROWS)


def candidates_of(vocab_size: int, *, is_thorough: bool = False) -> int:
    """Returns how many candidates each row has, whose logits are computed in float32."""
    return min(_MORE_CANDIDATES if is_thorough else _CANDIDATES, vocab_size // 2)


def _certify(states: jax.Array, *, head: CertifiedHead, measure: Measure, is_thorough: bool) -> Certificate:
    vocab_size = len(head.weights)
    known = screened(states, head, is_thorough=is_thorough)
    token, largest, second, left, rounding = known.token, known.largest, known.second, known.left, known.rounding
    is_known = jnp.isfinite(largest) & (second + 2 * rounding < largest) & (left + rounding < largest)
    if measure.bounds is None:
        nothing = jnp.zeros(len(states))
        return Certificate(token, nothing, nothing, is_known)
    bounds = _distribution_bounds(
        known, blocks=len(head.scales) // BLOCK, candidates=candidates_of(vocab_size, is_thorough=is_thorough)
    )
    low, high = measure.bounds(bounds, vocab_size)
    # The bounds of the sums include their rounding. The confidence takes a few more operations on numbers between 0
    # and 1, whose rounding is added here. NaN stays, and fails the comparison below.
    low, high = jnp.maximum(low - _CONFIDENCE_ROUNDING, 0), jnp.minimum(high + _CONFIDENCE_ROUNDING, 1)
    return Certificate(token, low, high, is_known & (low <= high))


def screened(states: jax.Array, head: CertifiedHead, *, is_thorough: bool = False) -> Screened:
    """Returns the bounds of logits by native code, for float32 states of shape (rows, width); see `certify`."""
    (rows, width), vocab_size = states.shape, len(head.weights)
    screen = jax.ffi.ffi_call(
        library.screen_target(),
        (
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, _FACTS), jnp.float32),
            # Room for the candidates, whose number native code takes from this shape.
            jax.ShapeDtypeStruct((rows, candidates_of(vocab_size, is_thorough=is_thorough)), jnp.int32),
        ),
    )
    token, facts, _ = screen(
        states,
        head.kept,
        head.quantised,
        head.scales,
        head.errors,
        head.norms,
        head.kept_norms,
        head.kept_weights,
        head.weights,
    )
    # Tokens with equal upper bounds that are not chosen as candidates count in `left`.
    largest, second, others_total, others_weighted, left, *rest, norm, head_norm = facts.T
    return Screened(
        token=token,
        largest=largest,
        second=second,
        others_total=others_total,
        others_weighted=others_weighted,
        left=left,
        rest=Rest(*rest),
        rounding=_rounding_of(norm, head_norm, additions=-(-width // _LANES) + _REDUCTION),
    )


def _rounding_of(norm: jax.Array, head_norm: jax.Array, *, additions: int) -> jax.Array:
    """Returns the largest rounding error of logits, (rows,).

    It is inf where numbers are so small that flushing to 0 loses more than rounding.

    Args:
      norm: shape (rows,). Norms of the states.
      head_norm: shape (rows,). Largest norm of the weights that multiply each.
      additions: Additions of the longest sum.
    """
    rounding = additions * UNIT * head_norm * norm
    is_large = (head_norm >= _LEAST_NORM) & (norm >= _LEAST_NORM) & (rounding >= _LEAST_ROUNDING)
    return jnp.where(is_large & (norm <= 1 / _LEAST_NORM), rounding, jnp.inf)


def _distribution_bounds(known: Screened, *, blocks: int, candidates: int) -> DistributionBounds:
    """Returns the bounds of sums over logits less the largest, whose own terms are 1 and 0."""
    rest = _moved(known.rest, known.largest - known.left)
    second_high = jnp.maximum(known.second, known.left - known.rounding) - known.largest
    # The rounding error of a sum is at most a unit per number. Sums over the rest add blocks, of several vectors each.
    error, rest_error = 2 * (candidates + 16) * UNIT, 2 * (blocks + 2 * _LANES + 16) * UNIT
    # A difference of two logits.
    shift = 2 * known.rounding
    slack = jnp.exp(shift) * (1 + error)
    # The derivative of x exp(x) is (1 + x) exp(x).
    moved = shift * slack * (known.others_total + known.others_weighted)
    rest_weighted_low = jnp.maximum(rest.weighted_low - shift * rest.total_low, 0)
    rest_weighted_high = rest.weighted_high + shift * rest.total_high
    total_low = 1 + (known.others_total + rest.total_low * (1 - rest_error)) / slack
    total_high = 1 + (known.others_total + rest.total_high * (1 + rest_error)) * slack
    return DistributionBounds(
        gap_low=known.second - known.largest - shift,
        gap_high=jnp.minimum(second_high + shift, 0),
        total_low=jnp.maximum(total_low * (1 - 4 * UNIT), 1),
        total_high=total_high * (1 + 4 * UNIT),
        weighted_low=(jnp.maximum(known.others_weighted - moved, 0) + rest_weighted_low * (1 - rest_error)) / slack,
        weighted_high=(known.others_weighted + moved + rest_weighted_high * (1 + rest_error)) * slack,
    )


def _moved(rest: Rest, shift: jax.Array) -> Rest:
    """Returns the same sums relative to a logit that is larger by `shift`, (rows,)."""
    weight = jnp.exp(-shift)
    # 0 times inf is NaN, but must be 0.
    shift = jnp.where(weight > 0, shift, 0)
    return Rest(
        total_low=weight * rest.total_low,
        total_high=weight * rest.total_high,
        weighted_low=weight * (rest.weighted_low + shift * rest.total_low),
        weighted_high=weight * (rest.weighted_high + shift * rest.total_high),
    )
