"""What lies beside a `tokenizer.json` and changes what it does: special tokens, what begins a prompt, chat templates.

Versions 4.57 and 5 of transformers read these files alike in most cases. Where one of them cannot read a folder, the
other is followed; where both can and give other ids, the folder is refused, and the message names both.
Source: transformers `tokenization_utils_base.py` (`_from_pretrained`), `tokenization_utils_fast.py` (version 4.57) and
`tokenization_utils_tokenizers.py` (version 5).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from calm_beam.storage import is_file, joined, open_input, parent, strict_json

from .model import VocabularyError

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_ADDED = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
_MODEL_CONFIG = "config.json"
# Files that belong to a tokenizer; the first is the tokenizer itself.
TOKENIZER_FILES = (TOKENIZER, CONFIG, _SPECIAL, _ADDED, TEMPLATE)

# Special tokens that have a name; templates see them by it.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Lists of special tokens without a name: version 4's, and version 5's.
_ADDITIONAL, _EXTRA = "additional_special_tokens", "extra_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MOST_BYTES = 64 << 20

# Classes that version 4 takes for these types of models if no tokenizer_class is named.
_CLASSES = {"llama": "LlamaTokenizer", "mistral": "LlamaTokenizer", "gemma": "GemmaTokenizer"}

Token = Mapping[str, Any]
"""The text of a token as `content`, and its flags."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What the files beside a tokenizer say.

    Attributes:
      special_tokens: Texts of special tokens by their names.
      added_tokens: Tokens by id.
      is_whole: Whether these are all that there are, as newer versions save them.
      named_tokens: All special tokens, in the order in which those that are not yet there are added.
      parted_tokens: Special tokens that only one version adds, by the reason, in words.
      adds_bos: What `add_bos_token` says; None if it is not there.
      adds_eos: What `add_eos_token` says; in the same way.
      tokenizer_class: What transformers' class is called, without `Fast`; None if nobody says so.
      splits_special: Whether special tokens in a text are split as any text is.
      cleans_up: Whether spaces before punctuation are taken out of texts.
      chat_template: The template that makes prompts of chats; None if there is none.
    """

    special_tokens: Mapping[str, str]
    added_tokens: Mapping[int, Token]
    is_whole: bool
    named_tokens: tuple[Token, ...]
    parted_tokens: Mapping[str, tuple[str, ...]]
    adds_bos: bool | None
    adds_eos: bool | None
    tokenizer_class: str | None
    splits_special: bool
    cleans_up: bool
    chat_template: str | None


def read_tokenizer_files(tokenizer: str) -> TokenizerFiles:
    """Returns what lies beside a tokenizer, local or on Cloud Storage.

    Raises:
      VocabularyError: If a file cannot be read, or says something that is not understood.
    """
    folder = parent(tokenizer)
    path = joined(folder, CONFIG)
    config = _read_json(path)
    special_path = joined(folder, _SPECIAL)
    special = _read_json(special_path)
    added = config.get("added_tokens_decoder")
    if added is not None and (
        not isinstance(added, dict) or not all(index.isascii() and index.isdigit() for index in added)
    ):
        raise VocabularyError(f"{path}: added_tokens_decoder must have tokens by their ids.")
    # With it, the config names all tokens, and the older files beside it do not count.
    is_whole = added is not None
    if is_whole:
        special = {}
    said = {**config, **special}
    sources = {**dict.fromkeys(config, path), **dict.fromkeys(special, special_path)}
    named = {name: _token(sources[name], name, value=said[name]) for name in NAMES if said.get(name) is not None}
    lists = _lists(config, special, path=path, special_path=special_path)
    return TokenizerFiles(
        special_tokens={name: token["content"] for name, token in named.items()},
        added_tokens={int(index): _added_token(path, token) for index, token in added.items()}
        if added is not None
        else _older_added_tokens(joined(folder, _ADDED), specials={*_texts(named.values()), *_texts(lists.in_config)}),
        is_whole=is_whole,
        named_tokens=(*named.values(), *lists.tokens),
        parted_tokens=_parted(folder, said, lists=lists, is_whole=is_whole),
        adds_bos=_flag(path, config, "add_bos_token"),
        adds_eos=_flag(path, config, "add_eos_token"),
        tokenizer_class=_tokenizer_class(folder, path, config),
        splits_special=bool(_flag(path, config, "split_special_tokens")),
        cleans_up=bool(_flag(path, config, "clean_up_tokenization_spaces")),
        chat_template=_chat_template(joined(folder, TEMPLATE), path, config),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Lists:
    """Special tokens without one of the usual names.

    Attributes:
      tokens: Those that are added, in their order.
      in_config: Those that `tokenizer_config.json` names.
      only_map: Those that `special_tokens_map.json` alone names in version 4's list.
      beside_config: The same where the config has that list, too.
      in_both_forms: Those of version 4's list where there is version 5's, too.
    """

    tokens: tuple[Token, ...]
    in_config: tuple[Token, ...]
    only_map: tuple[Token, ...]
    beside_config: tuple[Token, ...]
    in_both_forms: tuple[Token, ...]


def _lists(config: Mapping[str, Any], special: Mapping[str, Any], *, path: str, special_path: str) -> _Lists:
    additional = _listed(path, config, _ADDITIONAL)
    extra = (*_listed(path, config, _EXTRA), *_listed(special_path, special, _EXTRA))
    is_listed = any(isinstance(fields.get(_EXTRA), list) for fields in (config, special))
    by_map = _listed(special_path, special, _ADDITIONAL)
    in_config = _texts(additional)
    only_map = tuple(token for token in by_map if token["content"] not in in_config)
    additional = (*additional, *only_map)
    return _Lists(
        tokens=extra or additional,
        in_config=(*extra, *(token for token in additional if token["content"] in in_config)),
        only_map=only_map,
        beside_config=() if config.get(_ADDITIONAL) is None else only_map,
        # Lists in version 5's key are none that version 4 can read, so that there is nothing to differ from.
        in_both_forms=additional if extra and not is_listed else (),
    )


def _listed(path: str, fields: Mapping[str, Any], key: str) -> tuple[Token, ...]:
    """Returns the special tokens of a list, or of version 5's object, in which each has a name of its own."""
    value = fields.get(key)
    if value is None:
        return ()
    tokens = list(value.values()) if isinstance(value, dict) and key == _EXTRA else value
    if not isinstance(tokens, list):
        raise VocabularyError(f"{path}: {key} must be a list of tokens, got {str(value)[:80]}.")
    return tuple(_token(path, key, value=token) for token in tokens)


