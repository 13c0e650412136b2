"""Texts as the ids that BLEURT's model takes: [CLS] reference [SEP] candidate [SEP].

BLEURT's older checkpoints read texts as the word pieces of BERT. They are made as BERT's own tokenizer does it, to the
letter: a piece that differs is another score. TensorFlow's does not: it folds case (ß becomes ss) where BERT takes
lower case, bounds words in bytes, and knows fewer white spaces.
"""

import dataclasses
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Self

import sentencepiece

from calm_beam.metrics.bleurt.checkpoint import BleurtConfig, BleurtError

UNKNOWN = "[UNK]"

# Characters of the longest word that is looked for in pieces; longer ones are unknown.
_LONGEST_WORD = 200
_CONTINUED = "##"
# Signs of ASCII that Unicode has as symbols, but are punctuation here.
_SYMBOLS = frozenset("$+<=>^`|~")
# Each of these is a word. As BERT has them: what Unicode added later is not among them.
_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)
_SPECIAL_TOKENS = ("[CLS]", "[SEP]")
# How SentencePiece writes a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def words(text: str, *, lower_case: bool) -> Iterator[str]:
    r"""Yields the words of a text: what stands between white space, parted at punctuation and ideographs, which stay.

    Control characters go. Lower-case models see neither case nor accents.

    Source: BERT, `tokenization.py` (BasicTokenizer).

    >>> list(words("L'été,\tà\u2028la plage", lower_case=True))
    ['l', "'", 'ete', ',', 'a', 'la', 'plage']
    """
    # Also at the separators of lines and of paragraphs, which are neither control characters nor spaces.
    for chunk in "".join(map(_cleaned, text)).split():
        letters = _without_accents(chunk.lower()) if lower_case else chunk
        yield from "".join(f" {letter} " if _is_punctuation(letter) else letter for letter in letters).split()


def word_ids(word: str, ids: Mapping[str, int]) -> list[int]:
    """Returns the ids of a word's pieces, always the longest that fits; or the unknown one's, if none does.

    Args:
      word: One of `words`.
      ids: Of all pieces; those that go on with a word begin with `##`.

    Source: BERT, `tokenization.py` (WordpieceTokenizer).

    >>> word_ids("unable", {"[UNK]": 0, "un": 1, "##a": 2, "##able": 3}), word_ids("able", {"[UNK]": 0, "##able": 1})
    ([1, 3], [0])
    """
    found: list[int] = []
    begin = 0
    while begin < len(word) <= _LONGEST_WORD:
        mark = _CONTINUED if begin else ""
        fitting = (end for end in range(len(word), begin, -1) if mark + word[begin:end] in ids)
        end = next(fitting, None)
        if end is None:
            return [ids[UNKNOWN]]
        found.append(ids[mark + word[begin:end]])
        begin = end
    return found or [ids[UNKNOWN]]


def _cleaned(character: str) -> str:
    category = unicodedata.category(character)
    if character in "\t\n\r" or category == "Zs":
        return " "
    if character == "\ufffd" or category in ("Cc", "Cf"):
        return ""
    code = ord(character)
    return f" {character} " if any(first <= code <= last for first, last in _IDEOGRAPHS) else character


def _without_accents(text: str) -> str:
    decomposed = unicodedata.normalize("NFD", text)
    return "".join(character for character in decomposed if unicodedata.category(character) != "Mn")


def _is_punctuation(character: str) -> bool:
    return character in _SYMBOLS or unicodedata.category(character).startswith("P")


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
