"""`tokenizer.json` of Hugging Face's tokenizers: ids and texts are those that transformers gives for its folder."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from calm_beam.extras import imported

from .model import VocabularyError, VocabularyModel
from .tokenizer_files import NAMES, TokenizerFiles, read_tokenizer_files

# Texts of which at least one has a token in any vocabulary.
_PROBES = ("a", "1", ".", "я", "的")
# Around which transformers takes spaces out of texts, in this order.
_CLEAN_UPS = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_SPACE = "▁"


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
        self.begins, self.ends = self._around(path, files)
        eos = files.special_tokens.get("eos_token")
        end = None if eos is None else self._tokenizer.token_to_id(eos)
        self.end_ids = () if end is None else (end,)
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        # Of BPE, what stands before punctuation is meant.
        self._cleans_up = files.cleans_up and type(self._tokenizer.model).__name__ != "BPE"
        relevant = {**dataclasses.asdict(files), "chat_template": None}
        digest = hashlib.sha256(content)
        digest.update(json.dumps(relevant, sort_keys=True).encode())
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
        """Returns the ids before and behind every prompt."""
        if files.adds_bos is None and files.adds_eos is None:
            return self._around_by_itself(path)
        return self._named(files, "bos_token", wanted=files.adds_bos), self._named(
            files, "eos_token", wanted=files.adds_eos
        )

    def _named(self, files: TokenizerFiles, name: str, *, wanted: bool | None) -> tuple[int, ...]:
        text = files.special_tokens.get(name)
        # Without such a token, transformers adds none either.
        return (self._tokenizer.token_to_id(text),) if wanted and text is not None else ()

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
            f"vocabulary {path}: what it puts before and behind a text is not understood. Say so in "
            "tokenizer_config.json, by add_bos_token and add_eos_token."
        )


def _add_tokens(path: str, tokenizer: Any, added_token: Any, *, files: TokenizerFiles) -> None:
    """Gives a tokenizer the tokens that only the files beside it name, and the flags that they give others.

    Raises:
      VocabularyError: If they number a token in another way than the tokenizer does.
    """
    known = tokenizer.get_added_tokens_decoder()
    for index, fields in sorted(files.added_tokens.items()):
        token = added_token(**fields)
        if repr(known.get(index)) != repr(token):
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(fields["content"]) != index:
            raise VocabularyError(
                f"vocabulary {path}: tokenizer_config.json gives {fields['content']!r} the id {index}, here it has "
                f"{tokenizer.token_to_id(fields['content'])}. The files are of different models."
            )
    texts = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for name in NAMES:
        text = files.special_tokens.get(name)
        if text is not None and text not in texts:
            tokenizer.add_special_tokens([added_token(text, special=True)])
