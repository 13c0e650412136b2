"""What every framework's log is read as."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredExample:
    """The scores of one example in one run; an example may come in several, each with other metrics.

    Attributes:
      id: Of the example.
      scores: By metric; whatever the log holds for a number, which it need not be.
      content: What tells the example from others of its id, such as a digest; None where the log does not say.
    """

    id: str
    scores: Mapping[str, object]
    content: str | None = None


class ScoreFormat(Protocol):
    """A framework's log of single examples.

    Attributes:
      name: Of the framework.
      files: Globs of its logs' names.
    """

    name: str
    files: tuple[str, ...]

    def is_of(self, path: str) -> bool:
        """Returns whether a file is such a log, by what it begins with."""
        ...

    def task(self, path: str) -> str:
        """Returns the task that a log is of."""
        ...

    def examples(self, path: str) -> Iterator[ScoredExample]:
        """Yields the examples of a log.

        Raises:
          LossesError: If it is damaged, or not complete; names the file.
        """
        ...
