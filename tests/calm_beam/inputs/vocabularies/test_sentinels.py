"""The number of sentinels in a tokenizer's files."""

import json
import pathlib
from typing import Any

import pytest

from calm_beam.inputs.vocabularies.sentence_piece import SentinelsError, extra_ids_beside, write_extra_ids
from calm_beam.inputs.vocabularies.vocabulary import VocabularyError, open_vocabulary
from tests.builders import train_vocabulary

_NAMES = [f"<extra_id_{index}>" for index in range(3)]
_DECODER = {str(50 - index): {"content": name, "special": True} for index, name in enumerate(_NAMES)}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tokenizer_config.json", {"extra_ids": 3, "tokenizer_class": "T5Tokenizer"}),
        ("tokenizer_config.json", {"extra_ids": 3, "additional_special_tokens": _NAMES}),
        ("tokenizer_config.json", {"added_tokens_decoder": {**_DECODER, "0": {"content": "<pad>"}}}),
        ("tokenizer_config.json", {"extra_special_tokens": [{"content": name} for name in _NAMES]}),
        ("added_tokens.json", {name: 99 - index for index, name in enumerate(_NAMES)}),
        ("special_tokens_map.json", {"additional_special_tokens": [*_NAMES, "<other>"], "eos_token": "</s>"}),
    ],
)
def test_sentinels_are_counted(tmp_path: pathlib.Path, name: str, fields: dict[str, Any]) -> None:
    """Sentinels are counted from any file of transformers, given as a number or one by one."""
    (tmp_path / name).write_text(json.dumps(fields))
    assert extra_ids_beside(tmp_path / "spiece.model") == 3


def test_without_files_there_are_none(tmp_path: pathlib.Path) -> None:
    """A vocabulary alone, or with a tokenizer's file that does not name any, has no sentinels."""
    assert extra_ids_beside(tmp_path / "spiece.model") == 0
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30, "extra_ids": "100"}')
    assert extra_ids_beside(tmp_path / "spiece.model") == 0


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"extra_ids": 3, "extra_ids": 4}',
        "nothing",
        json.dumps({"extra_ids": 5, "additional_special_tokens": _NAMES}),
        json.dumps({"additional_special_tokens": ["<extra_id_0>", "<extra_id_7>"]}),
        json.dumps({"added_tokens_decoder": {str(50 + i): {"content": name} for i, name in enumerate(_NAMES)}}),
    ],
    ids=["nested", "repeated", "text", "another number", "gaps", "upwards"],
)
def test_other_sentinels_are_refused(tmp_path: pathlib.Path, content: str) -> None:
    """A damaged file, or sentinels that are not T5's, are refused by the file's name: their ids would differ."""
    path = tmp_path / "tokenizer_config.json"
    path.write_text(content)
    with pytest.raises(SentinelsError, match=str(path)):
        extra_ids_beside(tmp_path / "spiece.model")


def test_a_vocabulary_has_its_sentinels(tmp_path: pathlib.Path) -> None:
    """Opened without a number, a vocabulary gets the sentinels of the files next to it, unless it has its own."""
    vocabulary = train_vocabulary(tmp_path / "spiece.model")
    assert open_vocabulary(vocabulary).extra_ids == 0
    write_extra_ids(tmp_path, 3)
    opened = open_vocabulary(vocabulary)
    assert (opened.extra_ids, opened.size) == (3, 51)
    assert opened.encode("<extra_id_0>") == [50]
    assert open_vocabulary(vocabulary, extra_ids=0).size == 48
    train_vocabulary(vocabulary, user_defined_symbols=_NAMES)
    assert open_vocabulary(vocabulary).extra_ids == 0
    write_extra_ids(tmp_path, 0)
    assert not (tmp_path / "tokenizer_config.json").exists()


def test_an_absurd_number_in_a_file_is_refused(tmp_path: pathlib.Path) -> None:
    """A file that names a billion sentinels, by one name or as a number, is refused before any is counted."""
    vocabulary = train_vocabulary(tmp_path / "spiece.model")
    for fields in ({"extra_ids": 10**9}, {"extra_ids": 10**9, "additional_special_tokens": _NAMES[:1]}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
        with pytest.raises(VocabularyError, match=r"extra_ids must be from 0 to 100000|not as T5 does"):
            open_vocabulary(vocabulary)


@pytest.mark.parametrize("extra_ids", [-1, 100_001, 1_000_000_000])
def test_absurd_numbers_of_sentinels_are_refused(tmp_path: pathlib.Path, extra_ids: int) -> None:
    """An impossible number of sentinels is refused before pieces are made."""
    with pytest.raises(VocabularyError, match=f"extra_ids must be from 0 to 100000, got {extra_ids}"):
        open_vocabulary(train_vocabulary(tmp_path / "spiece.model"), extra_ids=extra_ids)
