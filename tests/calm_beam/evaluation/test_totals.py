"""Sums over many splits at once, against plain integers."""

import pickle
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.evaluation.totals import PartTotals
from calm_beam.risk.fixed_point import LOSS_SCALE
from calm_beam.risk.totals import RiskTotals

_SIZES = {"trials": 4, "rows": 2, "thresholds": 3}


@settings(max_examples=40, deadline=None)
@given(units=st.integers(0, 40), seed=st.integers(0, 2**32), rng=st.randoms(use_true_random=False))
def test_any_batches_give_the_exact_sums(units: int, seed: int, rng: random.Random) -> None:
    """Dealt to batches at random and merged in any tree, each trial's sums are those of its part."""
    generator = np.random.default_rng(seed)
    values = generator.integers(-(2**45), 2**45, size=(units, 2, 3))
    is_in_part = generator.random((units, 4)) < 0.7
    batches = np.array([rng.randrange(5) for _ in range(units)], int)
    parts = [PartTotals.of(values[batches == batch], is_in_part[batches == batch]) for batch in range(5)]
    while len(parts) > 1:
        left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(left.merge(right))
    for trial in range(4):
        part = RiskTotals.of(values[is_in_part[:, trial]])
        assert parts[0].counts[trial] == part.n
        assert parts[0].sums[trial].tolist() == part.sums.tolist()
    assert parts[0] == parts[0].merge(PartTotals.zero(**_SIZES))
    assert pickle.loads(pickle.dumps(parts[0])) == parts[0]


def test_values_whose_sum_floats_cannot_hold_are_refused() -> None:
    """The product of floats is used only where it is exact: below 2^53."""
    everywhere = np.ones((2, 1), bool)
    assert PartTotals.of(np.full((2, 1, 1), 2**52 - 1), everywhere).sums.tolist() == [[[2**53 - 2]]]
    message = f"the sum of 2 values up to {2**52} may pass 2^53. Add fewer units at a time."
    with pytest.raises(OverflowError, match=re.escape(message)):
        PartTotals.of(np.full((2, 1, 1), -(2**52)), everywhere)
    # A million full losses are far from that.
    assert LOSS_SCALE * 1_000_000 < 2**53


def test_sums_that_leave_int64_are_refused() -> None:
    """Merging never wraps around."""
    large = PartTotals(counts=np.ones(1, np.int64), sums=np.full((1, 1, 1), 2**62))
    with pytest.raises(OverflowError, match="a sum overflows int64"):
        large.merge(large)


def test_shapes_have_to_agree() -> None:
    """Other numbers of units, trials, rows or thresholds are refused."""
    with pytest.raises(ValueError, match="values are of 2 units, is_in_part of 3"):
        PartTotals.of(np.zeros((2, 1, 1), np.int64), np.ones((3, 1), bool))
    with pytest.raises(ValueError, match=re.escape("other.sums has shape (4, 2, 2), these totals have (4, 2, 3).")):
        PartTotals.zero(**_SIZES).merge(PartTotals.zero(trials=4, rows=2, thresholds=2))


def test_equality_is_by_content() -> None:
    """Counts and sums decide."""
    one = PartTotals.of(np.ones((1, 2, 3), np.int64), np.ones((1, 4), bool))
    assert one != PartTotals.zero(**_SIZES)
    assert hash(one) == hash(one.merge(PartTotals.zero(**_SIZES)))
    assert one != PartTotals(counts=one.counts, sums=one.sums + 1)
    assert one != 1
