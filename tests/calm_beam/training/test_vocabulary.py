"""Vocabularies trained here follow T5's conventions."""

import pathlib
import re

import pytest
import sentencepiece

from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, VocabularyError
from calm_beam.training.new_model import train_vocabulary

_TEXTS = [f"the {noun} sees a {other}" for noun in ("cat", "dog", "owl") for other in ("mouse", "house", "bird")]


def test_conventions(tmp_path: pathlib.Path) -> None:
    """Pad is 0, eos 1, unknown 2, and there is no beginning-of-sentence."""
    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(train_vocabulary(_TEXTS, tmp_path / "v.model", vocab_size=28))
    )
    assert (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id()) == (0, 1, 2, -1)
    assert processor.get_piece_size() == 28


def test_texts_survive_a_round_trip(tmp_path: pathlib.Path) -> None:
    """Text in the training texts' characters is encoded and decoded without loss, rare characters included."""
    vocabulary = Vocabulary(train_vocabulary([*_TEXTS, "œuf"], tmp_path / "v.model", vocab_size=28))
    for text in ("the bird sees a cat", "œuf"):
        assert vocabulary.decode(vocabulary.encode(text)) == text


def test_training_is_deterministic(tmp_path: pathlib.Path) -> None:
    """The same texts give the same file under any name."""
    one, two = (train_vocabulary(_TEXTS, tmp_path / name, vocab_size=28) for name in ("one.model", "two.model"))
    assert one.read_bytes() == two.read_bytes()


def test_long_texts_are_used(tmp_path: pathlib.Path) -> None:
    """A text longer than SentencePiece's default limit is not skipped."""
    vocabulary = Vocabulary(train_vocabulary([*_TEXTS, "zq " * 3000], tmp_path / "v.model", vocab_size=28))
    assert vocabulary.decode(vocabulary.encode("zq")) == "zq"


def test_too_large_a_size_is_refused(tmp_path: pathlib.Path) -> None:
    """More ids than the texts can fill are an error that names the size."""
    with pytest.raises(VocabularyError, match="9 texts do not give one of vocab_size=9000"):
        train_vocabulary(_TEXTS, tmp_path / "v.model", vocab_size=9000)


def test_empty_texts_are_refused(tmp_path: pathlib.Path) -> None:
    """Texts without a character are an error."""
    with pytest.raises(VocabularyError, match="every text is empty"):
        train_vocabulary(["", " "], tmp_path / "v.model", vocab_size=28)


def test_a_tokenizer_has_an_end_of_prompts_and_one_of_outputs(tmp_path: pathlib.Path) -> None:
    """Ids 0 and 1 are the ends: prompts end with the former, outputs with the latter, and neither is in texts."""
    vocabulary = Vocabulary(train_vocabulary(_TEXTS, tmp_path / "tokenizer.json", vocab_size=270))
    ids, whole = vocabulary.encode_prompt("the owl sees", room=50)
    assert (ids[-1], ids.count(0), whole) == (0, 1, len(ids))
    assert vocabulary.end_ids == (1,)
    assert vocabulary.size == 270
    assert vocabulary.decode([*ids, 1]) == "the owl sees"
    assert vocabulary.encode_prompt("the owl sees", room=3)[0] == (*ids[:2], 0)


def test_a_tokenizer_has_ids_for_any_text(tmp_path: pathlib.Path) -> None:
    """Characters and spaces that no training text had are decoded unchanged."""
    vocabulary = Vocabulary(train_vocabulary(_TEXTS, tmp_path / "tokenizer.json", vocab_size=270))
    for text in ("the bird", " Ωμέγα\n\t  的  🦉 ", "x"):
        assert vocabulary.decode(vocabulary.encode(text)) == text


def test_the_same_texts_give_the_same_tokenizer(tmp_path: pathlib.Path) -> None:
    """The same texts give the same tokenizer and files next to it, byte for byte, since resumed runs make it again."""
    (tmp_path / "again").mkdir()
    one, two = (
        train_vocabulary(_TEXTS * 50, folder / "tokenizer.json", vocab_size=280)
        for folder in (tmp_path, tmp_path / "again")
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert one.with_name(name).read_bytes() == two.with_name(name).read_bytes()


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        (257, "vocab_size must be at least 258 (each byte has an id), got 257"),
        (9000, "9 texts do not give one of vocab_size=9000: they give 284 ids"),
    ],
)
def test_sizes_that_a_tokenizer_cannot_have_are_refused(vocab_size: int, message: str, tmp_path: pathlib.Path) -> None:
    """A size too small for all bytes, or larger than the texts allow, is refused."""
    with pytest.raises(VocabularyError, match=re.escape(message)):
        train_vocabulary(_TEXTS, tmp_path / "tokenizer.json", vocab_size=vocab_size)
    assert not (tmp_path / "tokenizer.json").exists()
