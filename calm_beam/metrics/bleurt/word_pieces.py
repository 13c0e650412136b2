"""Texts as the word pieces of BERT, in which BLEURT's older checkpoints read them.

As BERT's own tokenizer does it, to the letter: a piece that differs is another score. TensorFlow's does not: it folds
case (ß becomes ss) where BERT takes lower case, bounds words in bytes, and knows fewer white spaces.
"""

import unicodedata
from collections.abc import Iterator, Mapping

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


def words(text: str, *, lower_case: bool) -> Iterator[str]:
    r"""Yields the words of a text: split at white space, punctuation and ideographs, of which the last two stay.

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