def _older_added_tokens(path: str, *, specials: set[str]) -> dict[int, Token]:
    """Returns what older versions saved of added tokens: their ids by their texts."""
    added = _read_json(path)
    if not all(type(index) is int and index >= 0 for index in added.values()):
        raise VocabularyError(f"{path}: must have ids by the texts of tokens, got {str(added)[:80]}.")
    tokens: dict[int, Token] = {}
    for text, index in added.items():
        if index in tokens:
            raise VocabularyError(f"{path}: gives {tokens[index]['content']!r} and {text!r} the same id {index}.")
        is_special = text in specials
        flags = {**dict.fromkeys(_FLAGS, False), "normalized": not is_special, "special": is_special}
        tokens[index] = {"content": text, **flags}
    return tokens


def _parted(folder: str, said: Mapping[str, Any], *, lists: _Lists, is_whole: bool) -> Mapping[str, tuple[str, ...]]:
    """Returns tokens that the versions do not treat alike if the tokenizer itself does not have them, by reasons."""
    own = [key for key in said if key.endswith("_token") and key not in NAMES and isinstance(said[key], (str, dict))]
    found = {
        f"{' and '.join(own)} {'is a name' if len(own) == 1 else 'are names'} of its own, of which version 5 makes "
        "special tokens and version 4.57 does not": tuple(
            _token(folder, key, value=said[key])["content"] for key in own
        ),
        f"they stand in {_ADDITIONAL}, of which version 5 takes nothing where there is {_EXTRA}": _texts(
            lists.in_both_forms
        ),
        f"{_SPECIAL} adds to the {_ADDITIONAL} of {CONFIG}, which version 5 does not read": _texts(lists.beside_config),
    }
    if not is_whole:
        older = _read_json(joined(folder, _ADDED))
        found[f"{_ADDED} names them, and {_SPECIAL} says that they are special, which version 5 does not see"] = tuple(
            text for text in _texts(lists.only_map) if text in older
        )
    return {reason: texts for reason, texts in found.items() if texts}


def _texts(tokens: Any) -> tuple[str, ...]:
    return tuple(token["content"] for token in tokens)


def _tokenizer_class(folder: str, path: str, config: Mapping[str, Any]) -> str | None:
    """Returns the class of the tokenizer that transformers takes, as far as the files say it."""
    name = config.get("tokenizer_class")
    if name is None:
        model = _read_json(joined(folder, _MODEL_CONFIG))
        kind = model.get("model_type")
        name = model.get("tokenizer_class") or (_CLASSES.get(kind) if isinstance(kind, str) else None)
    if name is not None and not isinstance(name, str):
        raise VocabularyError(f"{path}: tokenizer_class must be the name of a class, got {str(name)[:80]}.")
    return None if name is None else name.removesuffix("Fast")


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


def _token(path: str, name: str, *, value: object) -> Token:
    """Returns a special token, of either form."""
    text = value.get("content") if isinstance(value, dict) else value
    flags = {**dict.fromkeys(_FLAGS, False), "special": True}
    if isinstance(value, dict):
        flags |= {key: value.get(key, False) for key in _FLAGS if key != "special"}
    if not isinstance(text, str) or not all(type(flag) is bool for flag in flags.values()):
        raise VocabularyError(f"{path}: {name} must be the text of a token, got {str(value)[:80]}.")
    return {"content": text, **flags}


def _added_token(path: str, token: object) -> Token:
    flags = {key: token.get(key, False) for key in _FLAGS} if isinstance(token, dict) else {}
    text = token.get("content") if isinstance(token, dict) else None
    if not isinstance(text, str) or not all(type(flag) is bool for flag in flags.values()):
        raise VocabularyError(f"{path}: added_tokens_decoder has {str(token)[:80]}, expected a token and its flags.")
    return {"content": text, **flags}


def _flag(path: str, config: Mapping[str, Any], key: str) -> bool | None:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise VocabularyError(f"{path}: {key} must be true or false, got {str(value)[:80]}.")
    return value
