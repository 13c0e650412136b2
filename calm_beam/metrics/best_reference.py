"""Scoring against several references: the best one counts."""

from collections.abc import Callable, Sequence

from calm_beam.metrics.sight import Metric as Metric
from calm_beam.metrics.sight import Sight, equal_when_stripped


def best_over_references(
    score: Callable[[str, str], float], candidate: str, *, references: Sequence[str], sight: Sight
) -> float:
    """Returns the highest score of the candidate against any one reference.

    Of two texts in which the metric sees no token it cannot tell how alike they are. They score 1 if they are equal but
    for white space around them, else 0, whatever `score` would give.

    Args:
      score: Takes (candidate, reference), returns a score in [0, 1].
      candidate: The text to score.
      references: At least one text.
      sight: How the metric sees a text.

    Returns:
      A score in [0, 1].

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.

    Source: CALM Eq. 2 (Z is a set of references); the official SQuAD script takes the best over them.

    >>> words = Sight(tokens=str.split)
    >>> best_over_references(lambda a, b: float(a == b), "yes", references=["no", "yes"], sight=words)
    1.0
    """
    # A string is a sequence of strings: without this check each of its letters would be a reference.
    if isinstance(references, str):
        raise TypeError(f"references must be a list of strings, got the string {references!r}. Put it in a list.")
    if not references:
        raise ValueError("references must hold at least one text, got none. Risk consistency needs gold references.")
    if sight.sees(candidate):
        return max(score(candidate, reference) for reference in references)
    return max(
        score(candidate, reference) if sight.sees(reference) else float(equal_when_stripped(candidate, reference))
        for reference in references
    )
