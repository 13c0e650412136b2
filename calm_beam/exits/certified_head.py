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
from typing import NamedTuple

import jax
import jax.numpy as jnp

from calm_beam.model.numerics import widened

from . import native_screening, screening
from .distribution_bounds import DistributionBounds
from .measures import Measure
from .parts import in_parts
from .quantised_head import UNIT, CertifiedHead
from .screening import Rest, Sums

# Most rows at a time, whose logits stay near the processor.
_ROWS = 128
# Of a dozen operations.
_CONFIDENCE_ROUNDING = 16 * UNIT


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


def certify(states: jax.Array, head: CertifiedHead, *, measure: Measure, is_thorough: bool = False) -> Certificate:
    """Returns what the quantised head proves of every state.

    Args:
      states: Of the type of the head's weights, shape (rows, width). What they multiply (`EarlyExitT5.head_inputs`).
      head: Of `quantised_head`.
      measure: Of logits with `Measure.bounds`; with another, the token alone is looked for.
      is_thorough: Whether more tokens are computed, for narrower intervals; only of a head for native code.
    """
    certify_part = functools.partial(_certify, head=head, measure=measure, is_thorough=is_thorough)
    return in_parts(certify_part, widened(states), most=_ROWS)


def candidates_of(head: CertifiedHead, *, rows: int, is_thorough: bool = False) -> int:
    """Returns how many tokens of each row are computed in float32; arguments as of `certify`, and how many rows."""
    vocab_size = head.weights.shape[0]
    if head.is_packed:
        return native_screening.candidates_of(vocab_size, is_thorough=is_thorough)
    return screening.candidates_of(min(rows, _ROWS), vocab_size)


def _certify(states: jax.Array, *, head: CertifiedHead, measure: Measure, is_thorough: bool) -> Certificate:
    vocab_size = head.weights.shape[0]
    if head.is_packed:
        known = native_screening.screened(states, head, is_thorough=is_thorough)
    else:
        known = screening.screened(states, head)
    token, largest, second, rounding, left = known.token, known.largest, known.second, known.rounding, known.left
    is_known = known.has_all & (second + 2 * rounding < largest) & (left + rounding < largest)
    if measure.bounds is None:
        nothing = jnp.zeros(len(states))
        return Certificate(token, nothing, nothing, is_known)
    bounds = _distribution_bounds(
        known.others,
        _moved(known.rest, largest - left),
        second_low=second - largest,
        second_high=jnp.maximum(second, left - rounding) - largest,
        rounding=rounding,
        candidates=known.candidates,
        terms=known.terms,
    )
    low, high = measure.bounds(bounds, vocab_size)
    # What a confidence is made of is bounded with its rounding; the confidence itself, of a few operations on numbers
    # between 0 and 1, is rounded here. NaN stays, and is no interval.
    low, high = jnp.maximum(low - _CONFIDENCE_ROUNDING, 0), jnp.minimum(high + _CONFIDENCE_ROUNDING, 1)
    return Certificate(token, low, high, is_known & (low <= high))


def _moved(rest: Rest, shift: jax.Array) -> Rest:
    """Returns the same sums of what each is below a number that is larger by `shift`, (rows,)."""
    weight = jnp.exp(-shift)
    # 0 times inf is NaN, and stands for 0.
    shift = jnp.where(weight > 0, shift, 0)
    return Rest(
        total_low=weight * rest.total_low,
        total_high=weight * rest.total_high,
        weighted_low=weight * (rest.weighted_low + shift * rest.total_low),
        weighted_high=weight * (rest.weighted_high + shift * rest.total_high),
    )


def _distribution_bounds(
    others: Sums,
    rest: Rest,
    *,
    second_low: jax.Array,
    second_high: jax.Array,
    rounding: jax.Array,
    candidates: int,
    terms: int,
) -> DistributionBounds:
    """Returns the bounds, given sums of what logits are below the largest, whose own terms are 1 and 0.

    Args:
      others: Over the other candidates.
      rest: Over all that are no candidates.
      second_low: shape (rows,). Of the second largest, at least.
      second_high: shape (rows,). And at most.
      rounding: shape (rows,). A difference of two logits may be off by twice as much.
      candidates: How many there are.
      terms: How many numbers the longest sum over the rest has added.
    """
    # Sums may be off by as many units as they have numbers.
    error, rest_error = 2 * (candidates + 16) * UNIT, 2 * (terms + 16) * UNIT
    shift = 2 * rounding
    slack = jnp.exp(shift) * (1 + error)
    # The derivative of x exp(x) is (1 + x) exp(x).
    moved = shift * slack * (others.total + others.weighted)
    rest_weighted_low = jnp.maximum(rest.weighted_low - shift * rest.total_low, 0)
    rest_weighted_high = rest.weighted_high + shift * rest.total_high
    return DistributionBounds(
        gap_low=second_low - shift,
        gap_high=jnp.minimum(second_high + shift, 0),
        total_low=jnp.maximum((1 + (others.total + rest.total_low * (1 - rest_error)) / slack) * (1 - 4 * UNIT), 1),
        total_high=(1 + (others.total + rest.total_high * (1 + rest_error)) * slack) * (1 + 4 * UNIT),
        weighted_low=(jnp.maximum(others.weighted - moved, 0) + rest_weighted_low * (1 - rest_error)) / slack,
        weighted_high=(others.weighted + moved + rest_weighted_high * (1 + rest_error)) * slack,
    )
