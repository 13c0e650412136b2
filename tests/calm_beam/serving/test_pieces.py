"""The parts of an output's text."""

import pathlib

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.serving import token_texts
from calm_beam.vocabulary import Vocabulary
from tests.pipelines import text_rows, write_vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """A small vocabulary with sentinels."""
    return Vocabulary(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "v.model"), extra_ids=2)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokens=st.lists(st.integers(2, 45), max_size=8), is_ended=st.booleans())
def test_together_they_are_the_text(vocabulary: Vocabulary, tokens: list[int], is_ended: bool) -> None:
    """Every token has a text of its own, and together, but for the end, they are that of the output."""
    texts = token_texts([*tokens, 1] if is_ended else tokens, vocabulary)
    assert len(texts) == len(tokens) + is_ended
    assert "".join(texts[: len(tokens)]) == vocabulary.decode(tokens)
    assert texts[len(tokens) :] == (("</s>",) if is_ended else ())


def test_words_are_cut_where_tokens_are(vocabulary: Vocabulary) -> None:
    """A text that is encoded gives the pieces it is made of, with the space before a word."""
    tokens = vocabulary.encode("the cat sees")
    assert [text for text in token_texts(tokens, vocabulary) if text.startswith(" ")]
    assert len(token_texts(tokens, vocabulary)) == len(tokens)


def test_a_letter_of_several_tokens_has_its_text_at_the_last(tmp_path: pathlib.Path) -> None:
    """With byte fallback, a letter that no piece has is spelt in bytes, of which the last completes it."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(row["input"] for row in text_rows(60)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "bytes"),
        vocab_size=300,
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    vocabulary = Vocabulary(tmp_path / "bytes.model")
    tokens = vocabulary.encode("the €")
    assert vocabulary.decode(tokens) == "the €"
    texts = token_texts(tokens, vocabulary)
    assert "".join(texts) == "the €"
    assert texts[-3:] == ("", "", "€")


def test_token_ids_are_their_own_text() -> None:
    """Without a vocabulary, the text is the ids, joined by spaces."""
    assert token_texts([5, 12, 1], None) == ("5", " 12", "</s>")
    assert token_texts([], None) == ()
