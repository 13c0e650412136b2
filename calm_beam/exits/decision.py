"""Decisions by the output distribution: the best token, and its confidence.

A few numbers summarise a row's logits, and summaries of parts of the vocabulary are merged. Rows are processed in
parts where the logits of all of them at once would be too large.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from calm_beam.exits.measures import Measure, Need
from calm_beam.model.numerics import capped, precision_of, product
from calm_beam.model.partitioning import by_part, parts, whole
from calm_beam.precision import Precision

# Above every index.
_NO_TOKEN = 2**31 - 1


class Summary(NamedTuple):
    """The summary of some logits of every row that a decision needs; merging gives the summary of their union.

    A NaN counts as the largest logit.

    Attributes:
      largest: float32. The largest logit, inf for NaN.
      token: int32. Its first index, -1 for NaN.
      second: float32. The second largest; the same number again if the largest occurs twice. Meaningless if there is a
        NaN.
      total: float32. Sum of exp(logit - largest).
      weighted: float32. Sum of exp(logit - largest) (logit - largest), for the entropy.
    """

    largest: jax.Array
    token: jax.Array
    second: jax.Array
    total: jax.Array
    weighted: jax.Array


class DistributionBounds(NamedTuple):
    """Bounds of the numbers of a `Summary`, where only the largest logits are known.

    Each is float32, of shape (rows,); x is a logit less the largest.

    Attributes:
      gap_low: Lower bound of the second largest x, at most 0.
      gap_high: Upper bound of the second largest x.
      total_low: Lower bound of the sum of exp(x), at least 1.
      total_high: Upper bound of the sum of exp(x).
      weighted_low: Lower bound of the sum of -x exp(x), at least 0.
      weighted_high: Upper bound of the sum of -x exp(x).
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
    """Returns the summary of the logits of both; all arrays have the same shape."""
    largest = jnp.maximum(one.largest, other.largest)
    tokens = [jnp.where(part.largest == largest, part.token, _NO_TOKEN) for part in (one, other)]
    second = jnp.maximum(jnp.minimum(one.largest, other.largest), jnp.maximum(one.second, other.second))
    totals = [part.total * exp_below(part.largest, largest) for part in (one, other)]
    weighted = [_weighted_below(part, largest) for part in (one, other)]
    return Summary(largest, jnp.minimum(*tokens), second, totals[0] + totals[1], weighted[0] + weighted[1])


def union(parts: Summary) -> Summary:
    """Returns the merged summary, each (rows, 1), of summaries of parts, each (rows, parts)."""
    largest = jnp.max(parts.largest, axis=1, keepdims=True)
    # Not argmax, which reduces pairs. Of several equal logits, the first.
    token = jnp.min(jnp.where(parts.largest == largest, parts.token, _NO_TOKEN), axis=1, keepdims=True)
    second = jnp.max(jnp.where(parts.token == token, parts.second, parts.largest), axis=1, keepdims=True)
    total = jnp.sum(parts.total * exp_below(parts.largest, largest), axis=1, keepdims=True)
    weighted = jnp.sum(_weighted_below(parts, largest), axis=1, keepdims=True)
    return Summary(largest, token, second, total, weighted)


def of_part(summary: Summary, first: jax.Array) -> Summary:
    """Returns a settled summary of a part that begins at entry `first` in a form that can be merged."""
    is_nan, is_finite = jnp.isnan(summary.largest), jnp.isfinite(summary.largest)
    return Summary(
        jnp.where(is_nan, jnp.float32(jnp.inf), summary.largest),
        jnp.where(is_nan, -1, first + summary.token),
        summary.second,
        jnp.where(is_finite, summary.total, jnp.float32(0)),
        jnp.where(is_finite, summary.weighted, jnp.float32(0)),
    )


def _weighted_below(part: Summary, largest: jax.Array) -> jax.Array:
    """Returns the weighted sum of a part relative to a larger `largest`."""
    scale = exp_below(part.largest, largest)
    # 0 times -inf is NaN, but must be 0.
    shift = jnp.where(scale > 0, part.largest - largest, jnp.float32(0))
    return scale * (part.weighted + shift * part.total)


