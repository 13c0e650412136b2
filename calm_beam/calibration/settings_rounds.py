"""The rounds of a watched certification: declared examples, evaluated ones, and the state kept between calls.

The examples that may be evaluated are declared before any of them is evaluated, with their order and rounds. Examples,
or whole clusters of them, are ordered by a salted hash of their names, so no loss and no choice decides which come
first. A round ends with the example or cluster that brings it to the requested number of examples. Only the leading
whole rounds count; the losses that are still missing are reported.

A file keeps what was settled and counted, from one call to the next. All proofs are computed again from the losses at
every call. The file is there to refuse anything that would void them: a plan changed after losses were seen, and
changed losses of a counted round.
"""

import array
import collections
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from calm_beam.errors import UsageError
from calm_beam.inputs.losses.tables import LossRow, check_there, name_of, named
from calm_beam.manifest import EarlierEnd, ManifestError, SettingManifest, SettingPlan, content_digest
from calm_beam.outputs.totals import fingerprint_text
from calm_beam.risk.evidence import betting_order, sum_of_digests
from calm_beam.risk.testing import LossesError
from calm_beam.storage import is_file, open_input, strict_json
from calm_beam.storage.strict_json import write_sealed
from calm_beam.text import counted

from .loss_table import LossTable, check_every_cost, loss_fingerprint


@dataclasses.dataclass(frozen=True, slots=True)
class DeclaredExample:
    """An example that may be evaluated.

    Attributes:
      id: Its id.
      group: Its group; None if groups are not asked for.
      cluster: Its cluster; None if clusters are not asked for.
    """

    id: str
    group: str | None = None
    cluster: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdReading:
    """How rows of declared examples are read.

    Attributes:
      group_key: Column that names the group; None if groups are not asked for.
      cluster_key: Column that names the cluster; None if clusters are not asked for.
    """

    group_key: str | None = None
    cluster_key: str | None = None

    kind: ClassVar[str] = "ids"
    needs: ClassVar[str] = "id"
    optional: ClassVar[tuple[str, ...]] = ()
    of_line: ClassVar[str] = "id"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        return ("id", *(key for key in (self.group_key, self.cluster_key) if key is not None))

    def row(self, values: Mapping[str, Any], *, where: str) -> DeclaredExample:
        """Returns the example in a row.

        Args:
          values: Values by column.
          where: File and row, for messages.

        Raises:
          LossesError: If a column is missing, a value is not a name, or an id has several lines: declared examples are
            written one a line.
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
    """All examples that may be evaluated, in counting order.

    Attributes:
      ids: Ids of the examples.
      groups: Group of each example; None if groups are not asked for.
      clusters: Cluster of each example, with clusters in one piece; None if clusters are not asked for.
      ends: For every round, the number of examples up to its end.
      fingerprint: Fingerprint of the examples with groups and clusters, whatever the order of declaration.
    """

    ids: tuple[str, ...]
    groups: tuple[str, ...] | None
    clusters: tuple[str, ...] | None
    ends: tuple[int, ...]
    fingerprint: str

    @classmethod
    def of(cls, rows: Iterable[DeclaredExample], *, salt: str, round_examples: int) -> Self:
        """Returns declared examples in counting order.

        Args:
          rows: The examples.
          salt: Decides the order; settled before any loss is known.
          round_examples: At least 1.

        Raises:
          LossesError: If there are none, or one is declared twice; names the example.
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
        """Returns the slice of the examples of a round; rounds count from 0."""
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
    # JSON keeps fields apart: plainly joined, different names and groups could give the same bytes.
    return hashlib.sha256(json.dumps([example.id, example.group, example.cluster]).encode()).digest()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedLosses:
    """The losses that count: those of the leading rounds in which every example has a loss under every setting.

    Attributes:
      rounds: The losses of every whole round before the first incomplete one, in order.
      costs: After each of these rounds, the mean cost of every setting whose rows give one.
      missing: For every other round, the ids that lack a loss under some setting, in order.
      lacking: The settings under which some example of the first of these rounds lacks a loss, ascending.
      waiting: Number of losses that are present and do not count yet.
    """

    rounds: tuple[LossTable, ...]
    costs: tuple[Mapping[str, float], ...]
    missing: tuple[tuple[str, ...], ...]
    lacking: tuple[str, ...]
    waiting: int

    @classmethod
    def of(cls, rows: Iterable[LossRow], declared: DeclaredExamples, *, settings: Sequence[str]) -> Self:
        """Returns the losses of the declared examples from rows.

        Args:
          rows: Losses, in any order; groups and clusters are those that were declared.
          declared: All examples that may be evaluated.
          settings: All settings that may be evaluated.

        Raises:
          LossesError: If an example or setting was not declared, an example has several losses under a setting, or only
            some rows of a setting give a cost; names them.
        """
        names = sorted(settings)
        losses, costs = _filled(rows, declared, names)
        has_none = np.isnan(losses)
        is_there = ~has_none.any(axis=1)
        whole = list(itertools.takewhile(lambda number: is_there[declared.round(number)].all(), range(declared.rounds)))
        end = declared.ends[whole[-1]] if whole else 0
        rest = range(len(whole), declared.rounds)
        following = has_none[declared.round(len(whole))] if rest else has_none[:0]
        return cls(
            rounds=tuple(_round(losses, declared, names, declared.round(number)) for number in whole),
            costs=_mean_costs(costs[:end], names, [declared.round(number) for number in whole]),
            missing=tuple(
                tuple(itertools.compress(declared.ids[declared.round(number)], ~is_there[declared.round(number)]))
                for number in rest
            ),
            lacking=tuple(itertools.compress(names, following.any(axis=0))),
            waiting=int((~has_none[end:]).sum()),
        )

    def digests(self) -> tuple[str, ...]:
        """Returns for every counted round a digest of its examples, their losses, and the costs up to its end."""
        return tuple(
            content_digest(
                {"losses": {name: f"{value:064x}" for name, value in each.fingerprints.items()}, "costs": dict(costs)}
            )
            for each, costs in zip(self.rounds, self.costs, strict=True)
        )

    def in_words(self) -> str:
        """Returns as text what the first incomplete round lacks, and what waits for it; empty if there is none."""
        if not self.missing:
            return ""
        lacks = (
            f"round {len(self.rounds) + 1} lacks losses of {named(self.missing[0], 'id')} under "
            f"{named(self.lacking, 'setting')}"
        )
        if not self.waiting:
            return lacks
        return f"{lacks}; {counted(self.waiting, 'loss', several='losses')} of this or later rounds cannot count before"


