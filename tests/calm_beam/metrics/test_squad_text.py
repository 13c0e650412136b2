"""Tests of SQuAD's normalisation."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.metrics.squad_text import normalize_squad_text


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Cat", "cat"),
        ("an apple a day", "apple day"),
        ("theatre another a1", "theatre another a1"),
        ("U.S.A.", "usa"),
        ("well-known", "wellknown"),
        ("a. b", "b"),
        ("  two\n words\t", "two words"),
        ("the", ""),
        ("«été»", "«été»"),
    ],
)
def test_normalizes(text: str, normalized: str) -> None:
    """Case, ASCII punctuation, whole-word English articles and extra spaces go; all else stays."""
    assert normalize_squad_text(text) == normalized


@given(text=st.text(alphabet=string.printable))
def test_nothing_is_left_to_remove(text: str) -> None:
    """The result is in lower case, free of punctuation and articles, and single-spaced."""
    normalized = normalize_squad_text(text)
    assert normalized == normalized.lower()
    assert not set(normalized) & set(string.punctuation)
    assert not set(normalized.split()) & {"a", "an", "the"}
    assert normalized == " ".join(normalized.split())
