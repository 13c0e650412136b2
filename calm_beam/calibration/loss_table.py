"""All losses of a sweep: one for each example under each setting, or an error that names what is amiss.

Losses come in rows, or from stored outputs of a decoder of the user's, of which other findings are reported, too.
"""

import array
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import numpy as np

from calm_beam.inputs.losses.tables import LossRow, named
from calm_beam.manifest import ElsewhereRecord, Objective, SettingTest
from calm_beam.metrics.registry import Metric
from calm_beam.outputs import FinishedSettings, Generation, OutputsError, SettingJob, read_generations, stored_shard
from calm_beam.outputs.folder import SettingHome
from calm_beam.outputs.metric_checks import Contrast
from calm_beam.outputs.scoring import score_by_policy
from calm_beam.outputs.totals import fingerprint_text, merged_sums
from calm_beam.risk.evidence import BettingTable, Evidence, means_up, sum_of_digests
from calm_beam.risk.losses import LOSS_SCALE, tail_loss, to_signed_fixed_point
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.testing import LossesError, statistics_for
from calm_beam.storage import absolute


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LossTable:
    """The losses of a sweep, complete.

    Attributes:
      ids: Of the examples.
      settings: By name, ascending.
      losses: float64, shape (examples, settings).
      groups: Of each example; None where nobody asked.
      clusters: Of each example; None where nobody asked.
      costs: By setting, the mean of what its rows say; of those settings whose rows say one.
      constant_costs: The settings whose rows all say the same cost.
      fingerprints: By setting, what identifies examples and losses, in any order.
      decoder: What decoded the outputs that losses were made of; None where losses or scores were given.
    """

    ids: tuple[str, ...]
    settings: tuple[str, ...]
    losses: np.ndarray
    groups: tuple[str, ...] | None
    clusters: tuple[str, ...] | None
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    constant_costs: frozenset[str] = frozenset()
    fingerprints: Mapping[str, int] = dataclasses.field(default_factory=dict)
    decoder: ElsewhereRecord | None = None

    @classmethod
    def of(cls, rows: Iterable[LossRow]) -> Self:
        """Returns the losses in rows.

        Raises:
          LossesError: If an example has several losses under a setting or none, belongs to several groups or clusters,
            or only some rows of a setting say a cost; names examples and setting.
        """
        places: dict[str, int] = {}
        groups: list[str | None] = []
        clusters: list[str | None] = []
        columns: dict[str, _Column] = {}
        for row in rows:
            place = places.get(row.id)
            if place is None:
                place = places[row.id] = len(places)
                groups.append(row.group)
                clusters.append(row.cluster)
            elif row.group != groups[place] or row.cluster != clusters[place]:
                kind, one, other = "group", groups[place], row.group
                if one == other:
                    kind, one, other = "cluster", clusters[place], row.cluster
                raise LossesError(f"example {row.id!r} belongs to {kind} {one!r} and to {other!r}. Name one of them.")
            column = columns.get(row.setting)
            if column is None:
                column = columns[row.setting] = _Column()
            column.add(place, row)
        if not columns:
            raise LossesError("there are no losses.")
        ids = tuple(places)
        settings = tuple(sorted(columns))
        losses = np.empty((len(ids), len(settings)))
        for index, setting in enumerate(settings):
            losses[:, index] = columns[setting].in_order(ids, setting)
        return cls(
            ids=ids,
            settings=settings,
            losses=losses,
            costs={name: columns[name].mean_cost(name) for name in settings if columns[name].costs},
            constant_costs=frozenset(name for name in settings if len(set(columns[name].costs)) == 1),
            groups=None if groups[0] is None else tuple(map(str, groups)),
            clusters=None if clusters[0] is None else tuple(map(str, clusters)),
            fingerprints={name: columns[name].fingerprint(ids) for name in settings},
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Returns the losses of several sets of examples together, under the same settings, without their costs.

        Args:
          parts: At least one; no example is in two.
        """
        first = parts[0]
        return dataclasses.replace(
            first,
            ids=tuple(itertools.chain.from_iterable(part.ids for part in parts)),
            losses=np.concatenate([part.losses for part in parts]),
            costs={},
            constant_costs=frozenset(),
            groups=None
            if first.groups is None
            else tuple(itertools.chain.from_iterable(part.groups or () for part in parts)),
            clusters=None
            if first.clusters is None
            else tuple(itertools.chain.from_iterable(part.clusters or () for part in parts)),
            fingerprints={name: merged_sums(part.fingerprints[name] for part in parts) for name in first.settings},
        )

    def only(self, settings: Sequence[str]) -> Self:
        """Returns the losses under some of the settings."""
        kept = [self.settings.index(name) for name in sorted(settings)]
        return dataclasses.replace(self, settings=tuple(sorted(settings)), losses=self.losses[:, kept])

    def fingerprint(self) -> str:
        """Returns what identifies examples and losses under all settings."""
        return fingerprint_text(merged_sums(self.fingerprints[name] for name in self.settings))

    def rows_of(self, group: str | None) -> np.ndarray:
        """Returns the indices of the examples of a group, ascending; None is all."""
        if group is None or self.groups is None:
            return np.arange(len(self.ids))
        return np.flatnonzero(np.array([name == group for name in self.groups]))

    def clusters_of(self, group: str | None) -> int | None:
        """Returns the number of clusters that the examples of a group are in; None without clusters."""
        if self.clusters is None:
            return None
        return len({self.clusters[index] for index in self.rows_of(group)})

    def ordered(self, order: Sequence[str], *, salt: str) -> "OrderedLosses":
        """Returns the losses with their settings in testing order; arguments as in `OrderedLosses`."""
        return OrderedLosses(table=self, order=order, salt=salt)

    def units(
        self, *, order: Sequence[str], group: str | None = None, tail: float | None = None
    ) -> tuple[list[str], np.ndarray]:
        """Returns the losses of independent units: examples, or clusters of them.

        Args:
          order: Settings, in the order in which columns come.
          group: Examples of this group alone; None for all.
          tail: What a loss has to exceed to count as 1, and else as 0; None counts it as it is.

        Returns:
          The names of the units, and int64 of shape (units, settings) in units of 2^-32, rounded up.
        """
        rows = self.rows_of(group)
        columns = np.array([self.settings.index(name) for name in order])
        losses = self.losses[rows[:, None], columns]
        fixed = to_signed_fixed_point(losses if tail is None else tail_loss(losses, above=tail))
        if self.clusters is None:
            return [self.ids[index] for index in rows], fixed
        names, places = np.unique(np.array([self.clusters[index] for index in rows], object), return_inverse=True)
        sums = np.zeros((len(names), len(order)), np.int64)
        np.add.at(sums, places, fixed)
        return list(names), means_up(sums, np.bincount(places)[:, None])

    def in_betting_order(
        self, *, salt: str, order: Sequence[str], group: str | None = None, tail: float | None = None
    ) -> np.ndarray:
        """Returns the losses of independent units as numbers, float64 of shape (units, settings).

        Args:
          salt: Decides the order of the units.
          order: As in `units`.
          group: As there.
          tail: As there.

        Raises:
          EvidenceError: If there are too many losses to keep.
        """
        names, fixed = self.units(order=order, group=group, tail=tail)
        return np.asarray(BettingTable.of(names, fixed, salt=salt).in_order() / LOSS_SCALE)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OrderedLosses:
    """The losses of a table with its settings in testing order, of which guarantees are tested.

    Attributes:
      table: The losses.
      order: Its settings, in testing order.
      salt: Decides the betting order of the units.
    """

    table: LossTable
    order: Sequence[str]
    salt: str

    def evidence(self, asked: SettingTest, /) -> Evidence:
        """Returns what the losses say about one guarantee, in its group or in all examples.

        Raises:
          EvidenceError: If every single loss is needed, and they are too many.
        """
        names, fixed = self.table.units(order=self.order, group=asked.group, tail=asked.tail)
        needs_table = P_VALUES[asked.p_value].needs_table
        return Evidence.of(
            fixed,
            statistics_for([asked]),
            table=BettingTable.of(names, fixed, salt=self.salt).in_order() if needs_table else None,
        )


class _Column:
    """The losses of one setting, as they come."""

    def __init__(self) -> None:
        self._places = array.array("q")
        self._losses = array.array("d")
        self.costs = array.array("d")

    def add(self, place: int, row: LossRow) -> None:
        """Takes a row in, of the example at a place."""
        self._places.append(place)
        self._losses.append(row.loss)
        if row.cost is not None:
            self.costs.append(row.cost)

    def in_order(self, ids: Sequence[str], setting: str) -> np.ndarray:
        """Returns the losses in the order of the examples, each of which must have one."""
        places = np.frombuffer(self._places, np.int64)
        counts = np.bincount(places, minlength=len(ids))
        for is_wrong, what in ((counts > 1, "has several losses for"), (counts == 0, "has no loss for")):
            if is_wrong.any():
                wrong = named([ids[index] for index in np.flatnonzero(is_wrong).tolist()], "id")
                raise LossesError(
                    f"setting {setting!r} {what} {wrong}. Every example needs one loss under every setting: those that "
                    "are left out may be the ones that fail."
                )
        losses = np.empty(len(ids))
        losses[places] = np.frombuffer(self._losses)
        return losses

    def mean_cost(self, setting: str) -> float:
        """Returns the mean of all costs, which every row must say."""
        check_every_cost(setting, rows=len(self._losses), told=len(self.costs))
        return mean_cost(self.costs)

    def fingerprint(self, ids: Sequence[str]) -> int:
        """Returns the sum of the digests of ids and losses."""
        return loss_fingerprint([ids[place] for place in self._places], np.frombuffer(self._losses))


def loss_fingerprint(ids: Sequence[str], losses: np.ndarray) -> int:
    """Returns the sum of the digests of ids and losses, which identifies them in any order.

    Args:
      ids: Of examples.
      losses: Of each, shape (examples,).
    """
    lines = (f"{loss} {name}" for name, loss in zip(ids, to_signed_fixed_point(losses).tolist(), strict=True))
    return sum_of_digests(b"".join(hashlib.sha256(line.encode()).digest() for line in lines))


def mean_cost(costs: Sequence[float]) -> float:
    """Returns the mean of costs, exact up to the last step, in any order; of equal ones it is that cost."""
    return costs[0] if len(set(costs)) == 1 else math.fsum(costs) / len(costs)


def check_every_cost(setting: str, *, rows: int, told: int) -> None:
    """Refuses costs in only some rows of a setting.

    Raises:
      LossesError: If so.
    """
    if told != rows:
        raise LossesError(
            f"setting {setting!r}: {told} of {rows} rows say a cost. Say it in all rows of a setting, or in none."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweptSettings:
    """Outputs of every prompt under every setting, complete.

    Attributes:
      folder: Where they are.
      job: What they are.
      finished: The mark that they are complete.
    """

    folder: str
    job: SettingJob
    finished: FinishedSettings

    @classmethod
    def read(cls, directory: str) -> Self:
        """Returns what `SweepWith` has stored.

        Args:
          directory: Its output directory, or a folder below `generations/` in it.

        Raises:
          UsageError: If there is none, or several.
          OutputsError: If they are not complete, or not those of such a decoder.
          OSError: If they are on an object store that is not known.
        """
        folder = SettingHome(absolute(directory)).only_folder(flag="--outputs")
        job = SettingJob.read(folder)
        return cls(folder=folder, job=job, finished=FinishedSettings.read(folder, job))

    @property
    def tested(self) -> tuple[str, ...]:
        """The settings that are tested, in that order: all but the first, which they are compared with."""
        return self.job.settings[1:]

    def table(self, objective: Objective, metric: Metric, *, has_groups: bool, has_clusters: bool) -> LossTable:
        """Returns the losses of every tested setting.

        An example without an answer has loss 1 under every setting. A setting's cost is its mean over the others.

        Args:
          objective: Which losses, by scores of outputs held against those under the first setting, or references.
          metric: What scores.
          has_groups: Whether examples of groups are told apart.
          has_clusters: Whether clusters are the units.

        Raises:
          DataError: If references are needed, and an example has none.
          MetricError: If the metric fails, or leaves [0, 1]; names the example. Or if it tells nothing (`Contrast`).
          LossesError: If only some answers under a setting say a cost.
          OutputsError: If a shard is damaged, or not the one that was marked as complete.
        """
        rows: list[LossRow] = []
        costs: dict[str, list[float]] = {name: [] for name in self.tested}
        duplicates, contrast, metrics = 0, Contrast(), {objective.metric: metric}
        for generation in self._generations():
            duplicates += generation.duplicate
            scored = score_by_policy(
                generation, [objective], metrics=metrics, num_thresholds=len(self.tested), on_error="fail"
            )
            contrast = Contrast.merged((contrast, scored.contrast))
            example, losses = generation.example, scored.losses[0].tolist()
            for place, (name, loss) in enumerate(zip(self.tested, losses, strict=True), start=1):
                group, cluster = example.group if has_groups else None, example.cluster if has_clusters else None
                rows.append(LossRow(example.id, name, loss / LOSS_SCALE, None, group, cluster))
                if generation.outputs and (cost := generation.outputs[place].cost) is not None:
                    costs[name].append(cost)
        contrast.check([objective], metrics.__getitem__)
        answered = self.finished.examples - self.finished.failed
        for name, told in costs.items():
            if told:
                check_every_cost(name, rows=answered, told=len(told))
        decoder = ElsewhereRecord(
            name=self.job.decoder,
            outputs=self.finished.digest(),
            failed=self.finished.failed,
            duplicates=duplicates,
        )
        return dataclasses.replace(
            LossTable.of(rows),
            costs={name: mean_cost(told) for name, told in costs.items() if told},
            constant_costs=frozenset(name for name, told in costs.items() if len(set(told)) == 1),
            decoder=decoder,
        )

    def _generations(self) -> Iterator[Generation]:
        for shard in self.finished.shards:
            path = self.job.shard_path(self.folder, shard.shard)
            if stored_shard(path) != shard:
                raise OutputsError(
                    f"{path}: was replaced after decoding was complete. Decode anew, with overwrite=True."
                )
            yield from read_generations(path)
