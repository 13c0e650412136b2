"""ROUGE-L for text beyond plain English: words keep their accents, and every script has words."""

import unicodedata
from collections.abc import Iterator, Sequence

from calm_beam.metrics import Sight, best_over_references
from calm_beam.metrics.rouge_l import rouge_l_score


class UnicodeTokenizer:
    """Splits a text into runs of letters and digits of any script, caselessly.

    The text is casefolded and normalised to NFC, so that neither case nor the encoding of accents matters. A token
    starts with a letter or digit (Unicode categories L and N) and includes the combining marks (M) in it.

    >>> UnicodeTokenizer().tokenize("L'ÉTÉ, 2 façons")
    ['l', 'été', '2', 'façons']
    """

    def tokenize(self, text: str) -> list[str]:
        """Returns the tokens of a text, in order."""
        return list(_words(text))


def _words(text: str) -> Iterator[str]:
    # Decomposed before folding, as Unicode defines caseless matching (D145); folding can leave NFC.
    folded = unicodedata.normalize("NFC", unicodedata.normalize("NFD", text).casefold())
    current = ""
    for character in folded:
        kind = unicodedata.category(character)[0]
        # A mark after anything else (the variation selector after an emoji) does not make a word.
        if kind in "LN" or (kind == "M" and current):
            current += character
        elif current:
            yield current
            current = ""
    if current:
        yield current


ROUGE_L_UNICODE_SIGHT = Sight(tokens=_words)
"""Words of letters and digits of any script."""

_TOKENIZER = UnicodeTokenizer()


def rouge_l_unicode(candidate: str, references: Sequence[str]) -> float:
    """Returns the ROUGE-L F-measure over Unicode words, best over references.

    Scores differ from `rouge_l` even on English if a word has an accent, so never compare the two. Scripts written
    without spaces give one token for each run of letters; for those, bring your own tokeniser and metric.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      A score in [0, 1]. Identical texts score 1, even if they have no tokens; other texts without tokens score 0.

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.
      ImportError: If the rouge-score package is missing.

    Source: as `rouge_l`; the tokeniser is our own, after Unicode categories and D145 (canonical caseless match).

    >>> rouge_l_unicode("Été 2024", ["été 2024"])
    1.0
    """
    return best_over_references(_score, candidate, references=references, sight=ROUGE_L_UNICODE_SIGHT)


def _score(candidate: str, reference: str) -> float:
    return rouge_l_score(candidate, reference, tokenizer=_TOKENIZER)
