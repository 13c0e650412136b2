"""Samples that do not depend on how the data came."""

import dataclasses

import pytest

from calm_beam.evaluation.sample import sampled
from tests.calm_beam.evaluation.builders import build_prompt

_EXAMPLES = [
    dataclasses.replace(build_prompt(f"row-{index}", [5, 1]).example, file_index=index // 20, line=index % 20 + 1)
    for index in range(40)
]


def test_another_order_gives_the_same_sample() -> None:
    """The sample is that of the ids, in the order of the data."""
    sample = sampled(_EXAMPLES, 10)
    assert len(sample) == 10
    assert sampled(_EXAMPLES[::-1], 10) == sample
    assert sample == [example for example in _EXAMPLES if example in sample]
    assert sample != _EXAMPLES[:10]


@pytest.mark.parametrize("count", [1, 7, 39])
def test_larger_samples_hold_smaller_ones(count: int) -> None:
    """One more example leaves the others in."""
    assert set(sampled(_EXAMPLES, count)) < set(sampled(_EXAMPLES, count + 1))


@pytest.mark.parametrize("count", [40, 1000])
def test_no_more_than_there_are(count: int) -> None:
    """A sample as large as the data, or larger, is the data."""
    assert sampled(_EXAMPLES, count) == _EXAMPLES
