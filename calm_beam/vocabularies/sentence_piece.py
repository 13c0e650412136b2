"""SentencePiece models with T5's conventions; ids equal those of seqio's `SentencePieceVocabulary`."""

import hashlib
from collections.abc import Sequence

import sentencepiece
from google.protobuf.message import DecodeError

from .model import VocabularyError, VocabularyModel

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2


class SentencePieceModel(VocabularyModel):
    """Pad 0, eos 1, unknown 2, and optional sentinels `<extra_id_0>`, ... at the top.

    The sentinels are numbered downwards from the highest id, as T5 does.
    """

    begins = ()
    ends = (EOS_ID,)
    end_ids = (EOS_ID,)

    def __init__(self, path: str, serialized: bytes, *, extra_ids: int) -> None:
        """Loads a model.

        Args:
          path: Where it was read, for messages.
          serialized: The `sentencepiece.model` file.
          extra_ids: Number of sentinels to add.

        Raises:
          VocabularyError: If it is no SentencePiece model, or has other ids for pad, eos or unknown.
        """
        try:
            model = _with_extra_ids(serialized, extra_ids)
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, DecodeError) as error:
            raise VocabularyError(
                f"vocabulary {path}: cannot be read as a SentencePiece model: it is damaged, or something else."
            ) from error
        found = (self._processor.pad_id(), self._processor.eos_id(), self._processor.unk_id())
        if found != (PAD_ID, EOS_ID, UNK_ID):
            raise VocabularyError(
                f"vocabulary {path}: ids of pad, eos and unknown are {found}, T5 needs ({PAD_ID}, {EOS_ID}, {UNK_ID}). "
                "Train it with --pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1."
            )
        self.fingerprint = hashlib.sha256(serialized).hexdigest()
        self.size = self._processor.get_piece_size()

    def has_sentinels(self) -> bool:
        """Returns whether `<extra_id_0>` is one of the pieces."""
        return any(self._processor.piece_to_id(piece) != UNK_ID for piece in ("<extra_id_0>", "▁<extra_id_0>"))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without eos."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def piece(self, index: int) -> str:
        """Returns the piece of an id, ▁ standing for a space; ids the vocabulary does not have read as unknown."""
        piece: str = self._processor.id_to_piece(index if 0 <= index < self.size else UNK_ID)
        return piece

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids up to the first eos; ids the vocabulary does not have read as unknown.

        Output heads are often padded beyond the vocabulary, so such ids can be generated.
        """
        known = [int(index) if 0 <= index < self.size else UNK_ID for index in ids]
        end = known.index(EOS_ID) if EOS_ID in known else len(known)
        text: str = self._processor.decode(known[:end])
        return text


def _with_extra_ids(serialized: bytes, extra_ids: int) -> bytes:
    """Returns the model with sentinels appended as pieces of their own, so that they are found in text too."""
    if not extra_ids:
        return serialized
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(serialized)
    for index in reversed(range(extra_ids)):
        model.pieces.add(
            piece=f"▁<extra_id_{index}>",
            score=0.0,
            type=sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED,
        )
    extended: bytes = model.SerializeToString()
    return extended
