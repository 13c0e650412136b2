"""Token-F1: the overlap of two answers as bags of words."""

import collections
from collections.abc import Sequence

from calm_beam.metrics import best_over_references
from calm_beam.metrics.exact_match import SQUAD_SIGHT, normalize_squad_text


def token_f1(candidate: str, references: Sequence[str]) -> float:
    """Returns the F1 of precision and recall over words, best over references, under SQuAD's normalisation.

    Official SQuAD differs only in numbers and formulas, where it drops signs and points, so that -5 equals 5, 3.14
    equals 314 and x+y equals x-y (`normalize_squad_text`), and in texts without any word, which it takes for equal.
    Here those are equal if they are so apart from white space around them.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      A score in [0, 1]. A text without any word scores 0 against one with words.

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.

    Source: Rajpurkar et al. (2016), "SQuAD", the official evaluation script's `f1_score`; the metric of CALM for
    question answering.

    >>> token_f1("the black cat", ["dog", "a cat"])
    0.6666666666666666
    """
    return best_over_references(_score, candidate, references=references, sight=SQUAD_SIGHT)


def _score(candidate: str, reference: str) -> float:
    ours = normalize_squad_text(candidate).split()
    theirs = normalize_squad_text(reference).split()
    overlap = (collections.Counter(ours) & collections.Counter(theirs)).total()
    # 2 P R / (P + R) with P = overlap / ours and R = overlap / theirs, rounded once.
    return 2 * overlap / (len(ours) + len(theirs))
