"""Scoring against several references: the best one counts."""

from collections.abc import Callable, Sequence

Metric = Callable[[str, Sequence[str]], float]
"""Takes a candidate and its references, returns a score in [0, 1], 1 being best."""


def best_over_references(score: Callable[[str, str], float], candidate: str, *, references: Sequence[str]) -> float:
    """Returns the highest score of the candidate against any one reference.

    Args:
      score: Takes (candidate, reference), returns a score in [0, 1].
      candidate: The text to score.
      references: At least one text.

    Returns:
      A score in [0, 1].

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.

    Source: CALM Eq. 2 (Z is a set of references); the official SQuAD script takes the best over them.

    >>> best_over_references(lambda a, b: float(a == b), "yes", references=["no", "yes"])
    1.0
    """
    # A string is a sequence of strings: without this check each of its letters would be a reference.
    if isinstance(references, str):
        raise TypeError(f"references must be a list of strings, got the string {references!r}. Put it in a list.")
    if not references:
        raise ValueError("references must hold at least one text, got none. Risk consistency needs gold references.")
    return max(score(candidate, reference) for reference in references)
