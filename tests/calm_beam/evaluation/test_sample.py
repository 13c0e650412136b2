"""A sample depends on ids only, and its means have standard errors."""

import dataclasses
import math
import random
import statistics

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from calm_beam.evaluation.performance import Estimate, estimated_mean, estimated_ratio, sampled
from tests.calm_beam.evaluation.builders import build_prompt

_EXAMPLES = [
    dataclasses.replace(build_prompt(f"row-{index}", [5, 1]).example, file_index=index // 20, line=index % 20 + 1)
    for index in range(40)
]
_VALUES = st.lists(st.floats(0, 1), min_size=2, max_size=20)


def test_another_order_gives_the_same_sample() -> None:
    """The sample is that of the ids, in the order of the data."""
    sample = sampled(_EXAMPLES, 10)
    assert len(sample) == 10
    assert sampled(_EXAMPLES[::-1], 10) == sample
    assert sample == [example for example in _EXAMPLES if example in sample]
    assert sample != _EXAMPLES[:10]


@pytest.mark.parametrize("count", [1, 7, 39])
def test_larger_samples_hold_smaller_ones(count: int) -> None:
    """A larger sample contains the smaller one."""
    assert set(sampled(_EXAMPLES, count)) < set(sampled(_EXAMPLES, count + 1))


@pytest.mark.parametrize("count", [40, 1000])
def test_no_more_than_there_are(count: int) -> None:
    """A sample as large as the data, or larger, is the data."""
    assert sampled(_EXAMPLES, count) == _EXAMPLES


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(_VALUES)
def test_a_mean_and_its_standard_error(values: list[float]) -> None:
    """Mean and standard error are those of the statistics module."""
    found = estimated_mean(values)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-12)
    assert found.standard_error == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-9)
    assert found.prompts == len(values)


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(_VALUES, st.integers(1, 9))
def test_a_ratio_to_equal_counts_is_a_mean(values: list[float], count: int) -> None:
    """With as many tokens in every prompt, layers per token are the mean of the prompts' means."""
    ratio, mean = estimated_ratio(values, [count] * len(values)), estimated_mean([value / count for value in values])
    assert ratio.mean == pytest.approx(mean.mean, abs=1e-12)
    assert ratio.standard_error == pytest.approx(mean.standard_error, abs=1e-9)


def test_a_ratio_is_per_token() -> None:
    """Long outputs weigh more: 1 layer for 1 token and 8 for each of 3 are 25 layers for 4 tokens."""
    assert estimated_ratio([1, 24], [1, 3]).mean == 6.25


def test_the_standard_error_of_a_ratio() -> None:
    """The standard error is the spread of the ratio over many samples of that size, within 10 %."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(3, 30, size=(400, 50))
    # Long outputs use more layers, so numerator and denominator are correlated.
    layers = tokens * (2 + tokens / 20) + generator.normal(0, 4, tokens.shape)
    found = [estimated_ratio(above.tolist(), below.tolist()) for above, below in zip(layers, tokens, strict=True)]
    spread = statistics.stdev(estimate.mean for estimate in found)
    assert statistics.fmean(estimate.standard_error or 0 for estimate in found) == pytest.approx(spread, rel=0.1)


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(_VALUES, st.randoms(use_true_random=False))
def test_the_order_does_not_matter(values: list[float], shuffler: random.Random) -> None:
    """Prompts in another order give the same numbers to the last digit."""
    shuffled = list(values)
    shuffler.shuffle(shuffled)
    assert estimated_mean(shuffled) == estimated_mean(values)


def test_one_prompt() -> None:
    """A single prompt has a mean, and no standard error."""
    assert estimated_ratio([12], [4]) == Estimate(mean=3.0, standard_error=None, prompts=1)


def test_no_prompt() -> None:
    """Without prompts there is no mean."""
    with pytest.raises(ValueError, match="an estimate needs at least one prompt, got none"):
        estimated_mean([])
