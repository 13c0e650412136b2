"""SentencePiece models with T5's conventions; ids equal those of seqio, or of transformers for its folders.

The two differ at special tokens in a text. To seqio's `SentencePieceVocabulary`, a sentinel is a piece that begins a
word: in "cat<extra_id_1>on" it sees letters. transformers first cuts a text at every special or added token, and begins
a new word after it.

The SentencePiece model does not say how many sentinels `<extra_id_0>`, ... a T5 tokenizer has. Hugging Face stores them
in small files in the same folder.
Source: seqio `vocabularies.py`; transformers `tokenization_t5.py` and `tokenization_t5_fast.py`, versions 4.57 and 5
(for the sentinels `tokenization_t5.py`, versions 4 and 5).
"""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError

from calm_beam.errors import CalmBeamError
from calm_beam.storage import is_file, joined, open_input, parent, replacing, strict_json

from . import VocabularyError, VocabularyModel

_SPACE = "▁"

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
"""The id of unknown pieces in models that are trained here; others may have another id, as UMT5's do."""


class SentencePieceModel(VocabularyModel):
    """A model with pad 0, eos 1, and optional sentinels `<extra_id_0>`, ... above the pieces.

    The sentinels are numbered downwards from the highest id, as in T5.
    """

    begins = ()
    ends = (EOS_ID,)
    end_ids = (EOS_ID,)

    def __init__(
        self, path: str, serialized: bytes, *, extra_ids: int, added_tokens: Mapping[int, str] | None = None
    ) -> None:
        """Loads a model.

        Args:
          path: Path of the file, for messages.
          serialized: The content of the `sentencepiece.model` file.
          extra_ids: Number of sentinels to add.
          added_tokens: Tokens by id above the sentinels, from a transformers folder; texts are then cut as transformers
            does. None cuts as seqio does.

        Raises:
          VocabularyError: If it is not a SentencePiece model, or has other ids for pad and eos, or if an added token
            has another token's id.
        """
        if not serialized:
            raise VocabularyError(f"vocabulary {path}: the file is empty.")
        is_cut = added_tokens is not None
        # seqio's sentinels begin a word; transformers finds them anywhere.
        sentinels = [f"{'' if is_cut else _SPACE}<extra_id_{number}>" for number in reversed(range(extra_ids))]
        try:
            bare = sentencepiece.SentencePieceProcessor(model_proto=serialized)
            above = _checked_above(path, bare, sentinels, added=added_tokens or {})
            model = _with_pieces(serialized, [*sentinels, *above])
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, DecodeError) as error:
            raise VocabularyError(
                f"vocabulary {path}: cannot be read as a SentencePiece model: it is damaged, or something else."
            ) from error
        self._unknown: int = self._processor.unk_id()
        found = (self._processor.pad_id(), self._processor.eos_id(), self._unknown)
        if found[:2] != (PAD_ID, EOS_ID) or self._unknown in (PAD_ID, EOS_ID) or self._unknown < 0:
            raise VocabularyError(
                f"vocabulary {path}: ids of pad, eos and unknown are {found}, T5 needs {PAD_ID}, {EOS_ID} and a third. "
                "Train it with --pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1."
            )
        self.size = self._processor.get_piece_size()
        self._whole: dict[str, int] = {}
        self.fingerprint = hashlib.sha256(serialized).hexdigest()
        if added_tokens is not None:
            self._whole = _found_whole(self._processor, above=len(sentinels) + len(above))
            self.fingerprint = hashlib.sha256(
                json.dumps([self.fingerprint, "cut at tokens", sorted(added_tokens.items())]).encode()
            ).hexdigest()
        # At one place, the longest match counts.
        texts = sorted(self._whole, key=len, reverse=True)
        self._cuts = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def has_sentinels(self) -> bool:
        """Returns whether `<extra_id_0>` is one of the pieces."""
        pieces = ("<extra_id_0>", f"{_SPACE}<extra_id_0>")
        return any(self._processor.piece_to_id(piece) != self._unknown for piece in pieces)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without eos."""
        ids: list[int] = []
        # Every second part of the split is a token.
        for place, part in enumerate([text] if self._cuts is None else self._cuts.split(text)):
            ids += [self._whole[part]] if place % 2 else self._processor.encode(part)
        return ids

    def piece(self, index: int) -> str:
        """Returns the piece of an id, with ▁ for a space; an id outside the vocabulary reads as unknown."""
        piece: str = self._processor.id_to_piece(index if 0 <= index < self.size else self._unknown)
        return piece

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids up to the first eos; an id outside the vocabulary reads as unknown.

        Output heads are often padded beyond the vocabulary, so such ids can be generated.
        """
        known = [int(index) if 0 <= index < self.size else self._unknown for index in ids]
        end = known.index(EOS_ID) if EOS_ID in known else len(known)
        text: str = self._processor.decode(known[:end])
        return text


