"""`tokenizer.json` of Hugging Face's tokenizers: ids and texts are those that transformers gives for its folder."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from calm_beam.extras import imported

from .model import VocabularyError, VocabularyModel
from .tokenizer_files import TokenizerFiles, read_tokenizer_files

# Texts of which at least one has a token in any vocabulary.
_PROBES = ("a", "1", ".", "я", "的")
# Around which transformers takes spaces out of texts, in this order.
_CLEAN_UPS = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_SPACE = "▁"
# Classes for which version 4.57 of transformers goes by add_bos_token and add_eos_token, and whether bos is added where
# the first is left out. For others, and in version 5 for all, what tokenizer.json says counts.
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
        """Loads a tokenizer, and what lies beside it.

        Args:
          path: Where it was read.
          content: The file.

        Raises:
          VocabularyError: If it is no tokenizer, or a file beside it contradicts it or cannot be read.
          MissingExtraError: If the package that reads it is not installed.
        """
        tokenizers = imported("tokenizers", extra="tokenizers", needed_for=f"vocabulary {path}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        # The library raises bare exceptions for anything that it does not understand.
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
        # Of BPE, what stands before punctuation is meant.
        self._cleans_up = files.cleans_up and type(self._tokenizer.model).__name__ != "BPE"
        digest = hashlib.sha256(content)
        digest.update(json.dumps(_relevant(files), sort_keys=True).encode())
        self.fingerprint = digest.hexdigest()

    def has_sentinels(self) -> bool:
        """Returns whether `<extra_id_0>` is one of the tokens."""
        return self._tokenizer.token_to_id("<extra_id_0>") is not None

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; special tokens in it are found."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, index: int) -> str:
        """Returns the text of an id, ▁ standing for a space; "" if the tokenizer does not have it."""
        token: str | None = self._tokenizer.id_to_token(index) if 0 <= index < self.size else None
        if token is None or token.startswith(_SPACE):
            return token or ""
        decoder = self._tokenizer.decoder
        text: str = token if decoder is None else decoder.decode([token])
        return text.replace(" ", _SPACE)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without special tokens; ids that the tokenizer does not have are none of it."""
        known = [int(index) for index in ids if 0 <= index < self.size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=True)
        if self._cleans_up:
            for found in _CLEAN_UPS:
                text = text.replace(found, found.strip())
        return text

    def _around(self, path: str, files: TokenizerFiles) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ids before and behind every prompt, as the tokenizer itself says.

        Raises:
          VocabularyError: If version 4.57 of transformers puts others there than version 5.
        """
        kind = files.tokenizer_class or ""
        default = _ADDS_BOS.get(kind)
        own = self._around_by_itself(path)
        if default is None:
            return own
        # Version 5 makes these anew, whatever the file says.
        if kind == "GPTNeoXTokenizer":
            own = ((), ())
        elif kind == "CodeLlamaTokenizer" and self._tokenizer.post_processor is None:
            own = (self._named(files, "bos_token") or (), ())
        adds_bos = default if files.adds_bos is None else files.adds_bos
        names = {"bos_token": adds_bos, "eos_token": bool(files.adds_eos)}
        older = tuple(self._named(files, name) if is_added else () for name, is_added in names.items())
        if None in older or older == own:
            # Version 4.57 does not read it where such a token has no name.
            return own
        flags = ", ".join(
            f"{key} {'left out' if flag is None else str(flag).lower()}"
            for key, flag in (("add_bos_token", files.adds_bos), ("add_eos_token", files.adds_eos))
        )
        raise VocabularyError(
            f"vocabulary {path}: transformers 4.57 puts {_shown(older)} before and behind a prompt, as "
            f"{kind} with {flags} says; transformers 5 puts {_shown(own)}. To go by tokenizer.json in both, set "
            "tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json; to go by 4.57, load the folder with "
            "it and save it, which writes tokenizer.json anew, and set the same."
        )

    def _named(self, files: TokenizerFiles, name: str) -> tuple[int, ...] | None:
        """Returns the id of a special token; None if none has the name."""
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
    """Returns what decides ids and texts beside the tokenizer; defaults are omitted, so that fingerprints stay."""
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
    """Returns ids before and behind a prompt for a message.

    >>> _shown(((1,), ()))
    '[1] and none'
    """
    return " and ".join(str(list(ids)) if ids else "none" for ids in around)


def _add_tokens(path: str, tokenizer: Any, added_token: Any, *, files: TokenizerFiles) -> None:
    """Gives a tokenizer the tokens that only the files beside it name, and the flags that they give others.

    Raises:
      VocabularyError: If they number a token in another way than the tokenizer does, or name one that not every version
        of transformers adds.
    """
    known = tokenizer.get_added_tokens_decoder()
    for index, fields in sorted(files.added_tokens.items()):
        token = added_token(**fields)
        # Of one that older files name, the tokenizer knows the flags.
        if index in known and known[index].content == fields["content"] and not files.is_whole:
            continue
        if repr(known.get(index)) != repr(token):
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(fields["content"]) != index:
            raise VocabularyError(
                f"vocabulary {path}: a file beside it gives {fields['content']!r} the id {index}, here it has "
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
    """Returns the texts of tokens that a tokenizer does not have by itself."""
    own = {token.content for token in known.values()}
    return {fields["content"] for fields in files.added_tokens.values()} - own
