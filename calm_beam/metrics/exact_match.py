"""Exact match: whether two answers are the same once case, punctuation and articles are set aside."""

from collections.abc import Sequence

from calm_beam.metrics.best_reference import best_over_references
from calm_beam.metrics.squad_text import SQUAD_SIGHT, normalize_squad_text


def exact_match(candidate: str, references: Sequence[str]) -> float:
    """Returns 1 if the candidate equals any reference under SQuAD's normalisation, else 0.

    Official SQuAD differs only in numbers and formulas: it drops signs and points, so that -5 equals 5, 3.14 equals 314
    and x+y equals x-y (`normalize_squad_text`); and in texts without any word, which are all equal there. Here they are
    if they are equal but for white space around them.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      0.0 or 1.0.

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.

    Source: Rajpurkar et al. (2016), "SQuAD", the official evaluation script's `exact_match_score`.

    >>> exact_match("the Cat!", ["dog", "cat"])
    1.0
    """
    return best_over_references(_score, candidate, references=references, sight=SQUAD_SIGHT)


def _score(candidate: str, reference: str) -> float:
    return float(normalize_squad_text(candidate) == normalize_squad_text(reference))
