"""Averages within clusters are exact but for one rounding, upwards."""

import math
import random
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.fixed_point import LOSS_SCALE
from calm_beam.risk.totals import RiskTotals

_UNITS = st.integers(-LOSS_SCALE, LOSS_SCALE)


@given(losses=st.lists(_UNITS, min_size=1, max_size=9), rng=st.randoms(use_true_random=False))
def test_mean_is_the_exact_one_rounded_up(losses: list[int], rng: random.Random) -> None:
    """Merged in any tree, the mean is the ceiling of the rational one."""
    parts = [RiskTotals(n=1, sums=np.array([[loss]])) for loss in losses]
    while len(parts) > 1:
        left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(left.merge(right))
    assert parts[0].n == len(losses)
    assert parts[0].mean_up().tolist() == [[math.ceil(Fraction(sum(losses), len(losses)))]]


def test_one_example_is_its_own_mean() -> None:
    """Clusters of one change nothing, whatever the shape."""
    losses = np.array([[0, 7], [LOSS_SCALE, -LOSS_SCALE]])
    assert RiskTotals(n=1, sums=losses).mean_up().tolist() == losses.tolist()
