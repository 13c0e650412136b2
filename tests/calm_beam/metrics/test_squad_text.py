"""The normalisation of answers, against that of SQuAD's official script, written out here."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.metrics.squad import exact_match, normalize_squad_text, token_f1

# Marks that, between words, belong to no number or formula.
_MARKS_OF_WORDS = "".join(mark for mark in string.punctuation if mark not in "+*^=<>")
_WORDS = st.sampled_from(["an", "the", "The", "cat", "Été", "über", "anthem", "кот", "日本", "was", "of"])


def _official(text: str) -> str:
    """Returns an answer normalised by the official script: lower case, no punctuation, no articles, single spaces."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


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
        ("Paris - France", "paris france"),
        ("COVID-19, T-shirt, e-mail, No.5", "covid19 tshirt email no5"),
        ("C++ or and/or?", "c or andor"),
        ("$5", "5"),
        ("5 %", "5"),
        ("5.", "5"),
        ("- 5", "5"),
        ("-", ""),
        ("1,000", "1000"),
        ("12,345,678", "12345678"),
        ("1,00,000", "100000"),
        ("the 1990s-era a-ha", "1990sera aha"),
    ],
)
def test_is_that_of_squad(text: str, normalized: str) -> None:
    """As in the script, case, ASCII punctuation, whole English articles and extra spaces are removed, and no more."""
    assert normalize_squad_text(text) == normalized == _official(text)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("-5", "-5"),
        ("the -5 degrees", "-5 degrees"),
        ("(-5)", "-5"),
        ("-$5", "-5"),
        ("$-5.50.", "-5.50"),
        ("3.14", "3.14"),
        ("3.14.", "3.14"),
        (".5", ".5"),
        ("-.5", "-.5"),
        ("3,14", "3,14"),
        ("1,000.50", "1000.50"),
        ("1.2.3", "1.2.3"),
        ("3:14", "3:14"),
        ("3-5", "3-5"),
        ("1/2", "1/2"),
        ("5 - 3 = 2", "5 - 3 = 2"),
        ("1e-5", "1e-5"),
        ("X+Y", "x+y"),
        ("a - b", "a - b"),
        ("2x-3y", "2x-3y"),
        ("(x+1)/y", "x+1/y"),
        ("x<=y", "x<=y"),
        ("tax+tip", "tax+tip"),
        ("α-β", "α-β"),
    ],
)
def test_numbers_keep_signs_and_points(text: str, normalized: str) -> None:
    """Numbers and formulas keep their signs and points, which the official script drops."""
    assert normalize_squad_text(text) == normalized != _official(text)
    assert _official(normalized) == _official(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("-5", "5"), ("3.14", "314"), ("x+y", "x-y"), ("-0.5", "0.5"), ("2.5", "25"), ("3,14", "314")),
        *(("3-5", "35"), ("1/2", "12"), ("3:14", "314"), ("2*3", "2/3"), ("5 - 3", "5 + 3"), ("1e-5", "1e5")),
        *(("x*y", "x/y"), ("x<y", "x>y"), ("x - y", "x + y"), ("-x", "x"), ("\N{MINUS SIGN}5", "5"), ("-$5", "$5")),
        *(("a+b", "a-b"), ("10-20", "1020"), ("-.5", ".5"), (".5", "5"), ("-40 °C", "40 °C"), ("2^3", "23")),
    ],
)
def test_other_numbers_are_other_answers(one: str, other: str) -> None:
    """Different numbers and formulas are neither an exact match, nor the same words."""
    for ours, theirs in ((one, other), (other, one)):
        assert exact_match(ours, [theirs]) == 0
        assert token_f1(ours, [theirs]) < 1
        assert exact_match(f"The answer is {ours}.", [f"answer is {theirs}"]) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("1,000", "1000"), ("3.14.", "3.14"), ("+5", "5"), ("\N{MINUS SIGN}5", "-5"), ("$5", "5"), ("5%", "5")),
        *(("-5.", "-5"), ("(-5)", "-5"), ("1,000.0", "1000.0"), ("well-known", "wellknown"), ("-$5", "$-5")),
    ],
)
def test_other_ways_to_write_a_number_are_the_same_answer(one: str, other: str) -> None:
    """As in SQuAD, commas of thousands, full stops, currencies and per cent are removed."""
    assert exact_match(one, [other]) == token_f1(one, [other]) == 1


@given(words=st.lists(_WORDS | st.sampled_from([*_MARKS_OF_WORDS, *string.whitespace, "«", "–"])), data=st.data())
def test_words_are_normalised_as_by_the_script(words: list[str], data: st.DataObject) -> None:
    """Without digits, operators and single letters, the two normalisations agree."""
    glue = data.draw(st.sampled_from([" ", "\n", ", "]))
    text = glue.join(words)
    assert normalize_squad_text(text) == _official(text)


@given(text=st.text(alphabet=string.printable + "éαβ日€«"))
def test_nothing_is_dropped_that_the_script_keeps(text: str) -> None:
    """The script gives the same for a text and for our normalised text: the two differ in kept marks alone."""
    normalized = normalize_squad_text(text)
    assert _official(normalized) == _official(text)
    assert normalized == normalized.lower() == " ".join(normalized.split())


@given(one=st.integers(-999, 999), other=st.integers(-999, 999), places=st.integers(0, 2))
def test_numbers_match_exactly_if_they_are_equal(one: int, other: int, places: int) -> None:
    """Two decimals with equally many places are the same answer if and only if they are the same number."""
    ours, theirs = (f"{number / 10**places:.{places}f}" for number in (one, other))
    assert exact_match(f"about {ours}.", [f"About {theirs}"]) == float(one == other)
