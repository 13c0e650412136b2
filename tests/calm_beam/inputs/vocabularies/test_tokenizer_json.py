"""Tokenizers as in transformers, whose ids and texts `make_tokenizer_goldens.py` stored."""

import json
import pathlib
import shutil
import sys
from typing import Any

import pytest

from calm_beam.extras import MissingExtraError
from calm_beam.inputs.vocabularies.vocabulary import (
    Vocabulary,
    VocabularyError,
    missing_sentinels,
    open_vocabulary,
    reference_text,
)
from tests.calm_beam.inputs.vocabularies.make_tokenizer_goldens import FOLDER, ODD_TEXTS, TEXTS

_FAMILIES = ("llama_3", "mistral", "qwen", "zephyr")


def _expected(family: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / family / "expected.json").read_text(encoding="utf-8"))
    return content


def _copy(family: str, folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Copies a tokenizer, with fields of its config changed, or left out where they are None; returns its path."""
    shutil.copytree(FOLDER / family, folder, dirs_exist_ok=True)
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("family", _FAMILIES)
def test_prompts_are_those_of_transformers(family: str) -> None:
    """The ids of every text are those of transformers, with and without the tokens around it."""
    vocabulary, expected = open_vocabulary(FOLDER / family / "tokenizer.json"), _expected(family)
    for text, ids, bare in zip((*TEXTS, *ODD_TEXTS), expected["ids"], expected["bare_ids"], strict=True):
        assert vocabulary.encode_prompt(text, room=10_000) == (tuple(ids), len(ids))
        assert vocabulary.encode(text) == bare


@pytest.mark.parametrize("family", _FAMILIES)
def test_texts_are_those_of_transformers(family: str) -> None:
    """Ids are decoded to the texts of transformers without special tokens."""
    vocabulary, expected = open_vocabulary(FOLDER / family / "tokenizer.json"), _expected(family)
    assert [vocabulary.decode(ids) for ids in expected["ids"]] == expected["texts"]


def test_what_begins_and_ends_prompts() -> None:
    """Llama's prompts begin with a token, T5's end with one, Qwen's have neither."""
    around = {}
    for family in _FAMILIES:
        vocabulary = open_vocabulary(FOLDER / family / "tokenizer.json")
        ids, _ = vocabulary.encode_prompt("a", room=99)
        bare = vocabulary.encode("a")
        start = next(place for place in range(len(ids)) if list(ids[place : place + len(bare)]) == bare)
        around[family] = (start, len(ids) - start - len(bare))
    assert around == {"llama_3": (1, 0), "mistral": (1, 0), "qwen": (0, 0), "zephyr": (0, 1)}


def test_flags_of_the_config_do_not_count_for_most_classes(tmp_path: pathlib.Path) -> None:
    """Tokens around a prompt follow `tokenizer.json`, as in both versions of transformers, not flags of the config."""
    both = open_vocabulary(_copy("mistral", tmp_path / "both", add_eos_token=True))
    bare = both.encode("a river")
    assert both.encode_prompt("a river", room=99)[0] == (1, *bare)
    neither = open_vocabulary(_copy("mistral", tmp_path / "neither", add_bos_token=False))
    assert neither.encode_prompt("a river", room=99)[0] == (1, *bare)
    unsaid = open_vocabulary(_copy("mistral", tmp_path / "unsaid", add_bos_token=None, add_eos_token=None))
    assert unsaid.encode_prompt("a river", room=99)[0] == (1, *bare)


@pytest.mark.parametrize(("family", "kept"), [("llama_3", "begin"), ("zephyr", "end")])
def test_a_long_prompt_is_cut_between_what_surrounds_it(family: str, kept: str) -> None:
    """Of a long prompt the last ids of the text are cut, and the tokens around it stay."""
    vocabulary = open_vocabulary(FOLDER / family / "tokenizer.json")
    bare = vocabulary.encode(TEXTS[0])
    whole, length = vocabulary.encode_prompt(TEXTS[0], room=10_000)
    cut, same_length = vocabulary.encode_prompt(TEXTS[0], room=6)
    assert (len(cut), length, same_length) == (6, len(whole), len(whole))
    assert cut == ((whole[0], *bare[:5]) if kept == "begin" else (*bare[:5], whole[-1]))


def test_ids_it_does_not_have_are_no_text() -> None:
    """Ids beyond the vocabulary, as in padded output heads, have no text."""
    vocabulary = open_vocabulary(FOLDER / "qwen" / "tokenizer.json")
    ids = vocabulary.encode("the river")
    assert vocabulary.decode([*ids, vocabulary.size, 10**6, -1]) == "the river"
    assert vocabulary.piece(vocabulary.size) == ""


@pytest.mark.parametrize("family", _FAMILIES)
def test_pieces_show_spaces(family: str) -> None:
    """Pieces show spaces as ▁, however a tokenizer writes them, and letters unchanged."""
    vocabulary = open_vocabulary(FOLDER / family / "tokenizer.json")
    pieces = [vocabulary.piece(index) for index in vocabulary.encode("The river is cold.")]
    assert "".join(pieces).strip("▁") == "The▁river▁is▁cold."


def test_references_end_where_outputs_do() -> None:
    """Ids of a reference count up to any end-of-text token."""
    vocabulary = open_vocabulary(FOLDER / "llama_3" / "tokenizer.json")
    ids, end = vocabulary.encode("cold river"), vocabulary.end_ids[0]
    assert vocabulary.piece(end) == "<|eot_id|>"
    assert reference_text([*ids, end, *ids], vocabulary) == "cold river"


def test_sentinels_are_in_the_file(tmp_path: pathlib.Path) -> None:
    """A tokenizer holds its sentinels itself, so none are added to it."""
    path = _copy("zephyr", tmp_path, extra_ids=3)
    assert open_vocabulary(path).has_sentinels()
    assert missing_sentinels(path) == 0
    assert not open_vocabulary(FOLDER / "qwen" / "tokenizer.json").has_sentinels()
    with pytest.raises(VocabularyError, match=r"extra_ids is 3, but a tokenizer.json names its sentinels itself"):
        Vocabulary(path, extra_ids=3)


@pytest.mark.parametrize(
    "changes", [{"add_bos_token": False}, {"eos_token": "<unk>"}, {"clean_up_tokenization_spaces": True}]
)
def test_what_lies_beside_it_is_in_the_fingerprint(changes: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Two folders with one `tokenizer.json` and different ids or texts have different fingerprints."""
    plain = open_vocabulary(_copy("mistral", tmp_path / "plain"))
    assert open_vocabulary(_copy("mistral", tmp_path / "same", chat_template="x")).fingerprint == plain.fingerprint
    assert open_vocabulary(_copy("mistral", tmp_path / "other", **changes)).fingerprint != plain.fingerprint


def test_a_named_token_is_special_everywhere(tmp_path: pathlib.Path) -> None:
    """As in transformers, a token that the config names is found whole in texts, and left out of decoded ones."""
    vocabulary = open_vocabulary(_copy("mistral", tmp_path, pad_token="river"))
    ids = vocabulary.encode("the river is")
    assert [vocabulary.piece(index) for index in ids].count("river") == 1
    assert "river" not in vocabulary.decode(ids)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "cannot be read as a tokenizer of Hugging Face's"),
        ({"tokenizer.json": '{"model": {}}'}, "cannot be read as a tokenizer of Hugging Face's"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json: expected a JSON object, got list"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: cannot be read as JSON"),
        ({"tokenizer_config.json": '{"eos_token": 3}'}, "eos_token must be the text of a token, got 3"),
        ({"tokenizer_config.json": '{"add_bos_token": "yes"}'}, "add_bos_token must be true or false, got yes"),
        (
            {"tokenizer_config.json": '{"added_tokens_decoder": {"1": 2}}'},
            "added_tokens_decoder has 2, expected",
        ),
        ({"tokenizer_config.json": '{"added_tokens_decoder": [1]}'}, "must have tokens by their ids"),
        (
            {"tokenizer_config.json": '{"added_tokens_decoder": {"7": {"content": "</s>", "special": true}}}'},
            r"gives '</s>' the id 7, here it has 2\. The files are of different models",
        ),
        ({"special_tokens_map.json": "1"}, "special_tokens_map.json: expected a JSON object, got int"),
    ],
)
def test_damaged_files_are_refused(files: dict[str, str], message: str, tmp_path: pathlib.Path) -> None:
    """A damaged file is named with its error."""
    path = _copy("mistral", tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(VocabularyError, match=message):
        open_vocabulary(path)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the extra is not installed, the message says how to install it."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"json needs tokenizers .*pip install 'calm-beam\[tokenizers\]'"):
        open_vocabulary(FOLDER / "qwen" / "tokenizer.json")
