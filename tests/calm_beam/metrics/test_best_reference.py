"""Tests of scoring against several references."""

import re

import pytest

from calm_beam.metrics import Sight, best_over_references
from calm_beam.metrics.registry import METRICS

_WORDS = Sight(tokens=str.split)


def _share_of_length(candidate: str, reference: str) -> float:
    return len(reference) / len(candidate)


def test_the_best_reference_counts() -> None:
    """The highest of the pair scores is returned, wherever it is."""
    assert best_over_references(_share_of_length, "abcd", references=["a", "abc", "ab"], sight=_WORDS) == 0.75
    assert best_over_references(_share_of_length, "abcd", references=("a",), sight=_WORDS) == 0.25


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_refuses_a_bare_string(name: str) -> None:
    """A single string in place of a list is refused, since its letters are no references."""
    with pytest.raises(TypeError, match=re.escape("references must be a list of strings, got the string 'yes'.")):
        METRICS[name]("yes", "yes")


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_refuses_no_references(name: str) -> None:
    """An example without references has no score, not a score of 0."""
    with pytest.raises(ValueError, match=re.escape("references must hold at least one text, got none.")):
        METRICS[name]("yes", [])


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_takes_the_best_over_references(name: str) -> None:
    """More references never lower the score, and it equals the best of the single ones."""
    candidate, references = "the quick fox ran", ["a slow dog", "quick fox", "the quick fox ran off", "..."]
    metric = METRICS[name]
    assert metric(candidate, references) == max(metric(candidate, [reference]) for reference in references)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("text", ["", "...", "the", " \n", "été", "日本語", "The cat, sat.", "\ufe0f"])
def test_every_metric_gives_one_to_identical_texts(name: str, text: str) -> None:
    """A text scores exactly 1 against itself, with tokens or without, so the full model agrees with itself."""
    assert METRICS[name](text, [text]) == 1.0
    assert METRICS[name](text, ["something else", text]) == 1.0