def _filled(
    rows: Iterable[LossRow], declared: DeclaredExamples, settings: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns losses and costs, each of shape (examples, settings), NaN where there is none."""
    width, size = len(settings), len(declared.ids) * len(settings)
    places = {name: index * width for index, name in enumerate(declared.ids)}
    columns = {name: index for index, name in enumerate(settings)}
    losses, costs = array.array("d", [math.nan]) * size, array.array("d", [math.nan]) * size
    unknown: dict[str, None] = {}
    others: dict[str, None] = {}
    repeated: dict[str, dict[str, None]] = {}
    for row in rows:
        place, column = places.get(row.id), columns.get(row.setting)
        if place is None:
            unknown[row.id] = None
        elif column is None:
            others[row.setting] = None
        elif not math.isnan(losses[place + column]):
            repeated.setdefault(row.setting, {})[row.id] = None
        else:
            losses[place + column] = row.loss
            if row.cost is not None:
                costs[place + column] = row.cost
    if unknown:
        raise LossesError(
            f"there are losses of {named(unknown, 'id')} that --ids does not declare. Which examples may be evaluated "
            "is settled before any of them is."
        )
    if others:
        raise LossesError(
            f"there are losses of {named(others, 'setting')} that --order does not name. Which settings are tested is "
            "settled before any of them is."
        )
    for setting, ids in repeated.items():
        raise LossesError(f"setting {setting!r} has several losses for {named(ids, 'id')}. Take one of them out.")
    shape = len(declared.ids), width
    return np.frombuffer(losses).reshape(shape), np.frombuffer(costs).reshape(shape)


def _round(losses: np.ndarray, declared: DeclaredExamples, settings: Sequence[str], place: slice) -> LossTable:
    ids = declared.ids[place]
    return LossTable(
        ids=ids,
        settings=tuple(settings),
        losses=losses[place],
        groups=None if declared.groups is None else declared.groups[place],
        clusters=None if declared.clusters is None else declared.clusters[place],
        fingerprints={name: loss_fingerprint(ids, losses[place, column]) for column, name in enumerate(settings)},
    )


def _mean_costs(costs: np.ndarray, settings: Sequence[str], rounds: Sequence[slice]) -> tuple[dict[str, float], ...]:
    """Returns for every round the mean costs up to its end, for settings whose rows give one."""
    of_setting: dict[str, list[float]] = {}
    for column, name in enumerate(settings):
        told = costs[:, column]
        if not np.isnan(told).all():
            check_every_cost(name, rows=len(told), told=int((~np.isnan(told)).sum()))
            of_setting[name] = _running_means(told, rounds)
    return tuple({name: means[index] for name, means in of_setting.items()} for index in range(len(rounds)))


def _running_means(told: np.ndarray, rounds: Sequence[slice]) -> list[float]:
    sums: list[float] = []
    means = []
    is_constant = True
    for place in rounds:
        sums.append(math.fsum(told[place].tolist()))
        is_constant = is_constant and bool((told[place] == told[0]).all())
        # The mean of equal costs is exactly that cost.
        means.append(float(told[0]) if is_constant else math.fsum(sums) / place.stop)
    return means


LEDGER = "plan.json"
_LEDGER_SCHEMA = "calm-beam/certifying/v1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """The state settled and counted up to now.

    Attributes:
      plan: The plan.
      rounds: For every round that was looked at, a digest of its losses.
      continues: Where earlier rules had stopped; the earliest first.
    """

    plan: SettingPlan
    rounds: tuple[str, ...] = ()
    continues: tuple[EarlierEnd, ...] = ()

    def going_on(self, plan: SettingPlan, *, ended: SettingManifest | None, resumes: bool) -> Self:
        """Returns the ledger of a call that asks for a plan.

        Args:
          plan: The plan asked for now.
          ended: The manifest with which the settled plan ended; None if it has not ended.
          resumes: Whether to continue with another rule after the settled rule has stopped.

        Raises:
          UsageError: If the plan differs from the settled one.
        """
        assert plan.sequential is not None
        if plan.digest == self.plan.digest:
            return self
        if plan.without_rule().digest != self.plan.without_rule().digest:
            raise UsageError(
                f"the plan was settled at the first call, and {' and '.join(_differing(plan, self.plan))} of it cannot "
                "be changed: losses may have been seen since. Ask for what was settled, or begin again in another "
                "--output, with other examples."
            )
        if ended is None or ended.sequential is None:
            raise UsageError(
                "the rule to stop is part of the plan, and another one was settled at the first call. Ask for that "
                "one. Once it has stopped, --resume goes on by another."
            )
        if ended.sequential.rounds == ended.sequential.of_rounds:
            raise UsageError("all examples have been counted, so that no rule goes on from there.")
        if not resumes:
            raise UsageError("it had stopped by another rule to stop. --resume goes on by this one, and says so.")
        end = EarlierEnd(plan=self.plan.digest, rounds=ended.sequential.rounds, ended_by=ended.sequential.ended_by)
        return dataclasses.replace(self, plan=plan, continues=(*self.continues, end))

    def with_rounds(self, digests: Sequence[str], *, missing: str) -> Self:
        """Returns the ledger after some rounds were looked at.

        Args:
          digests: Digests of their losses.
          missing: What the losses lack for another round, as text.

        Raises:
          LossesError: If a round that was looked at before is missing, or its losses have changed.
        """
        for number, before in enumerate(self.rounds, start=1):
            if number > len(digests):
                raise LossesError(
                    f"round {number} was counted before, and is not whole now: {missing}. Restore its losses."
                )
            if digests[number - 1] != before:
                raise LossesError(
                    f"the losses or costs of round {number} are others than they were when it was counted. What was "
                    "seen must not be changed: restore them."
                )
        return dataclasses.replace(self, rounds=tuple(digests))

    def write(self, path: str, *, replaces: str) -> None:
        """Writes the file atomically.

        Args:
          path: Its name.
          replaces: Its version when the call began, empty if there was none.

        Raises:
          UsageError: If another call has written it since.
        """
        content: dict[str, object] = {
            "schema": _LEDGER_SCHEMA,
            "plan": self.plan.to_dict(),
            "rounds": list(self.rounds),
            "continues": [end.to_dict() for end in self.continues],
        }
        try:
            write_sealed(path, content, replaces=replaces)
        except FileExistsError:
            raise UsageError(f"{path}: another call has written it meanwhile. Repeat this one.") from None

    @classmethod
    def read(cls, path: str) -> Self | None:
        """Returns the ledger in a file; None if there is no file.

        Raises:
          UsageError: If the file is damaged.
        """
        if not is_file(path):
            return None
        try:
            with open_input(path) as file:
                content = strict_json.loads(file.read())
            if content["schema"] != _LEDGER_SCHEMA or content["digest"] != content_digest(content):
                raise ValueError("it was changed after it was written")
            plan = SettingPlan.from_dict(content["plan"], at="plan")
            if plan.sequential is None:
                raise ValueError("its plan is not sequential")
            return cls(
                plan=plan,
                rounds=tuple(map(str, content["rounds"])),
                continues=tuple(EarlierEnd.from_dict(end, at="continues") for end in content["continues"]),
            )
        except (ManifestError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path}: is not as calm-beam writes it ({error}). Restore it, or begin again with --overwrite."
            ) from error


# Names of the parts of a plan for messages, by key.
_NAMES = {
    "order": "the order of the settings",
    "tests": "the tests",
    "joint_epsilon": "--joint",
    "group_key": "--group_key",
    "cluster_key": "--cluster_key",
    "salt": "--seed",
    "ids": "the ids",
    "examples": "their number",
    "round_examples": "--round_examples",
    "costs": "the costs",
}


def _differing(one: SettingPlan, other: SettingPlan) -> list[str]:
    def flat(plan: SettingPlan) -> dict[str, object]:
        sequential = plan.without_rule().sequential
        assert sequential is not None
        return {**plan.to_dict(), **sequential.to_dict()}

    ours, theirs = flat(one), flat(other)
    return [name for key, name in _NAMES.items() if ours.get(key) != theirs.get(key)]
