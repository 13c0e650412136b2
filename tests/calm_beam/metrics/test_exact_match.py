"""Tests of exact match."""

import pytest

from calm_beam.metrics.squad import exact_match


@pytest.mark.parametrize(
    ("candidate", "references", "expected"),
    [
        ("The Cat.", ["cat"], 1.0),
        ("cat", ["dog", "a cat"], 1.0),
        ("black cat", ["cat black"], 0.0),
        ("cats", ["cat"], 0.0),
        ("the", ["..."], 0.0),
        ("the", [" the"], 1.0),
    ],
)
def test_answers(candidate: str, references: list[str], expected: float) -> None:
    """Answers match if only case, punctuation, articles and spaces differ, and there is a word at all."""
    assert exact_match(candidate, references) == expected
