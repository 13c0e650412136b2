"""ROUGE-L: the share of two texts in their longest common subsequence of words.

`rouge_l` has the usual English tokeniser. `rouge_l_unicode` is for text beyond plain English: words keep their accents,
and every script has words.
"""

import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from calm_beam.metrics import Sight, best_over_references

_ENGLISH_TOKEN = re.compile("[a-z0-9]+")


def _english_tokens(text: str) -> Iterator[str]:
    return (found.group() for found in _ENGLISH_TOKEN.finditer(text.lower()))


ROUGE_L_SIGHT = Sight(tokens=_english_tokens)
"""The tokens of the rouge-score package."""


class Tokenizer(Protocol):
    """The interface that the rouge-score package expects of a tokeniser."""

    def tokenize(self, text: str) -> list[str]:
        """Returns the tokens of a text, in order."""
        ...

    def __hash__(self) -> int: ...


def rouge_l(candidate: str, references: Sequence[str]) -> float:
    """Returns the ROUGE-L F-measure of the candidate, best over references.

    Tokens are runs of [a-z0-9] after lowercasing, as everywhere in the literature. That breaks words with accents
    and drops other scripts completely: use `rouge_l_unicode` for those.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      A score in [0, 1]. Identical texts score 1, even if they have no tokens; other texts without tokens score 0.

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.
      ImportError: If the rouge-score package is missing.

    Source: Lin (2004), "ROUGE: a package for automatic evaluation of summaries", Eqs. 2-4 with equal weights, as
    computed by the rouge-score package; the metric of CALM for summarization.

    >>> rouge_l("the cat sat", ["a dog", "the cat sat down"])
    0.8571428571428571
    """
    return best_over_references(rouge_l_score, candidate, references=references, sight=ROUGE_L_SIGHT)


def rouge_l_score(candidate: str, reference: str, *, tokenizer: Tokenizer | None = None) -> float:
    """Returns the ROUGE-L F-measure of one pair of texts.

    Args:
      candidate: The text to score.
      reference: The text to compare with.
      tokenizer: None for the rouge-score package's own. Must be hashable, since one scorer is kept for each.

    Returns:
      A score in [0, 1]. Different texts score 0 if one or both have no tokens.

    Raises:
      ImportError: If the rouge-score package is missing.

    Source: as `rouge_l`.

    >>> rouge_l_score("...", "..."), rouge_l_score("...", "!")
    (1.0, 0.0)
    """
    # rouge-score gives 0 to "..." against "...", since neither has a token. An exit that changes nothing would then
    # have loss 1, the full model would be inconsistent with itself, and no threshold could ever be safe. For texts
    # with tokens this agrees with the scorer, and saves its quadratic table.
    if candidate == reference:
        return 1.0
    return float(_scorer(tokenizer).score(reference, candidate)["rougeL"].fmeasure)


@functools.cache
def _scorer(tokenizer: Tokenizer | None) -> Any:
    """Returns the scorer; imports rouge-score only here because it imports all of nltk (over a second)."""
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(["rougeL"], tokenizer=tokenizer)


class UnicodeTokenizer:
    """Splits a text into runs of letters and digits of any script, caselessly.

    The text is casefolded and normalised to NFC, so that neither case nor the encoding of accents matters. A token
    starts with a letter or digit (Unicode categories L and N) and includes the combining marks (M) in it.

    >>> UnicodeTokenizer().tokenize("L'ÉTÉ, 2 façons")
    ['l', 'été', '2', 'façons']
    """

    def tokenize(self, text: str) -> list[str]:
        """Returns the tokens of a text, in order."""
        return list(_unicode_words(text))


def _unicode_words(text: str) -> Iterator[str]:
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


ROUGE_L_UNICODE_SIGHT = Sight(tokens=_unicode_words)
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
    return best_over_references(_unicode_score, candidate, references=references, sight=ROUGE_L_UNICODE_SIGHT)


def _unicode_score(candidate: str, reference: str) -> float:
    return rouge_l_score(candidate, reference, tokenizer=_TOKENIZER)
