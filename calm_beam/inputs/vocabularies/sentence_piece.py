"""SentencePiece models with T5's conventions; ids equal those of seqio, or of transformers for its folders.

The two part at special tokens in a text. To seqio's `SentencePieceVocabulary`, a sentinel is a piece that begins a
word: in "cat<extra_id_1>on" it sees letters. transformers cuts a text at every special or added token first, and
begins a word behind it.
Source: seqio `vocabularies.py`; transformers `tokenization_t5.py` and `tokenization_t5_fast.py`, versions 4.57 and 5.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

import sentencepiece
from google.protobuf.message import DecodeError

from .model import VocabularyError, VocabularyModel

_SPACE = "▁"

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
"""The id of unknown pieces in models that are trained here; those that are read may have another one, as UMT5's."""


class SentencePieceModel(VocabularyModel):
    """Pad 0, eos 1, and optional sentinels `<extra_id_0>`, ... above the pieces.

    The sentinels are numbered downwards from the highest id, as T5 does.
    """

    begins = ()
    ends = (EOS_ID,)
    end_ids = (EOS_ID,)

    def __init__(
        self, path: str, serialized: bytes, *, extra_ids: int, added_tokens: Mapping[int, str] | None = None
    ) -> None:
        """Loads a model.

        Args:
          path: Where it was read, for messages.
          serialized: The `sentencepiece.model` file.
          extra_ids: Number of sentinels to add.
          added_tokens: Tokens by id that stand above the sentinels, of a folder of transformers, in whose way texts
            are cut then; None for seqio's way.

        Raises:
          VocabularyError: If it is no SentencePiece model, or has other ids for pad and eos; or if an added token has
            an id that is not its own.
        """
        if not serialized:
            raise VocabularyError(f"vocabulary {path}: the file is empty.")
        is_cut = added_tokens is not None
        # seqio's sentinels begin a word; those of transformers are found anywhere.
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
        # The longest of those that begin at one place counts.
        texts = sorted(self._whole, key=len, reverse=True)
        self._cuts = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def has_sentinels(self) -> bool:
        """Returns whether `<extra_id_0>` is one of the pieces."""
        pieces = ("<extra_id_0>", f"{_SPACE}<extra_id_0>")
        return any(self._processor.piece_to_id(piece) != self._unknown for piece in pieces)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without eos."""
        ids: list[int] = []
        # Every second part is a token.
        for place, part in enumerate([text] if self._cuts is None else self._cuts.split(text)):
            ids += [self._whole[part]] if place % 2 else self._processor.encode(part)
        return ids

    def piece(self, index: int) -> str:
        """Returns the piece of an id, ▁ standing for a space; ids the vocabulary does not have read as unknown."""
        piece: str = self._processor.id_to_piece(index if 0 <= index < self.size else self._unknown)
        return piece

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids up to the first eos; ids the vocabulary does not have read as unknown.

        Output heads are often padded beyond the vocabulary, so such ids can be generated.
        """
        known = [int(index) if 0 <= index < self.size else self._unknown for index in ids]
        end = known.index(EOS_ID) if EOS_ID in known else len(known)
        text: str = self._processor.decode(known[:end])
        return text


def _checked_above(
    path: str, processor: sentencepiece.SentencePieceProcessor, sentinels: Sequence[str], *, added: Mapping[int, str]
) -> list[str]:
    """Returns the added tokens that stand above pieces and sentinels, in the order of their ids.

    Raises:
      VocabularyError: If one has an id that leaves a gap, or is another token's.
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
                f"vocabulary {path}: a file beside it gives {text!r} the id {index}, which is "
                f"{'that of ' + repr(known) if known is not None else 'above a gap'}: there are {size} pieces and "
                f"{len(sentinels)} sentinels. If their number is wrong, pass extra_ids; if it is right, the files are "
                "of different models."
            )
        above.append(text)
    return above


def _found_whole(processor: sentencepiece.SentencePieceProcessor, *, above: int) -> dict[str, int]:
    """Returns the ids of what is found whole in texts: control pieces, the unknown one, and all above them."""
    size = processor.get_piece_size()
    return {
        processor.id_to_piece(index): index
        for index in range(size)
        if index >= size - above or processor.is_control(index) or processor.is_unknown(index)
    }


def _with_pieces(serialized: bytes, pieces: Sequence[str]) -> bytes:
    """Returns the model with pieces appended that are found in text, too."""
    if not pieces:
        return serialized
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(serialized)
    for piece in pieces:
        model.pieces.add(piece=piece, score=0.0, type=sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED)
    extended: bytes = model.SerializeToString()
    return extended
