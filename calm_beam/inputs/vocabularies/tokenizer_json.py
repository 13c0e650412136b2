"""`tokenizer.json` of Hugging Face's tokenizers: ids and texts equal those of transformers for its folder.

Other files of that folder matter too: special tokens, the beginning of a prompt, chat templates. transformers 4.57 and
5 read most of these files alike. If one version cannot read a folder, the other is followed; if both can and give
different ids, the folder is refused, and the message names both versions.
Source: transformers `tokenization_utils_base.py` (`_from_pretrained`), `tokenization_utils_fast.py` (version 4.57) and
`tokenization_utils_tokenizers.py` (version 5).
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from calm_beam.extras import imported
from calm_beam.storage import is_file, joined, open_input, parent, strict_json

from . import VocabularyError, VocabularyModel

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_ADDED = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
_MODEL_CONFIG = "config.json"
# Files of a tokenizer; the first is the tokenizer itself.
TOKENIZER_FILES = (TOKENIZER, CONFIG, _SPECIAL, _ADDED, TEMPLATE)

# Names of special tokens, under which templates see them.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Lists of special tokens without a name: of version 4, and of version 5.
_ADDITIONAL, _EXTRA = "additional_special_tokens", "extra_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MOST_BYTES = 64 << 20

# Version 4's class for these types of models if no tokenizer_class is named.
_CLASSES = {"llama": "LlamaTokenizer", "mistral": "LlamaTokenizer", "gemma": "GemmaTokenizer"}

Token = Mapping[str, Any]
"""The text of a token as `content`, and its flags."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The content of the files next to a tokenizer.

    Attributes:
      special_tokens: Texts of special tokens by their names.
      added_tokens: Tokens by id.
      is_whole: Whether `added_tokens` is complete, as newer versions save it.
      named_tokens: All special tokens, in the order in which missing ones are added.
      parted_tokens: Special tokens that only one version adds, by the reason as text.
      adds_bos: Value of `add_bos_token`; None if missing.
      adds_eos: Value of `add_eos_token`; None if missing.
      tokenizer_class: Name of transformers' class, without `Fast`; None if unknown.
      splits_special: Whether special tokens in a text are split like any text.
      cleans_up: Whether spaces before punctuation are removed from texts.
      chat_template: The chat template; None if there is none.
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
    """Returns the content of the files next to a tokenizer, local or on Cloud Storage.

    Raises:
      VocabularyError: If a file cannot be read, or has an unsupported value.
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
    # With it, the config names all tokens, and the older files in the folder do not count.
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
      tokens: The tokens to add, in their order.
      in_config: The tokens in `tokenizer_config.json`.
      only_map: The tokens that only `special_tokens_map.json` has in version 4's list.
      beside_config: The same, if the config has that list, too.
      in_both_forms: The tokens of version 4's list if there is version 5's, too.
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
        # Version 4 cannot read lists under version 5's key, so there is no difference between versions.
        in_both_forms=additional if extra and not is_listed else (),
    )


def _listed(path: str, fields: Mapping[str, Any], key: str) -> tuple[Token, ...]:
    """Returns the special tokens of a list, or of version 5's object, in which each has its own name."""
    value = fields.get(key)
    if value is None:
        return ()
    tokens = list(value.values()) if isinstance(value, dict) and key == _EXTRA else value
    if not isinstance(tokens, list):
        raise VocabularyError(f"{path}: {key} must be a list of tokens, got {str(value)[:80]}.")
    return tuple(_token(path, key, value=token) for token in tokens)


