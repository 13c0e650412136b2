"""Metrics of single texts that other packages compute: chrF, sentence BLEU and the edit distance.

They say how many short runs of characters two texts share, how many runs of words two sentences share, and, as a
similarity, how few characters have to be changed. The first two are sacrebleu's.
"""

import decimal
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from calm_beam.extras import imported
from calm_beam.metrics.sight import Sight, best_over_references

CHRF_SIGHT = Sight(tokens=str.split)
"""All but white space."""
_CONTEXT = decimal.Context(prec=40, rounding=decimal.ROUND_HALF_EVEN)
EDIT_DISTANCE_SIGHT = Sight(tokens=iter)
"""Every character, spaces too."""


def chrf(candidate: str, references: Sequence[str]) -> float:
    """Returns chrF2 of the candidate, best over references, as a fraction.

    The F-score, with recall counting twice as much (beta 2), of character n-grams up to length 6, without spaces and
    without n-grams of words. Case and accents count; no language needs a tokeniser.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      A score in [0, 1]. Identical texts score 1, and so do two texts of nothing but space; such a text against another
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
    return best_over_references(_chrf_score, candidate, references=references, sight=CHRF_SIGHT)


def _chrf_score(candidate: str, reference: str) -> float:
    if candidate == reference:
        return 1.0
    return _fraction_score(_chrf_scorer(), candidate, reference=reference)


@functools.cache
def _chrf_scorer() -> Any:
    return _sacrebleu_metrics(needed_for="chrf").CHRF(char_order=6, word_order=0, beta=2)


def _words(text: str) -> Iterator[str]:
    return iter(_bleu_scorer().tokenizer(text).split())


SENTENCE_BLEU_SIGHT = Sight(tokens=_words)
"""The words of the 13a tokeniser, punctuation too."""


def sentence_bleu(candidate: str, references: Sequence[str]) -> float:
    """Returns sentence-level BLEU of the candidate, best over references, as a fraction.

    Words are those of the 13a tokeniser, in their case; n-grams up to length 4, or to the candidate's length if it is
    shorter (effective order); precisions of 0 are smoothed exponentially. The best single reference counts, as for all
    metrics here, where BLEU elsewhere collects the n-grams of all references.

    It is no mean of corpus BLEU: that does not come apart into losses of examples, which risk control needs.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      A score in [0, 1]. Identical texts score 1, also without any word; otherwise texts without a word in common
      score 0, but for two of nothing but space.

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.
      MissingExtraError: If the sacrebleu package is missing.

    Source: Papineni et al. (2002), "BLEU"; smoothing 3 of Chen and Cherry (2014); as computed by sacrebleu
    (case:mixed, eff:yes, tok:13a, smooth:exp).

    >>> round(sentence_bleu("the cat sat on the mat", ["the cat sat"]), 4)
    0.3021
    """
    return best_over_references(_bleu_score, candidate, references=references, sight=SENTENCE_BLEU_SIGHT)


def _bleu_score(candidate: str, reference: str) -> float:
    if candidate == reference:
        return 1.0
    found = _bleu_scorer().sentence_score(candidate, [reference])
    if not any(found.counts):
        return 0.0
    # sacrebleu's own score is made with the system's exp and log, which differ in their last digits between processors;
    # losses are rounded up, and one last digit more can be a step more. Those of decimal are rounded correctly.
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
    return _sacrebleu_metrics(needed_for="sentence_bleu").BLEU(
        tokenize="13a", smooth_method="exp", effective_order=True
    )


def edit_distance(candidate: str, references: Sequence[str]) -> float:
    """Returns 1 - distance / length of the longer text, best over references.

    The distance is Levenshtein's over Unicode characters: insertions, deletions and substitutions count 1 each.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      A score in [0, 1]. Identical texts score 1, two empty ones too; an empty text against another scores 0.

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.
      MissingExtraError: If the rapidfuzz package is missing.

    Source: Levenshtein (1966), "Binary codes capable of correcting deletions, insertions and reversals", as computed by
    rapidfuzz.

    >>> edit_distance("kitten", ["sitting"])
    0.5714285714285714
    """
    return best_over_references(_similarity, candidate, references=references, sight=EDIT_DISTANCE_SIGHT)


def _similarity(candidate: str, reference: str) -> float:
    rapidfuzz = imported("rapidfuzz.distance", extra="metrics", needed_for='the metric "edit_distance"')
    return float(rapidfuzz.Levenshtein.normalized_similarity(candidate, reference))


def _sacrebleu_metrics(*, needed_for: str) -> Any:
    """Returns sacrebleu's module of metrics; raises MissingExtraError if the package is missing."""
    return imported("sacrebleu.metrics", extra="metrics", needed_for=f'the metric "{needed_for}"')


def _fraction_score(scorer: Any, candidate: str, *, reference: str) -> float:
    """Returns the score of a candidate against one reference, as a fraction in [0, 1]."""
    # Equal words give 100.00000000000004.
    return float(min(1.0, scorer.sentence_score(candidate, [reference]).score / 100))
