"""Vocabularies against plain SentencePiece, and T5's conventions."""

import hashlib
import pathlib

import pytest
import sentencepiece

from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, PAD_ID, UNK_ID, Vocabulary, VocabularyError
from tests.builders import train_vocabulary

_TEXTS = ("the cat sat on the mat", "  two  spaces ", "", "Ünknown §", "a", "fieldfieldfield")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Gives the file of a tiny vocabulary."""
    return train_vocabulary(tmp_path_factory.mktemp("vocabulary") / "sentencepiece.model")


@pytest.mark.parametrize("text", _TEXTS)
def test_ids_are_those_of_plain_sentencepiece(path: pathlib.Path, text: str) -> None:
    """Encoding and decoding equal SentencePiece's own, also after sentinels were added."""
    plain = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for extra_ids in (0, 5):
        vocabulary = Vocabulary(path, extra_ids=extra_ids)
        assert vocabulary.encode(text) == plain.encode(text)
        assert vocabulary.decode(plain.encode(text)) == plain.decode(plain.encode(text))


def test_encoding_adds_no_eos(path: pathlib.Path) -> None:
    """Ids of a text have no special ones."""
    assert not set(Vocabulary(path).encode(_TEXTS[0])) & {PAD_ID, EOS_ID}


def test_text_comes_back(path: pathlib.Path) -> None:
    """A text of known characters is decoded to itself."""
    vocabulary = Vocabulary(path)
    assert vocabulary.decode(vocabulary.encode(_TEXTS[0])) == _TEXTS[0]


def test_decoding_stops_at_the_first_eos(path: pathlib.Path) -> None:
    """Tokens after eos are not read; without eos, all are."""
    vocabulary = Vocabulary(path)
    cat, dog = vocabulary.encode("the cat"), vocabulary.encode("the dog")
    assert vocabulary.decode([*cat, EOS_ID, *dog, EOS_ID]) == "the cat"
    assert vocabulary.decode([*cat, *dog]) == "the cat the dog"
    assert vocabulary.decode([EOS_ID, *cat]) == ""
    assert vocabulary.decode([]) == ""


def test_pieces_are_those_of_plain_sentencepiece(path: pathlib.Path) -> None:
    """A piece has ▁ in place of a space, all pieces of a text make the text, and unknown ids have the unknown piece."""
    vocabulary = Vocabulary(path, extra_ids=2)
    assert "".join(map(vocabulary.piece, vocabulary.encode("the cat sat"))) == "▁the▁cat▁sat"
    assert vocabulary.piece(vocabulary.size - 1) == "▁<extra_id_0>"
    assert {vocabulary.piece(index) for index in (UNK_ID, vocabulary.size, -1)} == {"<unk>"}


@pytest.mark.parametrize("index", [48, 49, 10**6, -1])
def test_ids_beyond_the_vocabulary_read_as_unknown(path: pathlib.Path, index: int) -> None:
    """An id that only a padded output head has reads as unknown."""
    vocabulary = Vocabulary(path)
    assert vocabulary.size == 48
    cat = vocabulary.encode("cat")
    assert vocabulary.decode([*cat, index]) == vocabulary.decode([*cat, UNK_ID])


def test_sentinels_are_numbered_downwards(path: pathlib.Path) -> None:
    """`<extra_id_0>` has the highest id, the last sentinel the lowest, right after the pieces."""
    vocabulary = Vocabulary(path, extra_ids=3)
    assert vocabulary.size == 51
    assert [vocabulary.encode(f"<extra_id_{index}>") for index in range(3)] == [[50], [49], [48]]
    assert [vocabulary.decode([index]) for index in (50, 49, 48)] == ["<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]


def test_sentinels_are_found_in_text(path: pathlib.Path) -> None:
    """A sentinel between words is one id; without extra ids it is spelt out."""
    vocabulary = Vocabulary(path, extra_ids=3)
    ids = vocabulary.encode("the <extra_id_1> sat")
    assert ids == [*vocabulary.encode("the"), 49, *vocabulary.encode("sat")]
    assert vocabulary.decode(ids) == "the <extra_id_1> sat"
    assert len(Vocabulary(path).encode("<extra_id_1>")) > 1


def test_the_fingerprint_is_the_files(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The fingerprint is the SHA-256 of the file's bytes, in any place."""
    copied = tmp_path / "copy.model"
    copied.write_bytes(path.read_bytes())
    expected = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert Vocabulary(path).fingerprint == Vocabulary(copied).fingerprint == expected


def test_other_special_ids_are_refused(tmp_path: pathlib.Path) -> None:
    """SentencePiece's own numbers are refused with the ids found and the training options."""
    path = train_vocabulary(tmp_path / "other.model", pad_id=-1, unk_id=0, bos_id=1, eos_id=2)
    message = (
        r"other\.model: ids of pad, eos and unknown are \(-1, 2, 0\), T5 needs 0, 1 and a third\. Train it with --pad"
    )
    with pytest.raises(VocabularyError, match=message):
        Vocabulary(path)


@pytest.mark.parametrize("extra_ids", [0, 3])
@pytest.mark.parametrize("content", [b"", b"this is no vocabulary", b"\xff" * 100], ids=["empty", "text", "bytes"])
def test_garbage_is_refused(tmp_path: pathlib.Path, content: bytes, extra_ids: int) -> None:
    """A file that is not a SentencePiece model is refused by name, with and without sentinels."""
    path = tmp_path / "garbage.model"
    path.write_bytes(content)
    with pytest.raises(VocabularyError, match=r"vocabulary .*garbage\.model: "):
        Vocabulary(path, extra_ids=extra_ids)


def test_a_truncated_file_is_refused(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A file that was copied in part is refused."""
    half = tmp_path / "half.model"
    half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(VocabularyError, match=r"half\.model: cannot be read as a SentencePiece model"):
        Vocabulary(half)


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    """A missing file is refused by name."""
    with pytest.raises(VocabularyError, match=r"nowhere\.model: cannot be read.*No such file"):
        Vocabulary(tmp_path / "nowhere.model")


def test_a_negative_number_of_sentinels_is_refused(path: pathlib.Path) -> None:
    """The number of sentinels must be at least 0."""
    with pytest.raises(ValueError, match="extra_ids must be from 0 to 100000, got -1"):
        Vocabulary(path, extra_ids=-1)