def _older_added_tokens(path: str, *, specials: set[str]) -> dict[int, Token]:
    """Returns the added tokens of older files, which have ids by texts."""
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
    """Returns, by reason, tokens that the versions treat differently unless the tokenizer itself has them."""
    own = [key for key in said if key.endswith("_token") and key not in NAMES and isinstance(said[key], (str, dict))]
    found = {
        f"{' and '.join(own)} {'is a name' if len(own) == 1 else 'are names'} of its own, of which version 5 makes "
        "special tokens and version 4.57 does not": tuple(
            _token(folder, key, value=said[key])["content"] for key in own
        ),
        f"they are in {_ADDITIONAL}, of which version 5 takes nothing where there is {_EXTRA}": _texts(
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
    """Returns the tokenizer class that transformers takes, as far as the files name it."""
    name = config.get("tokenizer_class")
    if name is None:
        model = _read_json(joined(folder, _MODEL_CONFIG))
        kind = model.get("model_type")
        name = model.get("tokenizer_class") or (_CLASSES.get(kind) if isinstance(kind, str) else None)
    if name is not None and not isinstance(name, str):
        raise VocabularyError(f"{path}: tokenizer_class must be the name of a class, got {str(name)[:80]}.")
    return None if name is None else name.removesuffix("Fast")


def _chat_template(path: str, config_path: str, config: Mapping[str, Any]) -> str | None:
    """Returns the chat template from its own file, or from the config, where it may be the default of several."""
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
      VocabularyError: If it cannot be read, is not UTF-8, or is too large for such a file.
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
    """Returns the object in a file; empty if there is no file."""
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


# At least one of these texts has a token in any vocabulary.
_PROBES = ("a", "1", ".", "я", "的")
# transformers removes the space before each of these, in this order.
_CLEAN_UPS = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_SPACE = "▁"
# Classes for which transformers 4.57 follows add_bos_token and add_eos_token, with the default of the first. For other
# classes, and in version 5 for all, tokenizer.json counts.
_ADDS_BOS = {
    "LlamaTokenizer": True,
    "CodeLlamaTokenizer": True,
    "GemmaTokenizer": True,
    "CohereTokenizer": True,
    "GPTNeoXTokenizer": False,
}


class TokenizerModel(VocabularyModel):
    """A tokenizer of any kind (byte-level BPE, BPE or unigrams of SentencePiece, WordPiece) with its special tokens."""

    def __init__(self, path: str, content: bytes) -> None:
        """Loads a tokenizer and the files next to it.

        Args:
          path: Path of the file.
          content: Its content.

        Raises:
          VocabularyError: If it is not a tokenizer, or a file next to it contradicts it or cannot be read.
          MissingExtraError: If the package that reads it is not installed.
        """
        tokenizers = imported("tokenizers", extra="tokenizers", needed_for=f"vocabulary {path}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        # The library raises bare exceptions for anything it cannot parse.
        except Exception as error:
            raise VocabularyError(
                f"vocabulary {path}: cannot be read as a tokenizer of Hugging Face's: {str(error)[:200]}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        files = read_tokenizer_files(path)
        _add_tokens(path, self._tokenizer, tokenizers.AddedToken, files=files)
        self._tokenizer.encode_special_tokens = files.splits_special
        self.begins, self.ends = self._around(path, files)
        eos = files.special_tokens.get("eos_token")
        end = None if eos is None else self._tokenizer.token_to_id(eos)
        self.end_ids = () if end is None else (end,)
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        # transformers does not clean up after BPE, where a space before punctuation is part of the text.
        self._cleans_up = files.cleans_up and type(self._tokenizer.model).__name__ != "BPE"
        digest = hashlib.sha256(content)
        digest.update(json.dumps(_relevant(files), sort_keys=True).encode())
        self.fingerprint = digest.hexdigest()

    def has_sentinels(self) -> bool:
        """Returns whether `<extra_id_0>` is one of the tokens."""
        return self._tokenizer.token_to_id("<extra_id_0>") is not None

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; special tokens in it are recognized."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, index: int) -> str:
        """Returns the text of an id, with ▁ for a space; "" if the tokenizer does not have it."""
        token: str | None = self._tokenizer.id_to_token(index) if 0 <= index < self.size else None
        if token is None or token.startswith(_SPACE):
            return token or ""
        decoder = self._tokenizer.decoder
        text: str = token if decoder is None else decoder.decode([token])
        return text.replace(" ", _SPACE)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, leaving out special tokens and ids that the tokenizer does not have."""
        known = [int(index) for index in ids if 0 <= index < self.size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=True)
        if self._cleans_up:
            for found in _CLEAN_UPS:
                text = text.replace(found, found.strip())
        return text

    def _around(self, path: str, files: TokenizerFiles) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ids before and after every prompt, according to the tokenizer itself.

        Raises:
          VocabularyError: If versions 4.57 and 5 of transformers add different ids.
        """
        kind = files.tokenizer_class or ""
        default = _ADDS_BOS.get(kind)
        own = self._around_by_itself(path)
        if default is None:
            return own
        # Version 5 rebuilds these, whatever the file says.
        if kind == "GPTNeoXTokenizer":
            own = ((), ())
        elif kind == "CodeLlamaTokenizer" and self._tokenizer.post_processor is None:
            own = (self._named(files, "bos_token") or (), ())
        adds_bos = default if files.adds_bos is None else files.adds_bos
        names = {"bos_token": adds_bos, "eos_token": bool(files.adds_eos)}
        older = tuple(self._named(files, name) if is_added else () for name, is_added in names.items())
        if None in older or older == own:
            # Version 4.57 ignores the flags if such a token has no name.
            return own
        flags = ", ".join(
            f"{key} {'left out' if flag is None else str(flag).lower()}"
            for key, flag in (("add_bos_token", files.adds_bos), ("add_eos_token", files.adds_eos))
        )
        raise VocabularyError(
            f"vocabulary {path}: transformers 4.57 puts {_shown(older)} before and behind a prompt, as "
            f"{kind} with {flags} says; transformers 5 puts {_shown(own)}. To go by tokenizer.json in both, set "
            "tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json; to go by 4.57, load the folder with "
            "it and save it, which writes tokenizer.json again, and set the same."
        )

    def _named(self, files: TokenizerFiles, name: str) -> tuple[int, ...] | None:
        """Returns the id of a special token; None if no token has the name."""
        text = files.special_tokens.get(name)
        index = None if text is None else self._tokenizer.token_to_id(text)
        return None if index is None else (index,)

    def _around_by_itself(self, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        for probe in _PROBES:
            bare = self.encode(probe)
            if not bare:
                continue
            encoding = self._tokenizer.encode(probe, add_special_tokens=True)
            ids, mask = encoding.ids, encoding.special_tokens_mask
            start = next((place for place, is_special in enumerate(mask) if not is_special), 0)
            if ids[start : start + len(bare)] != bare:
                break
            return tuple(ids[:start]), tuple(ids[start + len(bare) :])
        raise VocabularyError(
            f"vocabulary {path}: what it puts before and behind a text is not understood. Expected a post_processor in "
            "tokenizer.json that puts the same ids around every text."
        )


def _relevant(files: TokenizerFiles) -> dict[str, Any]:
    """Returns what else decides ids and texts; defaults are omitted, so that old fingerprints stay valid."""
    relevant: dict[str, Any] = {
        "special_tokens": files.special_tokens,
        "added_tokens": files.added_tokens,
        "adds_bos": files.adds_bos,
        "adds_eos": files.adds_eos,
        "cleans_up": files.cleans_up,
        "chat_template": None,
    }
    named = set(files.special_tokens.values())
    if others := [token for token in files.named_tokens if token["content"] not in named or _has_flags(token)]:
        relevant["named_tokens"] = others
    if files.splits_special:
        relevant["splits_special"] = True
    return relevant


def _has_flags(token: Mapping[str, Any]) -> bool:
    return any(token[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized"))


def _shown(around: Any) -> str:
    """Returns the ids before and after a prompt for a message.

    >>> _shown(((1,), ()))
    '[1] and none'
    """
    return " and ".join(str(list(ids)) if ids else "none" for ids in around)


def _add_tokens(path: str, tokenizer: Any, added_token: Any, *, files: TokenizerFiles) -> None:
    """Adds the tokens, and the flags of tokens, that only the files next to a tokenizer name.

    Raises:
      VocabularyError: If they give a token another id than the tokenizer does, or name one that not every version of
        transformers adds.
    """
    known = tokenizer.get_added_tokens_decoder()
    for index, fields in sorted(files.added_tokens.items()):
        token = added_token(**fields)
        # For a token that older files name, the tokenizer has the flags.
        if index in known and known[index].content == fields["content"] and not files.is_whole:
            continue
        if repr(known.get(index)) != repr(token):
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(fields["content"]) != index:
            raise VocabularyError(
                f"vocabulary {path}: a file next to it gives {fields['content']!r} the id {index}, here it has "
                f"{tokenizer.token_to_id(fields['content'])}. The files are of different models."
            )
    texts = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for reason, parted in files.parted_tokens.items():
        if missing := [text for text in parted if text not in texts or text in _by_older_files(files, known)]:
            raise VocabularyError(
                f"vocabulary {path}: transformers 4.57 and 5 treat {', '.join(map(repr, missing[:4]))} differently: "
                f"{reason}. Save the tokenizer again with the version that the model was trained with, so that "
                "tokenizer.json has them."
            )
    for fields in files.named_tokens:
        if fields["content"] not in texts:
            tokenizer.add_tokens([added_token(**fields)])
            texts.add(fields["content"])


def _by_older_files(files: TokenizerFiles, known: Any) -> set[str]:
    """Returns the texts of tokens in older files that the tokenizer itself does not have."""
    own = {token.content for token in known.values()}
    return {fields["content"] for fields in files.added_tokens.values()} - own
