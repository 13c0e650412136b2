"""Tests of the exact totals: the merge laws, by value, for any sharding, order and merge tree."""

import dataclasses
import functools
import itertools
import pickle
import random
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.risk.fixed_point import LOSS_SCALE, to_fixed_point
from calm_beam.risk.totals import RiskTotals

_OBJECTIVES, _THRESHOLDS = 2, 3
_INT64_MAX = 2**63 - 1
_ZERO = RiskTotals.zero(objectives=_OBJECTIVES, thresholds=_THRESHOLDS)

# Thirds and tenths are where float sums start to depend on the order.
_LOSS = st.one_of(st.floats(min_value=0.0, max_value=1.0), st.sampled_from([0.0, 0.1, 0.3, 1 / 3, 0.7, 1.0]))
_EXAMPLE = st.lists(_LOSS, min_size=6, max_size=6).map(lambda row: np.reshape(row, (_OBJECTIVES, _THRESHOLDS)))
_EXAMPLES = st.lists(_EXAMPLE, max_size=12)
_TOTALS = st.lists(_EXAMPLE, max_size=3).map(lambda examples: functools.reduce(RiskTotals.add, examples, _ZERO))
_few_examples = settings(max_examples=40)  # Each draws dozens of losses, so drawing is what takes the time.


def _merge_in_any_tree(parts: list[RiskTotals], rng: random.Random) -> RiskTotals:
    """Merges two parts picked at random, in either order, until one is left."""
    parts = list(parts)
    while len(parts) > 1:
        left = parts.pop(rng.randrange(len(parts)))
        right = parts.pop(rng.randrange(len(parts)))
        parts.append(left.merge(right))
    return parts[0]


@_few_examples
@given(examples=_EXAMPLES, num_shards=st.integers(min_value=1, max_value=5), rng=st.randoms(use_true_random=False))
def test_totals_do_not_depend_on_sharding_order_or_merge_tree(
    examples: list[np.ndarray], num_shards: int, rng: random.Random
) -> None:
    """Examples dealt at random to shards, merged in a random tree, give the totals of one pass."""
    shards = [_ZERO] * num_shards
    for example in rng.sample(examples, len(examples)):
        shard = rng.randrange(num_shards)
        shards[shard] = shards[shard].add(example)
    assert _merge_in_any_tree(shards, rng) == functools.reduce(RiskTotals.add, examples, _ZERO)


@_few_examples
@given(a=_TOTALS, b=_TOTALS, c=_TOTALS)
def test_merge_laws(a: RiskTotals, b: RiskTotals, c: RiskTotals) -> None:
    """Merging is associative and commutative, and zero is its unit."""
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(b) == b.merge(a)
    assert a.merge(_ZERO) == a == _ZERO.merge(a)


def test_float_sums_break_the_law() -> None:
    """The twin of the law: float sums of the same three losses depend on the order."""
    sums = {sum(order) for order in itertools.permutations([0.1, 0.2, 0.3])}
    assert len(sums) > 1


@_few_examples
@given(examples=st.lists(_EXAMPLE, min_size=1, max_size=12))
def test_sums_are_exact(examples: list[np.ndarray]) -> None:
    """The sums equal those of the rounded losses in rational arithmetic, and the risk is their mean."""
    totals = functools.reduce(RiskTotals.add, examples, _ZERO)
    for place in np.ndindex(_OBJECTIVES, _THRESHOLDS):
        exact = sum(Fraction(int(to_fixed_point(example[place])), LOSS_SCALE) for example in examples)
        assert Fraction(int(totals.loss_sums[place]), LOSS_SCALE) == exact
        # Below 2^53 units the sum is a float, so the division rounds once.
        assert totals.empirical_risk()[place] == float(exact) / len(examples)


@_few_examples
@given(totals=_TOTALS)
def test_pickle_keeps_the_value(totals: RiskTotals) -> None:
    """A pickled value comes back equal, with the same hash, and still read-only."""
    back = pickle.loads(pickle.dumps(totals))
    assert back == totals
    assert hash(back) == hash(totals)
    assert not back.loss_sums.flags.writeable


def test_equality_is_by_value() -> None:
    """Different counts, sums, shapes and types are unequal; equal content is equal."""
    one = _ZERO.add(np.zeros((2, 3)))
    assert one == RiskTotals(n=1, loss_sums=np.zeros((2, 3), dtype=np.int64))
    assert one != _ZERO
    assert one != _ZERO.add(np.full((2, 3), 0.5))
    assert one != RiskTotals(n=1, loss_sums=np.zeros((3, 2), dtype=np.int64))
    assert one != (1, [[0, 0, 0], [0, 0, 0]])


