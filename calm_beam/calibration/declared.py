"""The examples that may be evaluated, declared before any of them is: in which order, and in which rounds.

Examples, or whole clusters of them, are ordered by a salted hash of their names, so no loss and nobody's choice decides
which come first. A round ends with the example or cluster that makes it as many examples as were asked for.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from calm_beam.inputs.losses.rows import check_there, name_of
from calm_beam.inputs.losses.shown import named
from calm_beam.outputs.fingerprint import fingerprint_text
from calm_beam.risk.evidence import betting_order
from calm_beam.risk.setting_sums import LossesError
from calm_beam.risk.totals import sum_of_digests


@dataclasses.dataclass(frozen=True, slots=True)
class DeclaredExample:
    """An example that may be evaluated.

    Attributes:
      id: Its id.
      group: Its group; None where nobody asks.
      cluster: Its cluster; None where nobody asks.
    """

    id: str
    group: str | None = None
    cluster: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdReading:
    """How rows of declared examples are read.

    Attributes:
      group_key: Column that names the group; None: groups are not asked for.
      cluster_key: Column that names the cluster; None: neither are clusters.
    """

    group_key: str | None = None
    cluster_key: str | None = None

    kind: ClassVar[str] = "ids"
    needs: ClassVar[str] = "id"
    optional: ClassVar[tuple[str, ...]] = ()
    of_line: ClassVar[str] = "id"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are looked at."""
        return ("id", *(key for key in (self.group_key, self.cluster_key) if key is not None))

    def row(self, values: Mapping[str, Any], *, where: str) -> DeclaredExample:
        """Returns the example in a row.

        Args:
          values: By column.
          where: File and row, for messages.

        Raises:
          LossesError: If a column is missing, a value is no name, or an id has several lines: those that are to be
            evaluated are written one a line.
        """
        check_there(values, self, where=where)
        name = name_of(values["id"], "id", where=where)
        if name.splitlines() != [name]:
            raise LossesError(f"{where}: id {name!r} has a line break, and ids are listed one a line. Rename it.")
        return DeclaredExample(
            name,
            None if self.group_key is None else name_of(values[self.group_key], self.group_key, where=where),
            None if self.cluster_key is None else name_of(values[self.cluster_key], self.cluster_key, where=where),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeclaredExamples:
    """All examples that may be evaluated, in the order in which they count.

    Attributes:
      ids: Of the examples.
      groups: Of each; None where nobody asked.
      clusters: Of each, so that those of a cluster follow each other; None where nobody asked.
      ends: For every round, the number of examples up to its end.
      fingerprint: Identifies the examples with groups and clusters, in whatever order they were declared.
    """

    ids: tuple[str, ...]
    groups: tuple[str, ...] | None
    clusters: tuple[str, ...] | None
    ends: tuple[int, ...]
    fingerprint: str

    @classmethod
    def of(cls, rows: Iterable[DeclaredExample], *, salt: str, round_examples: int) -> Self:
        """Returns declared examples in their order.

        Args:
          rows: The examples.
          salt: Decides the order; settled before any loss is known.
          round_examples: At least 1.

        Raises:
          LossesError: If there are none, or one is declared twice; names it.
        """
        examples = list(rows)
        if not examples:
            raise LossesError("there are no ids.")
        counts = collections.Counter(each.id for each in examples)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise LossesError(f"{named(twice, 'id')} declared several times. Name every example once.")
        is_clustered = examples[0].cluster is not None
        ordered = _by_cluster(examples, salt=salt) if is_clustered else _in_order(examples, salt=salt)
        sizes = (
            [sum(1 for _ in members) for _, members in itertools.groupby(each.cluster for each in ordered)]
            if is_clustered
            else [1] * len(ordered)
        )
        return cls(
            ids=tuple(each.id for each in ordered),
            groups=None if ordered[0].group is None else tuple(str(each.group) for each in ordered),
            clusters=tuple(str(each.cluster) for each in ordered) if is_clustered else None,
            ends=_ends(sizes, round_examples=round_examples),
            fingerprint=fingerprint_text(sum_of_digests(b"".join(map(_digest, ordered)))),
        )

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.ends)

    def round(self, number: int) -> slice:
        """Returns where the examples of a round are; rounds count from 0."""
        return slice(self.ends[number - 1] if number else 0, self.ends[number])


def _in_order(examples: Sequence[DeclaredExample], *, salt: str) -> list[DeclaredExample]:
    return [examples[index] for index in betting_order([each.id for each in examples], salt=salt).tolist()]


def _by_cluster(examples: Sequence[DeclaredExample], *, salt: str) -> list[DeclaredExample]:
    names = sorted({str(each.cluster) for each in examples})
    ranks = {names[index]: rank for rank, index in enumerate(betting_order(names, salt=salt).tolist())}
    return sorted(examples, key=lambda each: (ranks[str(each.cluster)], each.id))


def _ends(sizes: Sequence[int], *, round_examples: int) -> tuple[int, ...]:
    """Returns the ends of rounds made of units of these sizes.

    >>> _ends([2, 2, 3, 1, 1], round_examples=3)
    (4, 7, 9)
    """
    ends, start, count = [], 0, 0
    for size in sizes:
        count += size
        if count - start >= round_examples:
            ends.append(count)
            start = count
    return tuple(ends) if count == start else (*ends, count)


def _digest(example: DeclaredExample) -> bytes:
    # JSON, so that no name and group run together as others do.
    return hashlib.sha256(json.dumps([example.id, example.group, example.cluster]).encode()).digest()
