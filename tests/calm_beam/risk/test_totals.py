"""Exact totals follow the merge laws for any sharding, order and merge tree, as do sums of digests."""

import dataclasses
import functools
import hashlib
import itertools
import math
import operator
import pickle
import random
import re
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings, strategies
from hypothesis import strategies as st

from calm_beam.risk.evidence import MODULUS, RiskTotals, sum_of_digests
from calm_beam.risk.losses import LOSS_SCALE

_ROWS, _THRESHOLDS = 2, 3
_INT64_MAX, _INT64_MIN = 2**63 - 1, -(2**63)
_ZERO = RiskTotals.zero(rows=_ROWS, thresholds=_THRESHOLDS)

_VALUE = st.one_of(st.integers(-(2**40), 2**40), st.sampled_from([0, 1, -1, LOSS_SCALE]))
_UNIT = st.lists(_VALUE, min_size=6, max_size=6).map(lambda row: np.reshape(row, (1, _ROWS, _THRESHOLDS)))
_UNITS = st.lists(_UNIT, max_size=12)
_TOTALS = st.lists(_UNIT, max_size=3).map(lambda units: _sum(units))
_few_examples = settings(max_examples=40)  # Each draws dozens of values, so drawing is what takes the time.


def _sum(units: list[np.ndarray]) -> RiskTotals:
    return functools.reduce(RiskTotals.merge, map(RiskTotals.of, units), _ZERO)


def _merge_in_any_tree(parts: list[RiskTotals], rng: random.Random) -> RiskTotals:
    """Merges two parts picked at random, in either order, until one is left."""
    parts = list(parts)
    while len(parts) > 1:
        left = parts.pop(rng.randrange(len(parts)))
        right = parts.pop(rng.randrange(len(parts)))
        parts.append(left.merge(right))
    return parts[0]


@_few_examples
@given(units=_UNITS, num_shards=st.integers(min_value=1, max_value=5), rng=st.randoms(use_true_random=False))
def test_totals_do_not_depend_on_sharding_order_or_merge_tree(
    units: list[np.ndarray], num_shards: int, rng: random.Random
) -> None:
    """Units dealt at random to shards, merged in a random tree, give the totals of one batch and of plain integers."""
    shards = [_ZERO] * num_shards
    for unit in rng.sample(units, len(units)):
        shard = rng.randrange(num_shards)
        shards[shard] = shards[shard].merge(RiskTotals.of(unit))
    merged = _merge_in_any_tree(shards, rng)
    assert merged == (RiskTotals.of(np.concatenate(units)) if units else _ZERO)
    exact = [sum(int(unit[0, i, j]) for unit in units) for i, j in np.ndindex(_ROWS, _THRESHOLDS)]
    assert merged.sums.reshape(-1).tolist() == exact
    assert merged.n == len(units)


@_few_examples
@given(a=_TOTALS, b=_TOTALS, c=_TOTALS)
def test_merge_laws(a: RiskTotals, b: RiskTotals, c: RiskTotals) -> None:
    """Merging is associative and commutative, and zero is its unit."""
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(b) == b.merge(a)
    assert a.merge(_ZERO) == a == _ZERO.merge(a)


def test_float_sums_break_the_law() -> None:
    """Float sums of the same three losses depend on the order (the twin of the law)."""
    # From Python 3.12 on, sum() compensates for its rounding.
    sums = {functools.reduce(operator.add, order) for order in itertools.permutations([0.1, 0.2, 0.3])}
    assert len(sums) > 1


@_few_examples
@given(totals=_TOTALS)
def test_pickle_keeps_the_value(totals: RiskTotals) -> None:
    """A pickled value reads back equal, with the same hash, and still read-only."""
    back = pickle.loads(pickle.dumps(totals))
    assert back == totals
    assert hash(back) == hash(totals)
    assert not back.sums.flags.writeable


