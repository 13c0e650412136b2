"""chrF: the share of short character n-grams that two texts have in common, as sacrebleu scores single texts."""

import functools
from collections.abc import Sequence
from typing import Any

from calm_beam.extras import imported
from calm_beam.metrics import Sight, best_over_references

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
    return best_over_references(_score, candidate, references=references, sight=CHRF_SIGHT)


def _score(candidate: str, reference: str) -> float:
    if candidate == reference:
        return 1.0
    # Equal words give 100.00000000000004.
    return float(min(1.0, _scorer().sentence_score(candidate, [reference]).score / 100))


@functools.cache
def _scorer() -> Any:
    return imported("sacrebleu.metrics", extra="metrics", needed_for='the metric "chrf"').CHRF(
        char_order=6, word_order=0, beta=2
    )