def _checked_above(
    path: str, processor: sentencepiece.SentencePieceProcessor, sentinels: Sequence[str], *, added: Mapping[int, str]
) -> list[str]:
    """Returns the added tokens above pieces and sentinels, in the order of their ids.

    Raises:
      VocabularyError: If an id leaves a gap, or is another token's.
    """
    size = processor.get_piece_size()
    above: list[str] = []
    for index, text in sorted(added.items()):
        known = processor.id_to_piece(index) if index < size else None
        if index < size + len(sentinels):
            known = sentinels[index - size] if known is None else known
            if known in (text, f"{_SPACE}{text}"):
                continue
        if index != size + len(sentinels) + len(above):
            raise VocabularyError(
                f"vocabulary {path}: a file next to it gives {text!r} the id {index}, which is "
                f"{'that of ' + repr(known) if known is not None else 'above a gap'}: there are {size} pieces and "
                f"{len(sentinels)} sentinels. If their number is wrong, pass extra_ids; if it is right, the files are "
                "of different models."
            )
        above.append(text)
    return above


def _found_whole(processor: sentencepiece.SentencePieceProcessor, *, above: int) -> dict[str, int]:
    """Returns the ids of pieces that are matched whole: control pieces, the unknown one, and all above them."""
    size = processor.get_piece_size()
    return {
        processor.id_to_piece(index): index
        for index in range(size)
        if index >= size - above or processor.is_control(index) or processor.is_unknown(index)
    }


def _with_pieces(serialized: bytes, pieces: Sequence[str]) -> bytes:
    """Returns the model with pieces appended that are also found in text."""
    if not pieces:
        return serialized
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(serialized)
    for piece in pieces:
        model.pieces.add(piece=piece, score=0.0, type=sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED)
    extended: bytes = model.SerializeToString()
    return extended


# The files that may name sentinels, in order of precedence.
SENTINEL_FILES = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
_SENTINEL = re.compile(r"<extra_id_(\d{1,6})>")
_MOST_BYTES = 16 << 20


class SentinelsError(CalmBeamError, ValueError):
    """A tokenizer file that cannot be read, or that does not number sentinels as T5 does."""


def extra_ids_beside(vocabulary: str | os.PathLike[str]) -> int:
    """Returns the number of sentinels in the files next to a SentencePiece model; 0 if there are none.

    Args:
      vocabulary: Path of the model, local or on Cloud Storage.

    Raises:
      SentinelsError: If such a file cannot be read, or its sentinels are not numbered downwards from the highest id.
    """
    folder = parent(os.fspath(vocabulary))
    for name in SENTINEL_FILES:
        path = joined(folder, name)
        if is_file(path) and (count := _extra_ids(path)):
            return count
    return 0


def write_extra_ids(folder: pathlib.Path, extra_ids: int) -> None:
    """Writes a file that `extra_ids_beside` reads; for 0, removes it from the folder."""
    path = folder / SENTINEL_FILES[0]
    if not extra_ids:
        path.unlink(missing_ok=True)
        return
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"extra_ids": extra_ids}) + "\n", encoding="utf-8")


def _extra_ids(path: str) -> int:
    try:
        with open_input(path) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise SentinelsError(f"{path}: is larger than {_MOST_BYTES >> 20} MiB, which no such file is.")
        fields = strict_json.loads(content, constants_allowed=True)
    except (OSError, strict_json.StrictJSONError) as error:
        raise SentinelsError(f"{path}: cannot be read as JSON: {error}.") from error
    ids = _numbered(fields)
    numbers = set(ids) | _listed_extra_ids(fields)
    stated = fields.get("extra_ids") if isinstance(fields, dict) else None
    count = stated if type(stated) is int and stated >= 0 else len(numbers)
    top = max(ids.values(), default=0)
    is_whole = not numbers or (len(numbers) == count and max(numbers) == count - 1)
    if not is_whole or any(index != top - number for number, index in ids.items()):
        raise SentinelsError(
            f"{path}: names {len(numbers)} sentinels, and not as T5 does: expected <extra_id_0> with the highest id, "
            f"<extra_id_1> below it, and so on{f', {count} in all' if stated else ''}. Pass extra_ids yourself."
        )
    return count


def _numbered(fields: Any) -> dict[int, int]:
    """Returns the ids of sentinels by their numbers, from `{text: id}` or `{"added_tokens_decoder": {id: token}}`."""
    if not isinstance(fields, dict):
        return {}
    decoder = fields.get("added_tokens_decoder")
    pairs = list(fields.items())
    if isinstance(decoder, dict):
        pairs += [(_text(token), int(index)) for index, token in decoder.items() if index.isascii() and index.isdigit()]
    return {
        int(match.group(1)): index
        for text, index in pairs
        if type(index) is int and (match := _SENTINEL.fullmatch(text))
    }


def _listed_extra_ids(fields: Any) -> set[int]:
    """Returns the numbers of sentinels in lists of special tokens."""
    if not isinstance(fields, dict):
        return set()
    lists = [fields.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    texts = [_text(token) for tokens in lists if isinstance(tokens, list) for token in tokens]
    return {int(match.group(1)) for text in texts if (match := _SENTINEL.fullmatch(text))}


def _text(token: Any) -> str:
    """Returns the text of a special token, of either form."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
