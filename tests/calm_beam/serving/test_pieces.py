"""The parts of an output's text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.serving import GrowingText, token_texts
from tests.builders import train_vocabulary
from tests.pipelines import text_rows, write_vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """A small vocabulary with sentinels."""
    return Vocabulary(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "v.model"), extra_ids=2)


@pytest.fixture(scope="module")
def byte_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """A vocabulary that spells in bytes what it has no piece for."""
    path = tmp_path_factory.mktemp("bytes") / "v.model"
    texts = [row["input"] for row in text_rows(60)]
    return Vocabulary(train_vocabulary(path, texts, 300, byte_fallback=True, hard_vocab_limit=False))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokens=st.lists(st.integers(2, 45), max_size=8), is_ended=st.booleans())
def test_together_they_are_the_text(vocabulary: Vocabulary, tokens: list[int], is_ended: bool) -> None:
    """Every token has a text of its own, and without the end these make up the output's text."""
    texts = token_texts([*tokens, 1] if is_ended else tokens, vocabulary)
    assert len(texts) == len(tokens) + is_ended
    assert "".join(texts[: len(tokens)]) == vocabulary.decode(tokens)
    assert texts[len(tokens) :] == (("</s>",) if is_ended else ())


def test_words_are_cut_where_tokens_are(vocabulary: Vocabulary) -> None:
    """An encoded text gives its pieces, with the space before a word."""
    tokens = vocabulary.encode("the cat sees")
    assert [text for text in token_texts(tokens, vocabulary) if text.startswith(" ")]
    assert len(token_texts(tokens, vocabulary)) == len(tokens)


def test_a_letter_of_several_tokens_has_its_text_at_the_last(byte_vocabulary: Vocabulary) -> None:
    """With byte fallback, a letter without a piece is spelt in bytes, and the last one has its text."""
    tokens = byte_vocabulary.encode("the €")
    assert byte_vocabulary.decode(tokens) == "the €"
    texts = token_texts(tokens, byte_vocabulary)
    assert "".join(texts) == "the €"
    assert texts[-3:] == ("", "", "€")
    growing = GrowingText(byte_vocabulary)
    assert (*map(growing.add, tokens), growing.end()) == (*texts, "")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), has_bytes=st.booleans(), is_ended=st.booleans())
def test_a_growing_text_is_never_taken_back(
    vocabulary: Vocabulary, byte_vocabulary: Vocabulary, data: st.DataObject, *, has_bytes: bool, is_ended: bool
) -> None:
    """With any tokens, also bytes that are no letter, the parts together are the text of the output."""
    of = byte_vocabulary if has_bytes else vocabulary
    tokens = data.draw(st.lists(st.integers(2, of.size + 1), max_size=10))
    growing = GrowingText(of)
    parts = [growing.add(token) for token in ([*tokens, 1] if is_ended else tokens)]
    assert "".join([*parts, growing.end()]) == of.decode(tokens)


def test_the_beginning_of_a_letter_is_held_back_until_the_end(byte_vocabulary: Vocabulary) -> None:
    """The beginning of a letter is held back; if the output ends before the rest, it reads as in the whole text."""
    *tokens, _ = byte_vocabulary.encode("the €")
    growing = GrowingText(byte_vocabulary)
    assert "".join(map(growing.add, [*tokens, 1])) == "the "
    assert growing.end() == "\N{REPLACEMENT CHARACTER}" * 2
    assert growing.end() == ""


def test_token_ids_are_their_own_text() -> None:
    """Without a vocabulary, the text is the ids, joined by spaces."""
    assert token_texts([5, 12, 1], None) == ("5", " 12", "</s>")
    assert token_texts([], None) == ()
    growing = GrowingText(None)
    assert [growing.add(token) for token in (5, 12, 1)] == ["5", " 12", ""]
    assert growing.end() == ""
