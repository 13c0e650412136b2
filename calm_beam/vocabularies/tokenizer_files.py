"""What lies beside a `tokenizer.json` and changes what it does: special tokens, what begins a prompt, chat templates.

Source: transformers `tokenization_utils_tokenizers.py` and `tokenization_utils_base.py`, version 5.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from calm_beam import strict_json
from calm_beam.storage import is_file, joined, open_input, parent

from .model import VocabularyError

TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
# Files that belong to a tokenizer; the first is the tokenizer itself.
TOKENIZER_FILES = (TOKENIZER, _CONFIG, _SPECIAL, _TEMPLATE)

# Special tokens that have a name; templates see them by it.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MOST_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What the files beside a tokenizer say.

    Attributes:
      special_tokens: Texts of special tokens by their names.
      added_tokens: Text and flags of tokens by id.
      adds_bos: Whether bos begins a prompt; None if nobody says so, and the tokenizer itself knows.
      adds_eos: Whether eos ends a prompt; in the same way.
      cleans_up: Whether spaces before punctuation are taken out of texts.
      chat_template: The template that makes prompts of chats; None if there is none.
    """

    special_tokens: Mapping[str, str]
    added_tokens: Mapping[int, Mapping[str, Any]]
    adds_bos: bool | None
    adds_eos: bool | None
    cleans_up: bool
    chat_template: str | None


def read_tokenizer_files(tokenizer: str) -> TokenizerFiles:
    """Returns what lies beside a tokenizer, local or on Cloud Storage.

    Raises:
      VocabularyError: If a file cannot be read, or says something that is not understood.
    """
    folder = parent(tokenizer)
    path = joined(folder, _CONFIG)
    config = _read_json(path)
    special = {**_read_json(joined(folder, _SPECIAL)), **config}
    texts = {name: _text(path, name, value=special[name]) for name in NAMES if special.get(name) is not None}
    added = config.get("added_tokens_decoder", {})
    if not isinstance(added, dict) or not all(index.isascii() and index.isdigit() for index in added):
        raise VocabularyError(f"{path}: added_tokens_decoder must have tokens by their ids.")
    return TokenizerFiles(
        special_tokens=texts,
        added_tokens={int(index): _added_token(path, token) for index, token in added.items()},
        adds_bos=_flag(path, config, "add_bos_token"),
        adds_eos=_flag(path, config, "add_eos_token"),
        cleans_up=bool(_flag(path, config, "clean_up_tokenization_spaces")),
        chat_template=_chat_template(joined(folder, _TEMPLATE), path, config),
    )


def _chat_template(path: str, config_path: str, config: Mapping[str, Any]) -> str | None:
    """Returns the template in a file of its own, or in the config, where it may be the default one of several."""
    if is_file(path):
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
        if template is None:
            raise VocabularyError(f"{config_path}: has chat templates {sorted(map(str, named))}, and no default one.")
    if template is not None and not isinstance(template, str):
        raise VocabularyError(f"{config_path}: chat_template must be text, got {type(template).__name__}.")
    return template


def read_text(path: str) -> str:
    """Returns a text file, local or on Cloud Storage.

    Raises:
      VocabularyError: If it cannot be read, is not UTF-8, or is far larger than such files are.
    """
    try:
        with open_input(path) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise VocabularyError(f"{path}: is larger than {_MOST_BYTES >> 20} MiB, which no such file is.")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VocabularyError(f"{path}: cannot be read: {error}") from error


def _read_json(path: str) -> dict[str, Any]:
    """Returns the object in a file; an empty one if there is no file."""
    if not is_file(path):
        return {}
    try:
        fields = strict_json.loads(read_text(path).encode(), constants_allowed=True)
    except strict_json.StrictJSONError as error:
        raise VocabularyError(f"{path}: cannot be read as JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise VocabularyError(f"{path}: expected a JSON object, got {type(fields).__name__}.")
    return fields


def _text(path: str, name: str, *, value: object) -> str:
    """Returns what a special token, of either form, stands for."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise VocabularyError(f"{path}: {name} must be the text of a token, got {str(value)[:80]}.")
    return text


def _added_token(path: str, token: object) -> Mapping[str, Any]:
    flags = {key: token.get(key, False) for key in _FLAGS} if isinstance(token, dict) else {}
    if not isinstance(token, dict) or not all(type(flag) is bool for flag in flags.values()):
        raise VocabularyError(f"{path}: added_tokens_decoder has {str(token)[:80]}, expected a token and its flags.")
    return {"content": _text(path, "added_tokens_decoder", value=token), **flags}


def _flag(path: str, config: Mapping[str, Any], key: str) -> bool | None:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise VocabularyError(f"{path}: {key} must be true or false, got {str(value)[:80]}.")
    return value
