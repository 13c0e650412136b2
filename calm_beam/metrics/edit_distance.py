"""Edit distance as a similarity: the share of characters that need no change."""

from collections.abc import Sequence

from calm_beam.extras import imported
from calm_beam.metrics import Sight, best_over_references

EDIT_DISTANCE_SIGHT = Sight(tokens=iter)
"""Every character, including spaces."""


def edit_distance(candidate: str, references: Sequence[str]) -> float:
    """Returns 1 - distance / length of the longer text, best over references.

    The distance is Levenshtein's over Unicode characters: insertions, deletions and substitutions count 1 each.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      A score in [0, 1]. Identical texts score 1, also two empty ones; an empty text against another scores 0.

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.
      MissingExtraError: If the rapidfuzz package is missing.

    Source: Levenshtein (1966), "Binary codes capable of correcting deletions, insertions and reversals", as computed by
    rapidfuzz.

    >>> edit_distance("kitten", ["sitting"])
    0.5714285714285714
    """
    return best_over_references(_score, candidate, references=references, sight=EDIT_DISTANCE_SIGHT)


def _score(candidate: str, reference: str) -> float:
    rapidfuzz = imported("rapidfuzz.distance", extra="metrics", needed_for='the metric "edit_distance"')
    return float(rapidfuzz.Levenshtein.normalized_similarity(candidate, reference))
