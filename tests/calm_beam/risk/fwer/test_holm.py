"""Tests of Holm's procedure and Bonferroni's correction."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.fwer import Procedure, bonferroni_test, holm_test

_P = st.sampled_from([0.0, 0.01, 0.0125, 0.02, 0.025, 0.05, 0.5]) | st.floats(min_value=0.0, max_value=1.0)


@given(p_values=st.lists(_P, max_size=6))
def test_holm_closes_bonferroni(p_values: list[float]) -> None:
    """Holm rejects what the closed testing principle gives: every subset that holds it is rejected by Bonferroni."""
    size = len(p_values)
    subsets = [subset for length in range(1, size + 1) for subset in itertools.combinations(range(size), length)]
    passing = {subset for subset in subsets if min(p_values[place] for place in subset) <= 0.05 / len(subset)}
    expected = [all(subset in passing for subset in subsets if place in subset) for place in range(size)]
    assert holm_test(p_values, epsilon=0.05).rejected.tolist() == expected


@given(p_values=st.lists(_P, max_size=9))
def test_holm_dominates_bonferroni(p_values: list[float]) -> None:
    """Whatever Bonferroni rejects, Holm rejects too."""
    assert not (bonferroni_test(p_values, epsilon=0.05).rejected & ~holm_test(p_values, epsilon=0.05).rejected).any()


def test_holm_rejects_more() -> None:
    """The domination is strict."""
    assert bonferroni_test([0.02, 0.03], epsilon=0.05).rejected.tolist() == [True, False]
    assert holm_test([0.02, 0.03], epsilon=0.05).rejected.tolist() == [True, True]


@given(p_values=st.lists(_P, min_size=1, max_size=9))
def test_bonferroni_compares_with_its_share(p_values: list[float]) -> None:
    """Each hypothesis is rejected by its own p-value alone, at epsilon / K."""
    expected = [p <= 0.05 / len(p_values) for p in p_values]
    assert bonferroni_test(p_values, epsilon=0.05).rejected.tolist() == expected


@pytest.mark.parametrize("procedure", [holm_test, bonferroni_test])
@given(data=st.data())
def test_order_does_not_matter(procedure: Procedure, data: st.DataObject) -> None:
    """Shuffling the hypotheses shuffles the result, and nothing else."""
    p_values = np.array(data.draw(st.lists(_P, min_size=1, max_size=8)))
    order = data.draw(st.permutations(range(p_values.size)))
    shuffled = procedure(p_values[order], epsilon=0.05)
    assert np.array_equal(shuffled.rejected, procedure(p_values, epsilon=0.05).rejected[order])
    assert shuffled.tested.all()
