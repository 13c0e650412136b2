"""Tests of Token-F1 on answers that can be counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.metrics.squad import token_f1

_WORDS = st.lists(st.sampled_from(["red", "green", "blue"]), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("candidate", "reference", "expected"),
    [
        ("the Black cat!", "black cat", 1.0),
        ("cat black", "black cat", 1.0),
        ("black cat", "cat", 2 / 3),
        ("cat cat cat", "cat", 0.5),
        ("dog", "cat", 0.0),
        ("the", "...", 0.0),
        ("the", "the ", 1.0),
        ("-5 degrees", "5 degrees", 0.5),
        ("the", "cat", 0.0),
        ("cat", "", 0.0),
    ],
)
def test_pairs(candidate: str, reference: str, expected: float) -> None:
    """Words count with multiplicity and in any order; texts that have no words match if they are equal."""
    assert token_f1(candidate, [reference]) == expected


@given(ours=_WORDS, theirs=_WORDS)
def test_agrees_with_precision_and_recall(ours: list[str], theirs: list[str]) -> None:
    """The score is 2 P R / (P + R), with words matched one to one by striking them out."""
    left = list(theirs)
    for word in ours:
        if word in left:
            left.remove(word)
    matched = len(theirs) - len(left)
    precision, recall = matched / len(ours), matched / len(theirs)
    expected = 2 * precision * recall / (precision + recall) if matched else 0.0
    assert token_f1(" ".join(ours), [" ".join(theirs)]) == pytest.approx(expected, rel=1e-12)
