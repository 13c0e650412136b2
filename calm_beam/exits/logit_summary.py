"""The numbers of a row's logits that a decision needs, and how those of parts of the vocabulary are merged."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Above every index.
_NO_TOKEN = 2**31 - 1


class Summary(NamedTuple):
    """What a decision needs of some logits of every row; merged, it is that of their union.

    A NaN counts as the largest of logits.

    Attributes:
      largest: float32. The largest logit, inf for NaN.
      token: int32. Its first index, -1 for NaN.
      second: float32. The second largest; the same number again if the largest occurs twice. Without meaning where
        there is a NaN.
      total: float32. Sum of exp(logit - largest).
      weighted: float32. Sum of exp(logit - largest) (logit - largest), of which the entropy is made.
    """

    largest: jax.Array
    token: jax.Array
    second: jax.Array
    total: jax.Array
    weighted: jax.Array


class DistributionBounds(NamedTuple):
    """Bounds of what a `Summary` says, where only the largest logits are known.

    Each is float32, of shape (rows,); x is a logit less the largest.

    Attributes:
      gap_low: Of the second largest x, at most 0.
      gap_high: Of the same.
      total_low: Of the sum of exp(x), at least 1.
      total_high: Of the same.
      weighted_low: Of the sum of -x exp(x), at least 0.
      weighted_high: Of the same.
    """

    gap_low: jax.Array
    gap_high: jax.Array
    total_low: jax.Array
    total_high: jax.Array
    weighted_low: jax.Array
    weighted_high: jax.Array


def nothing(shape: tuple[int, ...]) -> Summary:
    """Returns the summary of no logits."""
    lowest = jnp.full(shape, -jnp.inf, jnp.float32)
    zero = jnp.zeros(shape, jnp.float32)
    return Summary(lowest, jnp.full(shape, _NO_TOKEN, jnp.int32), lowest, zero, zero)


def merged(one: Summary, other: Summary) -> Summary:
    """Returns the summary of the logits of both, of arrays of one shape."""
    largest = jnp.maximum(one.largest, other.largest)
    tokens = [jnp.where(part.largest == largest, part.token, _NO_TOKEN) for part in (one, other)]
    second = jnp.maximum(jnp.minimum(one.largest, other.largest), jnp.maximum(one.second, other.second))
    totals = [part.total * exp_below(part.largest, largest) for part in (one, other)]
    weighted = [_weighted_below(part, largest) for part in (one, other)]
    return Summary(largest, jnp.minimum(*tokens), second, totals[0] + totals[1], weighted[0] + weighted[1])


def union(parts: Summary) -> Summary:
    """Returns the summary, each (rows, 1), of all that summaries, each (rows, parts), are of."""
    largest = jnp.max(parts.largest, axis=1, keepdims=True)
    # Not argmax: it reduces pairs. Of several that are equally large, the first.
    token = jnp.min(jnp.where(parts.largest == largest, parts.token, _NO_TOKEN), axis=1, keepdims=True)
    second = jnp.max(jnp.where(parts.token == token, parts.second, parts.largest), axis=1, keepdims=True)
    total = jnp.sum(parts.total * exp_below(parts.largest, largest), axis=1, keepdims=True)
    weighted = jnp.sum(_weighted_below(parts, largest), axis=1, keepdims=True)
    return Summary(largest, token, second, total, weighted)


def of_part(summary: Summary, first: jax.Array) -> Summary:
    """Returns the summary of all logits that a part has from entry `first` on, to be merged, given it settled."""
    is_nan, is_finite = jnp.isnan(summary.largest), jnp.isfinite(summary.largest)
    return Summary(
        jnp.where(is_nan, jnp.float32(jnp.inf), summary.largest),
        jnp.where(is_nan, -1, first + summary.token),
        summary.second,
        jnp.where(is_finite, summary.total, jnp.float32(0)),
        jnp.where(is_finite, summary.weighted, jnp.float32(0)),
    )


def _weighted_below(part: Summary, largest: jax.Array) -> jax.Array:
    """Returns what the weighted sum of a part is in terms of a larger `largest`."""
    scale = exp_below(part.largest, largest)
    # 0 times -inf is NaN, and stands for 0.
    shift = jnp.where(scale > 0, part.largest - largest, jnp.float32(0))
    return scale * (part.weighted + shift * part.total)


def exp_below(values: jax.Array, largest: jax.Array) -> jax.Array:
    """Returns exp(values - largest), 0 where both are -inf."""
    return jnp.exp(values - jnp.where(largest == -jnp.inf, jnp.float32(0), largest))


def settled(summary: Summary) -> Summary:
    """Returns a summary of all logits as numbers to use: where one is NaN, `largest` is NaN and `token` 0.

    Where the largest is not finite, `total` and `weighted` are NaN.
    """
    is_nan = summary.token < 0
    is_finite = jnp.isfinite(summary.largest)
    return Summary(
        jnp.where(is_nan, jnp.float32(jnp.nan), summary.largest),
        jnp.where(is_nan, 0, summary.token),
        summary.second,
        jnp.where(is_finite, summary.total, jnp.float32(jnp.nan)),
        jnp.where(is_finite, summary.weighted, jnp.float32(jnp.nan)),
    )