def exp_below(values: jax.Array, largest: jax.Array) -> jax.Array:
    """Returns exp(values - largest), 0 where both are -inf."""
    return jnp.exp(values - jnp.where(largest == -jnp.inf, jnp.float32(0), largest))


def settled(summary: Summary) -> Summary:
    """Returns the final form of a summary of all logits: where one is NaN, `largest` is NaN and `token` 0.

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


# Most rows, and entries of the vocabulary, whose logits are held at a time: 4 MiB, which stay in the cache. Fewer rows
# would read the weights more often.
_ROWS, _ENTRIES = 512, 2048
# On a CPU, a block of the vocabulary copies its weights, which takes longer than computing few rows. So all logits of
# few rows are held, and as many rows are reduced at a time as stay in the cache. A TPU multiplies blocks in place, and
# keeps all logits of few rows in its own memory.
_FEW_ROWS, _ROWS_REDUCED = 64, 8
# Logits that a GPU holds at a time: 32 MiB, which stay in its L2 cache. Blocks are unrolled, since in a loop a GPU
# copies their weights.
_GPU_LOGITS = 1 << 23
# Entries that are reduced next to each other: a reduction along the innermost axis alone is not vectorised on CPU.
_ABREAST = 128
_Rows = TypeVar("_Rows")
_Values = TypeVar("_Values")


def decide(
    states: jax.Array,
    weights: jax.Array,
    *,
    vocab_axis: int,
    measure: Measure,
    precision: Precision,
    cap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns token, confidence and finiteness of every state, without holding all logits if the measure allows it.

    Args:
      states: shape (rows, width). Inputs of the head (`EarlyExitT5.head_inputs`).
      weights: shape (width, vocabulary), or its transpose (`EarlyExitT5.head_weights`).
      vocab_axis: Axis of the vocabulary in `weights`.
      measure: A measure of logits; with any other, the confidence is 0 here.
      precision: Its type is that of states and weights; the logits are float32.
      cap: The model's cap on logits (`numerics.capped`); None if it has none.

    Returns:
      int32, float32 and bool, each of shape (rows,). The token is the first of the largest logits.
      Where a logit is NaN, the token is 0 and finiteness is false.
    """
    if not _takes_summaries(measure):
        return decide_by_logits(states, weights, vocab_axis=vocab_axis, measure=measure, precision=precision, cap=cap)
    return _decided_by_part(states, weights, vocab_axis, measure, precision, cap)


def _takes_summaries(measure: Measure) -> bool:
    """Returns whether a summary of the logits is enough for a measure."""
    return measure.needs is not Need.LOGITS or measure.of_summary is not None


