"""Texts as the ids that BLEURT's model takes: [CLS] reference [SEP] candidate [SEP]."""

import dataclasses
from collections.abc import Callable
from typing import Self

import sentencepiece

from .checkpoint import BleurtConfig, BleurtError
from .word_pieces import UNKNOWN, word_ids, words

_SPECIAL_TOKENS = ("[CLS]", "[SEP]")
# How SentencePiece writes a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turns pairs of texts into ids.

    Attributes:
      tokenize: Returns the ids of a text, without special ones.
      known: Returns what the vocabulary knows of a text.
      cls_id: Id of [CLS].
      sep_id: Id of [SEP].
      max_length: Most ids of a pair, the three special ones included.
    """

    tokenize: Callable[[str], list[int]]
    known: Callable[[str], list[str]]
    cls_id: int
    sep_id: int
    max_length: int

    @classmethod
    def of(cls, config: BleurtConfig) -> Self:
        """Returns the encoder of a checkpoint.

        Raises:
          BleurtError: If its vocabulary cannot be read, lacks special tokens or does not fit to its model.
        """
        tokenize, known, ids = _sentencepiece(config) if config.is_sentencepiece else _word_pieces(config)
        return cls(
            tokenize=tokenize, known=known, cls_id=ids["[CLS]"], sep_id=ids["[SEP]"], max_length=config.max_seq_length
        )

    def encode(self, *, reference: str, candidate: str) -> tuple[list[int], list[int]]:
        """Returns the ids of a pair, and for each of them its segment: 0 up to the first [SEP], then 1.

        Where there are too many, the longer text loses its last id, again and again; of two of equal length, the
        candidate does.
        """
        first, second = self.tokenize(reference), self.tokenize(candidate)
        # Three are special.
        room = self.max_length - 3
        while len(first) + len(second) > room:
            (first if len(first) > len(second) else second).pop()
        ids = [self.cls_id, *first, self.sep_id, *second, self.sep_id]
        return ids, [0] * (len(first) + 2) + [1] * (len(second) + 1)


_Tokenize = Callable[[str], list[int]]
_Known = Callable[[str], list[str]]


def _word_pieces(config: BleurtConfig) -> tuple[_Tokenize, _Known, dict[str, int]]:
    """Returns how a list of word pieces tokenizes, what it knows of a text, and the ids of special tokens."""
    try:
        lines = config.vocabulary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise BleurtError(f"{_named(config)} is not UTF-8 ({error}).") from error
    pieces = [line.strip() for line in lines]
    if len(pieces) != config.vocab_size:
        raise BleurtError(_size_mismatch(config, len(pieces)))
    ids = {piece: index for index, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise BleurtError(f"{_named(config)} has {len(pieces) - len(ids)} pieces twice.")
    for token in (UNKNOWN, *_SPECIAL_TOKENS):
        if token not in ids:
            raise BleurtError(f"{_named(config)} has no {token}.")

    def tokenize(text: str) -> list[int]:
        return [index for word in words(text, lower_case=config.do_lower_case) for index in word_ids(word, ids)]

    def known(text: str) -> list[str]:
        unknown = ids[UNKNOWN]
        return [word for word in words(text, lower_case=config.do_lower_case) if word_ids(word, ids) != [unknown]]

    return tokenize, known, ids


def _sentencepiece(config: BleurtConfig) -> tuple[_Tokenize, _Known, dict[str, int]]:
    """Returns how a SentencePiece model tokenizes, what it knows of a text, and the ids of special tokens."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(config.vocabulary))
    except (OSError, RuntimeError) as error:
        raise BleurtError(f"{_named(config)} is not a SentencePiece model ({error}).") from error
    # The model's embedding may be padded.
    if processor.get_piece_size() > config.vocab_size:
        raise BleurtError(_size_mismatch(config, processor.get_piece_size()))
    ids = {token: processor.piece_to_id(token) for token in _SPECIAL_TOKENS}
    for token, index in ids.items():
        if index == processor.unk_id():
            raise BleurtError(f"{_named(config)} has no {token}.")

    def known(text: str) -> list[str]:
        pieces = (processor.id_to_piece(index) for index in processor.encode(text) if index != processor.unk_id())
        # A piece of nothing but the mark of a space may stand before an unknown word.
        return [piece for piece in pieces if piece.strip(_SPACE)]

    return processor.encode, known, ids


def _named(config: BleurtConfig) -> str:
    return f"BLEURT checkpoint {config.folder}: {config.vocabulary.name}"


def _size_mismatch(config: BleurtConfig, size: int) -> str:
    return f"{_named(config)} has {size} pieces, its model {config.vocab_size}. They do not belong together."
