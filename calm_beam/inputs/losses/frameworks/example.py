"""What every framework's log is read as."""

import dataclasses
import glob
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from calm_beam.inputs.losses.tables import name_of
from calm_beam.risk.testing import LossesError
from calm_beam.storage import is_cloud_path, open_input, strict_json

# Where a framework has written an object that is no JSON, such as a picture, as Python shows it.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredExample:
    """The scores of one example in one run; an example may come in several, each with other metrics.

    Attributes:
      id: Of the example.
      scores: By metric; whatever the log holds for a number, which it need not be.
      content: Digest of what was asked, which tells the example from others of its id; None where the log does not say.
      cluster: The cluster it was drawn with; None where nobody asks.
      graded: The metrics whose score is a grade by which higher is better, such as C for correct.
    """

    id: str
    scores: Mapping[str, object]
    content: str | None = None
    cluster: str | None = None
    graded: frozenset[str] = frozenset()


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

    def higher_is_better(self, path: str, metric: str) -> bool | None:
        """Returns what the framework's files say of a metric; None where they say nothing.

        Raises:
          LossesError: If one of them is damaged, or they disagree; names the file.
        """
        ...

    def examples(self, path: str, *, cluster_key: str | None = None) -> Iterator[ScoredExample]:
        """Yields the examples of a log.

        Args:
          path: The log.
          cluster_key: Where in the record of an example its cluster is, with dots between the levels; None: nowhere.

        Raises:
          LossesError: If it is damaged, or not complete; names the file.
        """
        ...


def digest_of_asked(*parts: object) -> str:
    """Returns a digest of what was asked of an example, the same in every run that asked it.

    Args:
      parts: Plain values, such as the prompt, the choices and the right answer.
    """
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(_ADDRESS.sub(">", text).encode()).hexdigest()


def cluster_of(record: object, key: str, *, where: str) -> str:
    """Returns the cluster that a record names.

    Args:
      record: What a framework has written of an example.
      key: Where in it, with dots between the levels, such as `metadata.passage`; keys may have dots of their own.
      where: File and record, for messages.

    Raises:
      LossesError: If nothing is there, or no name.

    >>> cluster_of({"doc": {"a.b": "p1"}}, "doc.a.b", where="log")
    'p1'
    """
    value, rest = record, key
    while isinstance(value, Mapping):
        # The longest key that is there, since keys may have dots.
        ends = [len(rest), *(match.start() for match in reversed(list(re.finditer(r"\.", rest))))]
        found = next((rest[:end] for end in ends if rest[:end] in value), None)
        if found is None:
            break
        value, rest = value[found], rest[len(found) + 1 :]
        if not rest:
            break
    if rest or value in (None, ""):
        raise LossesError(f"{where}: has no {key}, which --cluster_key names. Every example needs its cluster.")
    return name_of(value, key, where=where)


def loaded_object(path: str) -> Mapping[str, Any]:
    """Returns the object in a JSON file of a framework.

    Raises:
      LossesError: If it is damaged, or holds none.
    """
    with open_input(path) as file:
        try:
            value = strict_json.loads(file.read(), constants_allowed=True)
        except strict_json.StrictJSONError as error:
            raise LossesError(f"{path}: {error}.") from error
    if not isinstance(value, dict):
        raise LossesError(f"{path}: expected an object.")
    return value


def agreed(said: Mapping[str, bool], metric: str) -> bool | None:
    """Returns what files say of a metric; None for no file.

    Args:
      said: By file, whether it says that higher is better.
      metric: The metric.

    Raises:
      LossesError: If they disagree.
    """
    if len(set(said.values())) > 1:
        raise LossesError(
            f"{' and '.join(said)}: disagree on whether a higher {metric} is better. Keep the one that belongs to the "
            "run."
        )
    return next(iter(said.values()), None)


def glob_of(folder: str) -> str:
    """Returns a folder as the beginning of a glob: signs of globs in its name stand for themselves."""
    return folder if is_cloud_path(folder) else glob.escape(folder)
