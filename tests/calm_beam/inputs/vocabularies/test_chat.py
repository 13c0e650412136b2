"""Chats rendered as by transformers, and forbidden operations of templates."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import pytest

from calm_beam.inputs.vocabularies.chat_templates import OWN_TEMPLATE, chat_of, check_turns, rendered
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, VocabularyError
from calm_beam.manifest import ChatRecord
from tests.builders import train_vocabulary
from tests.calm_beam.inputs.vocabularies.make_tokenizer_goldens import FOLDER

_FAMILIES = ("llama_3", "mistral", "qwen", "zephyr")


def _own_chat(family: str, system: str | None = None) -> ChatRecord:
    return chat_of(OWN_TEMPLATE, tokenizer=str(FOLDER / family / "tokenizer.json"), system=system)


@pytest.mark.parametrize("family", _FAMILIES)
def test_chats_are_those_of_transformers(family: str) -> None:
    """Text and ids of every chat are those of `apply_chat_template`, with a system prompt and without."""
    expected = json.loads((FOLDER / family / "expected.json").read_text(encoding="utf-8"))
    assert {chat["system"] for chat in expected["chats"]} == {None, "", "Answer in one word."}
    for case in expected["chats"]:
        chat = _own_chat(family, case["system"])
        assert rendered(chat, case["prompt"]) == case["text"]
        vocabulary = Vocabulary(FOLDER / family / "tokenizer.json", chat=chat)
        assert vocabulary.encode_prompt(case["prompt"], room=10_000) == (tuple(case["ids"]), len(case["ids"]))


def test_turns_before_a_text_are_in_its_prompt() -> None:
    """The template sees the system's message, earlier turns by user and assistant, and the text that is answered."""
    chat = _own_chat("mistral", "Be brief.")
    whole = "<s>[INST] Why? [/INST]So.</s>[INST] Be brief.\n\nAnd? [/INST]"
    assert rendered(chat, "And?", earlier=("Why?", "So.")) == whole
    vocabulary = Vocabulary(FOLDER / "mistral" / "tokenizer.json", chat=chat)
    ids, _ = vocabulary.encode_prompt("And?", room=100, earlier=("Why?", "So."))
    assert list(ids) == vocabulary.encode(whole)
    check_turns(chat)
    with pytest.raises(
        VocabularyError, match=r"leaves out the assistant's turns, .*: it made '<\|user\|>\\nfirst probe"
    ):
        check_turns(_own_chat("zephyr"))


def test_chats_are_not_cut() -> None:
    """Chats are not cut: without its end, an answer would not begin where the model expects it."""
    vocabulary = Vocabulary(FOLDER / "qwen" / "tokenizer.json", chat=_own_chat("qwen"))
    whole, length = vocabulary.encode_prompt("a river", room=10_000)
    assert vocabulary.encode_prompt("a river", room=3) == (whole, length)