def _decided_by_part(
    states: jax.Array,
    weights: jax.Array,
    vocab_axis: int,
    measure: Measure,
    precision: Precision,
    cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns decisions by summaries, where each device may have a part of the vocabulary."""

    def of_device(states: jax.Array, part: jax.Array, first: Any) -> Summary:
        summary = _summarise_in_blocks(states, part, vocab_axis, measure, precision, cap)
        return summary if first is None else of_part(summary, first)

    # [rows] or, where several devices have parts of the vocabulary, [parts, rows]
    summary = by_part(of_device, states, weights, axis=vocab_axis)
    if summary.token.ndim == 2:
        of_all = union(Summary(*(values.T for values in summary)))
        summary = settled(Summary(*(values[:, 0] for values in of_all)))
    return _decided(summary, measure, weights.shape[vocab_axis])


def decide_by_each(
    states: jax.Array,
    weights: jax.Array,
    *,
    vocab_axis: int,
    measures: Sequence[Measure],
    precision: Precision,
    cap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the decisions of `decide` by several measures, from one summary of the logits.

    Args:
      states: See `decide`.
      weights: See `decide`.
      vocab_axis: See `decide`.
      measures: At least one.
      precision: See `decide`.
      cap: See `decide`.

    Returns:
      Token and finiteness, each of shape (rows,), and between them confidences, (measures, rows).
    """
    asked = functools.partial(decide, states, weights, vocab_axis=vocab_axis, precision=precision, cap=cap)
    by_summary = [measure for measure in measures if measure.of_summary is not None]
    if len(by_summary) > 1:
        token, joint, is_finite = asked(measure=_jointly(by_summary))
    made = {}
    for measure in measures:
        if len(by_summary) > 1 and measure.of_summary is not None:
            made[measure.name] = joint[by_summary.index(measure)]
        else:
            token, made[measure.name], is_finite = asked(measure=measure)
    return token, jnp.stack([made[measure.name] for measure in measures]), is_finite


def _jointly(measures: Sequence[Measure]) -> Measure:
    """Returns a measure whose confidences, (measures, rows), are those of several measures."""

    def of_summary(summary: Summary, vocab_size: int) -> jax.Array:
        return jnp.stack([measure.of_summary(summary, vocab_size) for measure in measures if measure.of_summary])

    return Measure(
        name="+".join(measure.name for measure in measures),
        meaning="several measures of one row of logits",
        needs=Need.LOGITS,
        confidence=lambda logits: jnp.stack([measure.confidence(logits) for measure in measures]),
        of_summary=of_summary,
        summary_parts=frozenset[str]().union(*(measure.summary_parts for measure in measures)),
    )


def _summarise_in_blocks(
    states: jax.Array,
    weights: jax.Array,
    vocab_axis: int,
    measure: Measure,
    precision: Precision,
    cap: float | None,
) -> Summary:
    def project(part: jax.Array, first: Any, entries: int) -> jax.Array:
        columns = jax.lax.dynamic_slice_in_dim(weights, first, entries, vocab_axis)
        return _logits(part, columns, vocab_axis, precision, cap)

    return _in_blocks(project, states, vocab_size=weights.shape[vocab_axis], measure=measure)


def _in_blocks(
    project: Callable[[jax.Array, Any, int], jax.Array], states: jax.Array, *, vocab_size: int, measure: Measure
) -> Summary:
    """Returns the summary, each (rows,), of the logits of states.

    `project` returns the logits of some states for a number of entries from an entry on.
    """
    whole, rest = divmod(vocab_size, _ENTRIES)
    platform = jax.default_backend()

    def summarise(part: jax.Array) -> Summary:
        if platform == "gpu":
            most = max(1, _GPU_LOGITS // len(part))
            blocks = [(first, min(most, vocab_size - first)) for first in range(0, vocab_size, most)]
            made = [_of_block(project(part, first, entries), first, measure) for first, entries in blocks]
            return functools.reduce(merged, made)
        if len(part) <= _FEW_ROWS:
            most = _ROWS_REDUCED if whole and platform == "cpu" else len(part)
            return in_parts(lambda logits: _of_block(logits, 0, measure), project(part, 0, vocab_size), most=most)

        def merge(block: Any, summary: Summary) -> Summary:
            first = block * _ENTRIES
            return merged(summary, _of_block(project(part, first, _ENTRIES), first, measure))

        summary = nothing(part.shape[:1])
        if whole:
            summary = jax.lax.fori_loop(0, whole, merge, summary)
        if rest:
            first = whole * _ENTRIES
            summary = merged(summary, _of_block(project(part, first, rest), first, measure))
        return summary

    return settled(in_parts(summarise, states, most=_ROWS))


def _of_block(logits: jax.Array, first: Any, measure: Measure) -> Summary:
    """Returns the summary, each (rows,), of a block of logits, (rows, entries); 0 where the measure needs none."""
    rows, entries = logits.shape
    abreast = _ABREAST if entries % _ABREAST == 0 else 1
    # [rows, entries] -> [rows, groups, abreast]: reduce over groups first, then over the last axis.
    grouped = logits.reshape(rows, -1, abreast)

    def reduced(reduce: Callable[..., jax.Array], values: jax.Array) -> jax.Array:
        return reduce(reduce(values, axis=1), axis=1)[:, None, None]

    shape = grouped.shape[1:]
    # [1, groups, abreast]
    index = (jax.lax.broadcasted_iota(jnp.int32, shape, 0) * abreast + jax.lax.broadcasted_iota(jnp.int32, shape, 1))[
        None
    ]
    # A maximum alone ignores a NaN among numbers on CPU (jaxlib 0.10.2), and a broken model would go unnoticed. A
    # separate reduction for NaN would take as long as all others.
    is_nan = jnp.isnan(grouped)
    largest = reduced(jnp.max, jnp.where(is_nan, jnp.float32(jnp.inf), grouped))
    # Not argmax: a reduction of pairs, which is many times slower on CPU. -1, below every index, where there is a NaN.
    place = reduced(jnp.min, jnp.where(is_nan, -1, jnp.where(grouped == largest, index, entries)))
    second = total = weighted = jnp.zeros_like(largest)
    if "second" in measure.summary_parts:
        second = reduced(jnp.max, jnp.where(index == place, -jnp.inf, grouped))
    if "total" in measure.summary_parts:
        total = reduced(jnp.sum, exp_below(grouped, largest))
    if "weighted" in measure.summary_parts:
        scale = exp_below(grouped, largest)
        weighted = reduced(jnp.sum, jnp.where(scale > 0, scale * (grouped - largest), jnp.float32(0)))
    summary = Summary(largest, jnp.where(place < 0, -1, first + place), second, total, weighted)
    return Summary(*(values[:, 0, 0] for values in summary))


def _decided(summary: Summary, measure: Measure, vocab_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    if measure.of_summary is not None:
        confidence = measure.of_summary(summary, vocab_size)
    else:
        confidence = jnp.zeros_like(summary.largest)
    return summary.token, confidence, jnp.isfinite(summary.largest)


def _logits(
    states: jax.Array, weights: jax.Array, vocab_axis: int, precision: Precision, cap: float | None
) -> jax.Array:
    """Returns the float32 logits of rows for the entries of the given weights."""
    logits = product(states, weights, (((1,), (1 - vocab_axis,)), ((), ())), precision=precision_of(precision))
    return capped(logits, cap)


def decide_by_logits(
    states: jax.Array,
    weights: jax.Array,
    *,
    vocab_axis: int,
    measure: Measure,
    precision: Precision,
    cap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the decisions of `decide` from all logits of a row, which some measures need; takes some rows at a time.

    Devices that share the head communicate once: they exchange summaries, or all logits if the measure needs them.
    """
    if parts() > 1 and _takes_summaries(measure):
        return _decided_by_part(states, weights, vocab_axis, measure, precision, cap)

    def of_rows(part: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = whole(_logits(part, weights, vocab_axis, precision, cap))
        largest = jnp.max(logits, axis=-1)
        is_nan = jnp.any(jnp.isnan(logits), axis=-1)
        index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        # Not argmax: a reduction of pairs, which is many times slower on CPU.
        token = jnp.min(jnp.where(logits == largest[:, None], index, logits.shape[1] - 1), axis=-1)
        confidence = measure.confidence(logits) if measure.needs is Need.LOGITS else jnp.zeros_like(largest)
        return jnp.where(is_nan, 0, token), confidence, jnp.isfinite(largest) & ~is_nan

    return in_parts(of_rows, states, most=_ROWS)


def in_parts(compute: Callable[[_Rows], _Values], rows: _Rows, *, most: int) -> _Values:
    """Returns the results of a function for rows, which it gets in parts.

    Args:
      compute: Returns an array, or a tuple of arrays, whose first axis is that of the rows.
      rows: An array, or a tuple of arrays, of equally many rows. Parts of more than `most` rows are halved as long as
        their number is even.
      most: Most rows of a part, if they can be halved so often.
    """
    count = together = jax.tree.leaves(rows)[0].shape[0]
    while together % 2 == 0 and together > most:
        together //= 2
    if together == count:
        return compute(rows)
    parts = jax.tree.map(lambda values: values.reshape(-1, together, *values.shape[1:]), rows)
    joined: _Values = jax.tree.map(lambda values: values.reshape(count, *values.shape[2:]), jax.lax.map(compute, parts))
    return joined