def test_values_cannot_be_changed() -> None:
    """Neither the fields nor the array, nor the array that was passed in, change a value."""
    given_sums = np.zeros((1, 1), dtype=np.int64)
    totals = RiskTotals(n=1, loss_sums=given_sums)
    given_sums[0, 0] = 5
    assert totals.loss_sums[0, 0] == 0
    with pytest.raises(ValueError, match="read-only"):
        totals.loss_sums[0, 0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        totals.n = 2  # type: ignore[misc]


def test_add_and_merge_leave_their_operands() -> None:
    """Adding and merging return new values."""
    one = _ZERO.add(np.full((2, 3), 0.5))
    one.merge(one)
    one.add(np.ones((2, 3)))
    assert one == RiskTotals(n=1, loss_sums=np.full((2, 3), LOSS_SCALE // 2))
    assert _ZERO.n == 0


def test_two_billion_losses_of_one_fit_and_the_next_overflows() -> None:
    """2^31 - 1 examples of loss 1 are held exactly; one more is an OverflowError in words."""
    most = _INT64_MAX // LOSS_SCALE
    full = RiskTotals(n=most, loss_sums=np.full((1, 1), most * LOSS_SCALE))
    assert full.empirical_risk().tolist() == [[1.0]]
    where = f"loss_sums[0, 0] overflows int64 at n = {most + 1}: "
    advice = f". The sums hold {most} examples of loss 1; use a smaller calibration set."
    with pytest.raises(OverflowError, match=re.escape(f"{where}{most * LOSS_SCALE} + {LOSS_SCALE}{advice}")):
        full.add([[1.0]])
    one = RiskTotals.zero(objectives=1, thresholds=1).add([[1.0]])
    with pytest.raises(OverflowError, match=re.escape(f"{where}{LOSS_SCALE} + {most * LOSS_SCALE}{advice}")):
        one.merge(full)


def test_sum_may_reach_the_last_integer() -> None:
    """A sum of exactly 2^63 - 1 is no overflow."""
    most = _INT64_MAX // LOSS_SCALE + 1
    nearly = RiskTotals(n=most, loss_sums=np.full((1, 1), _INT64_MAX - 1))
    assert nearly.add([[2.0**-32]]).loss_sums.tolist() == [[_INT64_MAX]]


def test_shapes_have_to_agree() -> None:
    """Losses or totals of another shape are refused with both shapes, never broadcast."""
    message = "losses has shape (3,), these totals have (2, 3) (objectives, thresholds)."
    with pytest.raises(ValueError, match=re.escape(message)):
        _ZERO.add([0.0, 0.5, 1.0])
    message = "other.loss_sums has shape (1, 3), these totals have (2, 3)"
    with pytest.raises(ValueError, match=re.escape(message)):
        _ZERO.merge(RiskTotals.zero(objectives=1, thresholds=3))


def test_losses_outside_are_refused() -> None:
    """A loss outside [0, 1] or NaN is refused by value and place."""
    with pytest.raises(ValueError, match=re.escape("losses[1, 2] must be in [0, 1], got nan.")):
        _ZERO.add([[0.0, 0.0, 0.0], [0.0, 0.0, float("nan")]])


def test_risk_of_no_examples_is_refused() -> None:
    """An empty calibration set has no risk."""
    with pytest.raises(ValueError, match=re.escape("empirical_risk needs at least one example, got n = 0.")):
        _ZERO.empirical_risk()


def test_constructor_checks() -> None:
    """A count or sums that no examples can give are refused by value."""
    zeros = np.zeros((1, 1), dtype=np.int64)
    with pytest.raises(ValueError, match=re.escape("n must be at least 0, got -1.")):
        RiskTotals(n=-1, loss_sums=zeros)
    with pytest.raises(TypeError, match=re.escape("loss_sums must be int64 (see to_fixed_point), got dtype float64.")):
        RiskTotals(n=1, loss_sums=zeros / 2)
    with pytest.raises(ValueError, match=re.escape("must have shape (objectives, thresholds), got (1,).")):
        RiskTotals(n=1, loss_sums=zeros[0])
    with pytest.raises(ValueError, match=re.escape(f"must be in [0, {LOSS_SCALE}] for n = 1 examples, got values in")):
        RiskTotals(n=1, loss_sums=zeros + LOSS_SCALE + 1)
    with pytest.raises(ValueError, match=re.escape("got values in [-1, -1].")):
        RiskTotals(n=1, loss_sums=zeros - 1)
    with pytest.raises(ValueError, match=re.escape("objectives must be at least 1, got 0.")):
        RiskTotals.zero(objectives=0, thresholds=1)
    with pytest.raises(ValueError, match=re.escape("thresholds must be at least 1, got -2.")):
        RiskTotals.zero(objectives=1, thresholds=-2)
