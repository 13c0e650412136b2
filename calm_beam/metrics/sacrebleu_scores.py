"""BLEU and chrF of single texts, as the sacrebleu package scores them.

BLEU counts the word n-grams, chrF the short character n-grams, that two texts have in common.
"""

import decimal
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from calm_beam.extras import imported
from calm_beam.metrics import Sight, best_over_references

_CONTEXT = decimal.Context(prec=40, rounding=decimal.ROUND_HALF_EVEN)


def _words(text: str) -> Iterator[str]:
    return iter(_bleu_scorer().tokenizer(text).split())


SENTENCE_BLEU_SIGHT = Sight(tokens=_words)
"""The words of the 13a tokeniser, including punctuation."""


def sentence_bleu(candidate: str, references: Sequence[str]) -> float:
    """Returns sentence-level BLEU of the candidate, best over references, as a fraction.

    Words are those of the 13a tokeniser, case-sensitive; n-grams up to length 4, or to the candidate's length if it is
    shorter (effective order); precisions of 0 are smoothed exponentially. The best single reference counts, as for all
    metrics here; other BLEU implementations pool the n-grams of all references.

    Its mean is not corpus BLEU, which does not decompose into losses of examples, as risk control needs.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      A score in [0, 1]. Identical texts score 1, also if they have no words. Other texts with no common word score
      0, except two that are only white space.

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.
      MissingExtraError: If the sacrebleu package is missing.

    Source: Papineni et al. (2002), "BLEU"; smoothing 3 of Chen and Cherry (2014); as computed by sacrebleu
    (case:mixed, eff:yes, tok:13a, smooth:exp).

    >>> round(sentence_bleu("the cat sat on the mat", ["the cat sat"]), 4)
    0.3021
    """
    return best_over_references(_bleu, candidate, references=references, sight=SENTENCE_BLEU_SIGHT)


def _bleu(candidate: str, reference: str) -> float:
    if candidate == reference:
        return 1.0
    found = _bleu_scorer().sentence_score(candidate, [reference])
    if not any(found.counts):
        return 0.0
    # sacrebleu's own score uses the system's exp and log, whose last digits differ between processors. Losses are
    # rounded up, so a difference in the last digit can be a whole step. decimal rounds correctly.
    with decimal.localcontext(_CONTEXT):
        logarithms = [
            (decimal.Decimal(precision) / 100).ln()
            for precision, total in zip(found.precisions, found.totals, strict=True)
            if total
        ]
        brevity = min(decimal.Decimal(0), 1 - decimal.Decimal(found.ref_len) / found.sys_len)
        return min(1.0, float((sum(logarithms) / len(logarithms) + brevity).exp()))


@functools.cache
def _bleu_scorer() -> Any:
    return imported("sacrebleu.metrics", extra="metrics", needed_for='the metric "sentence_bleu"').BLEU(
        tokenize="13a", smooth_method="exp", effective_order=True
    )


CHRF_SIGHT = Sight(tokens=str.split)
"""Everything except white space."""


def chrf(candidate: str, references: Sequence[str]) -> float:
    """Returns chrF2 of the candidate, best over references, as a fraction.

    The F-score of character n-grams up to length 6, with recall counting twice as much (beta 2), without spaces and
    without word n-grams. Case and accents count; no language needs a tokeniser.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      A score in [0, 1]. Identical texts score 1, and so do two texts of only white space; such a text against another
      scores 0.

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.
      MissingExtraError: If the sacrebleu package is missing.

    Source: Popovic (2015), "chrF: character n-gram F-score for automatic MT evaluation", as computed by sacrebleu with
    its defaults (nc:6, nw:0, space:no, eff:yes).

    >>> round(chrf("the cat sat", ["the cat sat down"]), 4)
    0.6602
    """
    return best_over_references(_chrf, candidate, references=references, sight=CHRF_SIGHT)


def _chrf(candidate: str, reference: str) -> float:
    if candidate == reference:
        return 1.0
    # Equal words give 100.00000000000004.
    return float(min(1.0, _chrf_scorer().sentence_score(candidate, [reference]).score / 100))


@functools.cache
def _chrf_scorer() -> Any:
    return imported("sacrebleu.metrics", extra="metrics", needed_for='the metric "chrf"').CHRF(
        char_order=6, word_order=0, beta=2
    )
