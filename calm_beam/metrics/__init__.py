"""Text metrics: each maps (candidate, references) to a score in [0, 1], 1 being best.

`calm_beam.metrics.registry.get_metric` returns a metric by name. This module has what all metrics share: the tokens
that a metric sees of a text, the rule for texts without any, the best score over several references, and the settings.
"""

import abc
import dataclasses
import unicodedata
from collections.abc import Callable, Iterable, Sequence

Metric = Callable[[str, Sequence[str]], float]
"""Takes a candidate and its references, returns a score in [0, 1], 1 being best."""

Tokens = Callable[[str], Iterable[str]]
"""Takes a text, returns parts of it in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sight:
    """The part of a text that a metric sees.

    Attributes:
      tokens: Returns the tokens that the metric compares; none for a text that it does not see.
      read: Returns what its tokeniser reads, if that is more because the metric leaves out articles on purpose. None
        for the same as `tokens`.
    """

    tokens: Tokens
    read: Tokens | None = None

    def sees(self, text: str) -> bool:
        """Returns whether the metric sees any token of a text."""
        return next(iter(self.tokens(text)), None) is not None

    def is_blind(self, candidate: str, references: Sequence[str]) -> bool:
        """Returns whether a candidate's score is 0 only because the metric cannot distinguish the texts.

        That is so if the candidate equals no reference, apart from white space around them, and the metric sees no
        token of it, nor of one of the references.

        >>> sight = Sight(tokens=str.split)
        >>> sight.is_blind("", ["a word"]), Sight(tokens=lambda text: []).is_blind("yes", ["no"])
        (False, True)
        """
        if self.sees(candidate) or all(map(self.sees, references)):
            return False
        return not any(equal_when_stripped(candidate, reference) for reference in references)

    def drops_letters(self, text: str) -> bool:
        """Returns whether the tokeniser drops more than half of a text's letters and digits of any script."""
        # Unicode categories L and N. Folding may turn one letter into two, never into fewer.
        return 2 * sum(map(_letters, (self.read or self.tokens)(text))) < _letters(text)


class Sighted(abc.ABC):
    """A metric that tells which part of a text it sees."""

    @property
    @abc.abstractmethod
    def sight(self) -> Sight:
        """The part of a text that it sees."""


@dataclasses.dataclass(frozen=True)
class SightedMetric(Sighted):
    """A metric made of a function and its sight.

    Attributes:
      score: The function.
      seen: The part of a text that the function sees.
      is_binary: Whether every score is 0 or 1.
    """

    score: Metric
    _: dataclasses.KW_ONLY
    seen: Sight
    is_binary: bool = False

    def __call__(self, candidate: str, references: Sequence[str]) -> float:
        """Returns the score, in [0, 1]."""
        return self.score(candidate, references)

    @property
    def sight(self) -> Sight:
        """The part of a text that it sees."""
        return self.seen


def sight_of(metric: Metric) -> Sight | None:
    """Returns a metric's sight; None for a user's own metric, which does not tell."""
    return metric.sight if isinstance(metric, Sighted) else None


def equal_when_stripped(one: str, other: str) -> bool:
    """Returns whether two texts are equal apart from white space around them."""
    return one.strip() == other.strip()


def _letters(text: str) -> int:
    return sum(unicodedata.category(character)[0] in "LN" for character in text)


def best_over_references(
    score: Callable[[str, str], float], candidate: str, *, references: Sequence[str], sight: Sight
) -> float:
    """Returns the highest score of the candidate against any one reference.

    A metric that sees no token in two texts cannot tell how similar they are. They then score 1 if they are equal apart
    from white space around them, else 0, whatever `score` would give.

    Args:
      score: Takes (candidate, reference), returns a score in [0, 1].
      candidate: The text to score.
      references: At least one text.
      sight: The part of a text that the metric sees.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricSettings:
    """Files that metrics need; sent to workers.

    Attributes:
      bleurt_checkpoint: Folder of a BLEURT checkpoint, local or on Cloud Storage; None without one.
    """

    bleurt_checkpoint: str | None = None


NO_SETTINGS = MetricSettings()