def test_a_template_of_the_users_own(tmp_path: pathlib.Path) -> None:
    """A user's file may hold the template, which gets the special tokens of the tokenizer."""
    template = tmp_path / "mine.jinja"
    template.write_text("{{ bos_token }}{{ messages[-1].content | trim }}{{ eos_token }}{# nothing #}")
    chat = chat_of(str(template), tokenizer=str(FOLDER / "mistral" / "tokenizer.json"), system=None)
    with pytest.raises(VocabularyError, match="leaves out the user's text or the system's: it made '<s>probe</s>'"):
        chat_of(str(template), tokenizer=str(FOLDER / "mistral" / "tokenizer.json"), system="x")
    assert rendered(chat, " hello ") == "<s>hello</s>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content", "cannot be rendered: TemplateSyntaxError"),
        ("{{ raise_exception('no system here') }}", "cannot be rendered: TemplateError: no system here"),
        ("{{ messages.append(1) }}", "cannot be rendered: SecurityError"),
        ("{{ messages.__class__.__mro__ }}", "cannot be rendered: SecurityError"),
        ("{{ messages[7].content.strip() }}", "cannot be rendered: UndefinedError"),
        ("{{ 1 / 0 }}", "cannot be rendered: ZeroDivisionError"),
        ("{{ messages | random }}", "cannot be rendered: TemplateAssertionError: No filter named 'random'"),
        ("{{ lipsum() }}", "cannot be rendered: UndefinedError: 'lipsum' is undefined"),
        ("{% include 'other' %}", "cannot be rendered: TypeError"),
        ("{{ strftime_now('%d %b %Y') }}", "calls strftime_now, today's date: tomorrow's prompts would be others"),
        ("fixed", "leaves out the user's text or the system's: it made 'fixed'"),
    ],
)
def test_templates_that_cannot_be_rendered_are_refused(template: str, message: str, tmp_path: pathlib.Path) -> None:
    """Templates are foreign code: forbidden operations, and values that change daily, are errors."""
    path = tmp_path / "chat.jinja"
    path.write_text(template)
    with pytest.raises(VocabularyError, match=message):
        chat_of(str(path), tokenizer=str(FOLDER / "qwen" / "tokenizer.json"), system=None)


def test_a_template_may_ask_whether_there_is_a_date() -> None:
    """A template that uses a fixed date if there is no current one renders it, on every day."""
    date = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"
    template = date + " {{ messages[0].content }}"
    assert rendered(ChatRecord(template=template, tokens={}), "x") == "2024 x"


def test_json_is_written_as_transformers_does() -> None:
    """Characters of HTML and of other scripts are written unchanged, as by transformers."""
    chat = ChatRecord(template="{{ {'b': messages[0].content, 'a': 1} | tojson }}", tokens={})
    assert rendered(chat, "<é>") == '{"b": "<é>", "a": 1}'
    indented = dataclasses.replace(chat, template="{{ [messages[0].content] | tojson(indent=1) }}")
    assert rendered(indented, "x") == '[\n "x"\n]'


def test_a_vocabulary_without_a_template_is_told_so(tmp_path: pathlib.Path) -> None:
    """Without a template, the message says where one is looked for."""
    shutil.copyfile(FOLDER / "qwen" / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(VocabularyError, match=r"there is no chat template next to it, in tokenizer_config.json or"):
        chat_of(OWN_TEMPLATE, tokenizer=str(tmp_path / "tokenizer.json"), system=None)
    with pytest.raises(VocabularyError, match=r"none\.jinja: cannot be read"):
        chat_of(str(tmp_path / "none.jinja"), tokenizer=str(tmp_path / "tokenizer.json"), system=None)


def test_sentence_piece_models_have_no_chats(tmp_path: pathlib.Path) -> None:
    """T5's vocabularies have no special tokens for a template, so they have no chats."""
    path = train_vocabulary(tmp_path / "sentencepiece.model")
    with pytest.raises(VocabularyError, match=r"belong to a tokenizer\.json; vocabulary .* is a SentencePiece model"):
        chat_of(OWN_TEMPLATE, tokenizer=str(path), system=None)


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ([{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tools", "template": "t"}], None),
        ([{"name": "tools", "template": "t"}], r"has chat templates \['tools'\], and no default one"),
        (7, "chat_template must be text, got int"),
    ],
)
def test_the_default_of_several_templates_is_taken(templates: Any, message: str | None, tmp_path: pathlib.Path) -> None:
    """Of several templates, such as those for tools, the default is used."""
    shutil.copyfile(FOLDER / "qwen" / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    if message is None:
        chat = chat_of(OWN_TEMPLATE, tokenizer=str(tmp_path / "tokenizer.json"), system=None)
        assert rendered(chat, "x") == "x"
    else:
        with pytest.raises(VocabularyError, match=message):
            chat_of(OWN_TEMPLATE, tokenizer=str(tmp_path / "tokenizer.json"), system=None)
