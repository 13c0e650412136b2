"""Averages within clusters are exact but for one rounding, upwards."""

import math
import random
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.clusters import ClusterLosses
from calm_beam.risk.fixed_point import LOSS_SCALE

_UNITS = st.integers(-LOSS_SCALE, LOSS_SCALE)


@given(losses=st.lists(_UNITS, min_size=1, max_size=9), rng=st.randoms(use_true_random=False))
def test_mean_is_the_exact_one_rounded_up(losses: list[int], rng: random.Random) -> None:
    """Merged in any tree, the mean is the ceiling of the rational one."""
    parts = [ClusterLosses(size=1, sums=np.array([loss])) for loss in losses]
    while len(parts) > 1:
        left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(left.merge(right))
    assert parts[0].size == len(losses)
    assert parts[0].mean().tolist() == [math.ceil(Fraction(sum(losses), len(losses)))]


def test_one_example_is_its_own_mean() -> None:
    """Clusters of one change nothing, whatever the shape."""
    losses = np.array([[0, 7], [LOSS_SCALE, -LOSS_SCALE]])
    assert ClusterLosses(size=1, sums=losses).mean().tolist() == losses.tolist()


def test_equality_is_by_content() -> None:
    """Sizes and sums decide."""
    one = ClusterLosses(size=2, sums=np.array([3, 4]))
    assert one == ClusterLosses(size=2, sums=np.array([3, 4]))
    assert hash(one) == hash(ClusterLosses(size=2, sums=np.array([3, 4])))
    assert one != ClusterLosses(size=3, sums=np.array([3, 4]))
    assert one != ClusterLosses(size=2, sums=np.array([3, 5]))
    assert one != 2