def test_equality_is_by_value() -> None:
    """Different counts, sums, shapes and types are unequal; equal content is equal."""
    one = RiskTotals.of(np.zeros((1, 2, 3), np.int64))
    assert one == RiskTotals(n=1, sums=np.zeros((2, 3), dtype=np.int64))
    assert one != _ZERO
    assert one != RiskTotals.of(np.ones((1, 2, 3), np.int64))
    assert one != RiskTotals(n=1, sums=np.zeros((3, 2), dtype=np.int64))
    assert one != (1, [[0, 0, 0], [0, 0, 0]])


def test_values_cannot_be_changed() -> None:
    """A value is changed neither by its fields nor by its array, nor by the array that was passed in."""
    given_sums = np.zeros((1, 1), dtype=np.int64)
    totals = RiskTotals(n=1, sums=given_sums)
    given_sums[0, 0] = 5
    assert totals.sums[0, 0] == 0
    with pytest.raises(ValueError, match="read-only"):
        totals.sums[0, 0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        totals.n = 2  # type: ignore[misc]


@pytest.mark.parametrize(("most", "more"), [(_INT64_MAX, 1), (_INT64_MIN, -1)])
def test_sums_may_reach_the_last_integer_and_not_pass_it(most: int, more: int) -> None:
    """The ends of int64 are exact; one step further is a clear OverflowError, in either order."""
    nearly = RiskTotals(n=9, sums=np.array([[most - more]]))
    step = RiskTotals(n=1, sums=np.array([[more]]))
    full = nearly.merge(step)
    assert full.sums.tolist() == [[most]]
    for left, right in ((full, step), (step, full)):
        message = f"sums[0, 0] overflows int64 at n = 11: {int(left.sums[0, 0])} + {int(right.sums[0, 0])}. Use a"
        with pytest.raises(OverflowError, match=re.escape(message)):
            left.merge(right)


def test_a_batch_that_may_overflow_is_refused() -> None:
    """Adding up a batch never wraps around."""
    assert RiskTotals.of(np.full((2, 1, 1), 2**62 - 1)).sums.tolist() == [[2**63 - 2]]
    with pytest.raises(OverflowError, match=re.escape(f"the sum of 2 values up to {2**62} overflows int64.")):
        RiskTotals.of(np.full((2, 1, 1), 2**62))


@settings(max_examples=40, deadline=None)
@given(units=st.integers(0, 40), seed=st.integers(0, 2**32), rng=st.randoms(use_true_random=False))
def test_any_batches_give_the_exact_sums_of_parts(units: int, seed: int, rng: random.Random) -> None:
    """Dealt to batches at random and merged in any tree, the sums of each part are those of its units."""
    generator = np.random.default_rng(seed)
    values = generator.integers(-(2**45), 2**45, size=(units, _ROWS, _THRESHOLDS))
    is_in_part = generator.random((units, 4)) < 0.7
    batches = np.array([rng.randrange(5) for _ in range(units)], int)
    merged = _merge_in_any_tree(
        [RiskTotals.of_parts(values[batches == batch], is_in_part[batches == batch]) for batch in range(5)], rng
    )
    for part in range(4):
        assert merged.sums[part].tolist() == RiskTotals.of(values[is_in_part[:, part]]).sums.tolist()
    assert merged.n == units
    assert merged == merged.merge(RiskTotals.zero(parts=4, rows=_ROWS, thresholds=_THRESHOLDS))


def test_parts_whose_sums_floats_cannot_hold_are_refused() -> None:
    """Products of floats are used only where they are exact: below 2^53."""
    everywhere = np.ones((2, 1), bool)
    assert RiskTotals.of_parts(np.full((2, 1, 1), 2**52 - 1), everywhere).sums.tolist() == [[[2**53 - 2]]]
    message = f"the sum of 2 values up to {2**52} may pass 2^53. Add fewer units at a time."
    with pytest.raises(OverflowError, match=re.escape(message)):
        RiskTotals.of_parts(np.full((2, 1, 1), -(2**52)), everywhere)
    # A million full losses are far below that.
    assert LOSS_SCALE * 1_000_000 < 2**53


def test_shapes_have_to_agree() -> None:
    """Totals of another shape are refused with both shapes, never broadcast."""
    message = "other.sums has shape (1, 3), these totals have (2, 3) (rows, thresholds). Only totals over the same"
    with pytest.raises(ValueError, match=re.escape(message)):
        _ZERO.merge(RiskTotals.zero(rows=1, thresholds=3))
    with pytest.raises(ValueError, match=re.escape("must have shape (units, rows, thresholds), got (2, 3).")):
        RiskTotals.of(np.zeros((2, 3), np.int64))
    with pytest.raises(ValueError, match="values are of 2 units, is_in_part of 3"):
        RiskTotals.of_parts(np.zeros((2, 1, 1), np.int64), np.ones((3, 1), bool))
    with pytest.raises(ValueError, match=re.escape("other.sums has shape (4, 2, 2), these totals have (4, 2, 3)")):
        RiskTotals.zero(parts=4, rows=2, thresholds=3).merge(RiskTotals.zero(parts=4, rows=2, thresholds=2))


def test_constructor_checks() -> None:
    """An impossible count or sum is refused by value."""
    zeros = np.zeros((1, 1), dtype=np.int64)
    with pytest.raises(ValueError, match=re.escape("n must be at least 0, got -1.")):
        RiskTotals(n=-1, sums=zeros)
    with pytest.raises(TypeError, match=re.escape("sums must be int64 (see to_fixed_point), got dtype float64.")):
        RiskTotals(n=1, sums=zeros / 2)
    with pytest.raises(ValueError, match=re.escape("must have shape (rows, thresholds), got (1,).")):
        RiskTotals(n=1, sums=zeros[0])
    with pytest.raises(ValueError, match=re.escape("rows must be at least 1, got 0.")):
        RiskTotals.zero(rows=0, thresholds=1)
    with pytest.raises(ValueError, match=re.escape("thresholds must be at least 1, got -2.")):
        RiskTotals.zero(rows=1, thresholds=-2)


@given(
    losses=st.lists(st.integers(-LOSS_SCALE, LOSS_SCALE), min_size=1, max_size=9), rng=st.randoms(use_true_random=False)
)
def test_mean_is_the_exact_one_rounded_up(losses: list[int], rng: random.Random) -> None:
    """Merged in any tree, the mean is the ceiling of the rational one."""
    parts = [RiskTotals(n=1, sums=np.array([[loss]])) for loss in losses]
    merged = _merge_in_any_tree(parts, rng)
    assert merged.n == len(losses)
    assert merged.mean_up().tolist() == [[math.ceil(Fraction(sum(losses), len(losses)))]]


def test_one_example_is_its_own_mean() -> None:
    """Clusters of one change nothing, whatever the shape."""
    losses = np.array([[0, 7], [LOSS_SCALE, -LOSS_SCALE]])
    assert RiskTotals(n=1, sums=losses).mean_up().tolist() == losses.tolist()


@hypothesis.given(strategies.lists(strategies.binary(min_size=32, max_size=32), max_size=20))
def test_sums_are_those_of_integers(digests: list[bytes]) -> None:
    """Carries pass from word to word, and bits beyond 256 are dropped."""
    assert sum_of_digests(b"".join(digests)) == sum(int.from_bytes(each, "big") for each in digests) % MODULUS


def test_many_digests() -> None:
    """With many digests, no word overflows."""
    digests = [hashlib.sha256(str(index).encode()).digest() for index in range(5000)]
    expected = sum(int.from_bytes(each, "big") for each in digests) % MODULUS
    assert sum_of_digests(b"".join(digests)) == expected
    assert sum_of_digests(b"\xff" * 32 * 1000) == -1000 % MODULUS
