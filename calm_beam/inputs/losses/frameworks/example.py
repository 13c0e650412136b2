"""The common form of all frameworks' logs."""

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

# Frameworks write an object that is not JSON, such as a picture, in Python's notation.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredExample:
    """The scores of one example in one run; an example may come several times, each time with other metrics.

    Attributes:
      id: Id of the example.
      scores: By metric, the log's values, which need not be numbers.
      content: Digest of the question, to distinguish examples with equal ids; None if the log does not have it.
      cluster: The cluster it was drawn with; None if clusters are not requested.
      graded: The metrics whose score is a grade, such as C for correct, for which higher is better.
    """

    id: str
    scores: Mapping[str, object]
    content: str | None = None
    cluster: str | None = None
    graded: frozenset[str] = frozenset()


class ScoreFormat(Protocol):
    """A framework's log of single examples.

    Attributes:
      name: Name of the framework.
      files: Globs of its logs' names.
    """

    name: str
    files: tuple[str, ...]

    def is_of(self, path: str) -> bool:
        """Returns whether a file is such a log, by its beginning."""
        ...

    def task(self, path: str) -> str:
        """Returns the task of a log."""
        ...

    def higher_is_better(self, path: str, metric: str) -> bool | None:
        """Returns what the framework's files say about a metric; None if nothing.

        Raises:
          LossesError: If one of them is damaged, or they disagree; names the file.
        """
        ...

    def examples(self, path: str, *, cluster_key: str | None = None) -> Iterator[ScoredExample]:
        """Yields the examples of a log.

        Args:
          path: The log.
          cluster_key: Path of the cluster in an example's record, with dots between levels; None reads none.

        Raises:
          LossesError: If it is damaged, or not complete; names the file.
        """
        ...


def digest_of_asked(*parts: object) -> str:
    """Returns a digest of an example's question, the same in every run with that question.

    Args:
      parts: Plain values, such as the prompt, the choices and the right answer.
    """
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(_ADDRESS.sub(">", text).encode()).hexdigest()


def cluster_of(record: object, key: str, *, where: str) -> str:
    """Returns the cluster in a record.

    Args:
      record: A framework's record of an example.
      key: Path of the cluster in it, with dots between levels, such as `metadata.passage`; keys may contain dots.
      where: File and record, for messages.

    Raises:
      LossesError: If there is no value, or it is not a name.

    >>> cluster_of({"doc": {"a.b": "p1"}}, "doc.a.b", where="log")
    'p1'
    """
    value, rest = record, key
    while isinstance(value, Mapping):
        # The longest existing key, since keys may contain dots.
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
    """Returns the object in a framework's JSON file.

    Raises:
      LossesError: If it is damaged, or is not an object.
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
    """Returns what files say about a metric; None without files.

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
    """Returns a folder as the beginning of a glob, with the wildcards in its name escaped."""
    return folder if is_cloud_path(folder) else glob.escape(folder)
