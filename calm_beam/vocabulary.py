"""SentencePiece vocabularies with T5's conventions; ids equal those of seqio's `SentencePieceVocabulary`."""

import hashlib
import os
from collections.abc import Sequence

import sentencepiece
from google.protobuf.message import DecodeError

from calm_beam.errors import CalmBeamError
from calm_beam.sentinels import SentinelsError, extra_ids_beside
from calm_beam.storage import open_input

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2

# The largest known SentencePiece model has 5 MB, the most sentinels are 300.
_MOST_BYTES = 256 << 20
_MOST_EXTRA_IDS = 100_000


class VocabularyError(CalmBeamError, ValueError):
    """A SentencePiece model that cannot be read or does not follow T5's conventions."""


class Vocabulary:
    """Text to token ids and back: pad 0, eos 1, unknown 2, and optional sentinels `<extra_id_0>`, ... at the top.

    The sentinels are numbered downwards from the highest id, as T5 does. Not picklable; workers load their own.
    """

    def __init__(self, path: str | os.PathLike[str], *, extra_ids: int = 0) -> None:
        """Loads a SentencePiece model.

        Args:
          path: The `sentencepiece.model` file, local or on Cloud Storage.
          extra_ids: Number of sentinels to add, 100 for the public T5 vocabularies.

        Raises:
          VocabularyError: If the file is missing, not a SentencePiece model, or has other ids for pad, eos or unknown;
            or if `extra_ids` is negative, or more than any model has.
        """
        if not 0 <= extra_ids <= _MOST_EXTRA_IDS:
            raise VocabularyError(
                f"extra_ids must be from 0 to {_MOST_EXTRA_IDS}, got {extra_ids}. The public T5 vocabularies have 100."
            )
        try:
            with open_input(path) as file:
                serialized = file.read(_MOST_BYTES + 1)
            if len(serialized) > _MOST_BYTES:
                raise VocabularyError(
                    f"vocabulary {path}: is larger than {_MOST_BYTES >> 20} MiB, which no SentencePiece model is."
                )
            model = _with_extra_ids(serialized, extra_ids)
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, DecodeError) as error:
            raise VocabularyError(
                f"vocabulary {path}: cannot be read as a SentencePiece model: it is damaged, or something else."
            ) from error
        except OSError as error:
            raise VocabularyError(f"vocabulary {path}: cannot be read as a SentencePiece model: {error}") from error
        found = (self._processor.pad_id(), self._processor.eos_id(), self._processor.unk_id())
        if found != (PAD_ID, EOS_ID, UNK_ID):
            raise VocabularyError(
                f"vocabulary {path}: ids of pad, eos and unknown are {found}, T5 needs ({PAD_ID}, {EOS_ID}, {UNK_ID}). "
                "Train it with --pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1."
            )
        self._fingerprint = hashlib.sha256(serialized).hexdigest()
        self.extra_ids = extra_ids

    @property
    def size(self) -> int:
        """Number of ids, sentinels included."""
        return self._processor.get_piece_size()

    @property
    def fingerprint(self) -> str:
        """`sha256:` and the digest of the model file."""
        return f"sha256:{self._fingerprint}"

    def has_sentinels(self) -> bool:
        """Returns whether `<extra_id_0>` is one of the pieces."""
        return any(self._processor.piece_to_id(piece) != UNK_ID for piece in ("<extra_id_0>", "▁<extra_id_0>"))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without eos."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def piece(self, index: int) -> str:
        """Returns the piece of an id, ▁ standing for a space; ids the vocabulary does not have read as unknown."""
        return self._processor.id_to_piece(index if 0 <= index < self.size else UNK_ID)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids up to the first eos; ids the vocabulary does not have read as unknown.

        Output heads are often padded beyond the vocabulary, so such ids can be generated.
        """
        known = [int(index) if 0 <= index < self.size else UNK_ID for index in ids]
        end = known.index(EOS_ID) if EOS_ID in known else len(known)
        text: str = self._processor.decode(known[:end])
        return text


def open_vocabulary(path: str | os.PathLike[str], *, extra_ids: int | None = None) -> Vocabulary:
    """Returns a vocabulary with its sentinels.

    Args:
      path: As `Vocabulary` takes it.
      extra_ids: Number of sentinels; with None, as many as files of its tokenizer beside it name, and it does not hold
        itself.

    Raises:
      VocabularyError: If it, or such a file, cannot be read.
    """
    return Vocabulary(path, extra_ids=missing_sentinels(path) if extra_ids is None else extra_ids)


def missing_sentinels(path: str | os.PathLike[str]) -> int:
    """Returns how many sentinels files beside a vocabulary name, if it does not hold them itself.

    Raises:
      VocabularyError: If such a file cannot be read, or names some and the vocabulary cannot be read.
    """
    try:
        beside = extra_ids_beside(path)
    except SentinelsError as error:
        raise VocabularyError(str(error)) from error
    return 0 if not beside or Vocabulary(path).has_sentinels() else beside


def output_text(tokens: Sequence[int], vocabulary: Vocabulary | None) -> str:
    """Returns the text of an output that metrics see, without eos: it is no content, and makes outputs look alike.

    Args:
      tokens: Generated ids.
      vocabulary: None if there is none, which only prompts of token ids can do without; then the text is the ids joined
        by spaces.
    """
    return vocabulary.decode(tokens) if vocabulary else " ".join(str(token) for token in tokens if token != EOS_ID)


def reference_text(ids: Sequence[int], vocabulary: Vocabulary | None) -> str:
    """Returns the text of a reference that was given as token ids, made as that of an output is.

    Args:
      ids: Its ids, of which those from the first eos on, and padding at the end, are none of it.
      vocabulary: As in `output_text`.

    >>> reference_text([5, 7, 1, 0, 0], None), reference_text([0], None)
    ('5 7', '')
    """
    end = ids.index(EOS_ID) if EOS_ID in ids else len(ids)
    while end and ids[end - 1] == PAD_ID:
        end -= 1
    return output_text(ids[:end], vocabulary)


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
