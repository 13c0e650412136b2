"""Tests of the Unicode tokeniser and of ROUGE-L over its tokens."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.metrics.rouge_l import UnicodeTokenizer, rouge_l, rouge_l_unicode
from tests.calm_beam.metrics.test_rouge_l import expected_f_measure

_TOKENIZER = UnicodeTokenizer()
_WORDS = st.lists(st.sampled_from(["été", "naïve", "straße", "d'or", "日本", "x2"]), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Un chien brun, l'été.", ["un", "chien", "brun", "l", "été"]),
        ("STRASSE straße", ["strasse", "strasse"]),
        ("Ελλάς ΕΛΛΆΣ", ["ελλάσ", "ελλάσ"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("snake_case a-b", ["snake", "case", "a", "b"]),
        ("3.5 km² ٣٤", ["3", "5", "km²", "٣٤"]),
        ("日本語、中国", ["日本語", "中国"]),
        ("❤\ufe0f ok", ["ok"]),
        ("... \u0301", []),
        ("", []),
    ],
    ids=[
        "accents",
        "sharp s",
        "final sigma",
        "marks",
        "underscore",
        "digits",
        "scripts",
        "emoji",
        "marks alone",
        "empty",
    ],
)
def test_tokens(text: str, tokens: list[str]) -> None:
    """Tokens are caseless runs of letters and digits with their marks, of any script."""
    assert _TOKENIZER.tokenize(text) == tokens


@given(text=st.text())
def test_tokens_do_not_depend_on_the_encoding_of_accents(text: str) -> None:
    """Composed and decomposed forms of a text give the same tokens."""
    assert _TOKENIZER.tokenize(unicodedata.normalize("NFD", text)) == _TOKENIZER.tokenize(
        unicodedata.normalize("NFC", text)
    )


@given(text=st.text())
def test_tokens_are_never_empty_and_start_with_a_letter_or_digit(text: str) -> None:
    """No token is empty, holds a space or starts with a mark."""
    for token in _TOKENIZER.tokenize(text):
        assert unicodedata.category(token[0])[0] in "LN"
        assert not any(character.isspace() for character in token)


@settings(deadline=None)  # The first example imports nltk.
@given(ours=_WORDS, theirs=_WORDS)
def test_agrees_with_brute_force(ours: list[str], theirs: list[str]) -> None:
    """The score is the F-measure of the longest common subsequence of Unicode words."""
    one, two = " ".join(ours), " ".join(theirs)
    expected = expected_f_measure(_TOKENIZER.tokenize(one), _TOKENIZER.tokenize(two))
    assert rouge_l_unicode(one, [two]) == pytest.approx(expected, rel=1e-12)


def test_accents_count() -> None:
    """Words that differ only in an accent differ, unlike under `rouge_l`; the same accent encoded otherwise agrees."""
    assert rouge_l_unicode("pâte", ["pête"]) == 0.0
    assert rouge_l("pâte", ["pête"]) == 1.0
    assert rouge_l_unicode("e\u0301te\u0301", ["\u00e9t\u00e9"]) == 1.0


def test_plain_english_scores_as_usual() -> None:
    """On text in [a-z0-9] and spaces both metrics agree."""
    candidate, references = "the quick fox ran", ["a quick dog ran", "the fox"]
    assert rouge_l_unicode(candidate, references) == rouge_l(candidate, references)


@pytest.mark.parametrize(("candidate", "reference"), [("...", "!"), ("", "?"), ("...", "mot")])
def test_different_texts_without_tokens_score_zero(candidate: str, reference: str) -> None:
    """Different texts of which one has no token score 0."""
    assert rouge_l_unicode(candidate, [reference]) == 0.0
