"""All losses of a sweep: one for each example under each setting, or an error that names what is missing.

Losses come from rows, or from stored outputs of a user's decoder, whose other findings are reported too.
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
    """The complete losses of a sweep.

    Attributes:
      ids: Ids of the examples.
      settings: Names of the settings, ascending.
      losses: float64, shape (examples, settings).
      groups: Group of each example; None if groups were not asked for.
      clusters: Cluster of each example; None if clusters were not asked for.
      costs: Mean cost of each setting whose rows give costs; of outputs, that of the reference setting too.
      constant_costs: Settings whose rows all give the same cost.
      fingerprints: By setting, a fingerprint of examples and losses that does not depend on their order.
      decoder: Decoder of the outputs that were scored; None where losses or scores were given.
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
            or only some rows of a setting give a cost; names examples and setting.
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
        """Returns the concatenated losses of several sets of examples under the same settings, without costs.

        Args:
          parts: At least one part; no example is in two parts.
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
        """Returns the fingerprint of examples and losses under all settings."""
        return fingerprint_text(merged_sums(self.fingerprints[name] for name in self.settings))

    def rows_of(self, group: str | None) -> np.ndarray:
        """Returns the indices of the examples of a group, ascending; None gives all."""
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
          order: Settings, in the order of the columns.
          group: The group whose examples are used; None for all.
          tail: Bound that a loss must exceed to count as 1, else it counts as 0; None leaves losses as they are.

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
          order: Settings, in the order of the columns.
          group: The group whose examples are used; None for all.
          tail: Bound that a loss must exceed to count as 1, else it counts as 0; None leaves losses as they are.

        Raises:
          EvidenceError: If there are too many losses to keep.
        """
        names, fixed = self.units(order=order, group=group, tail=tail)
        return np.asarray(BettingTable.of(names, fixed, salt=salt).in_order() / LOSS_SCALE)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OrderedLosses:
    """The losses of a table with its settings in testing order, for tests of guarantees.

    Attributes:
      table: The losses.
      order: Its settings, in testing order.
      salt: Decides the betting order of the units.
    """

    table: LossTable
    order: Sequence[str]
    salt: str

    def evidence(self, asked: SettingTest, /) -> Evidence:
        """Returns the evidence about one guarantee, in its group or in all examples.

        Raises:
          EvidenceError: If every single loss is needed and there are too many.
        """
        names, fixed = self.table.units(order=self.order, group=asked.group, tail=asked.tail)
        needs_table = P_VALUES[asked.p_value].needs_table
        return Evidence.of(
            fixed,
            statistics_for([asked]),
            table=BettingTable.of(names, fixed, salt=self.salt).in_order() if needs_table else None,
        )


class _Column:
    """The losses of one setting, in the order of their rows."""

    def __init__(self) -> None:
        self._places = array.array("q")
        self._losses = array.array("d")
        self.costs = array.array("d")

    def add(self, place: int, row: LossRow) -> None:
        """Adds a row for the example at an index."""
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
        """Returns the mean of all costs; every row must give one."""
        check_every_cost(setting, rows=len(self._losses), told=len(self.costs))
        return mean_cost(self.costs)

    def fingerprint(self, ids: Sequence[str]) -> int:
        """Returns the sum of the digests of ids with losses."""
        return loss_fingerprint([ids[place] for place in self._places], np.frombuffer(self._losses))


def loss_fingerprint(ids: Sequence[str], losses: np.ndarray) -> int:
    """Returns the sum of the digests of ids with losses: a fingerprint that does not depend on their order.

    Args:
      ids: Ids of the examples.
      losses: Loss of each example, shape (examples,).
    """
    lines = (f"{loss} {name}" for name, loss in zip(ids, to_signed_fixed_point(losses).tolist(), strict=True))
    return sum_of_digests(b"".join(hashlib.sha256(line.encode()).digest() for line in lines))


def mean_cost(costs: Sequence[float]) -> float:
    """Returns the mean of costs, rounded once, so their order does not matter; equal costs give that cost."""
    return costs[0] if len(set(costs)) == 1 else math.fsum(costs) / len(costs)


def check_every_cost(setting: str, *, rows: int, told: int) -> None:
    """Refuses a setting with costs in only some of its rows.

    Raises:
      LossesError: If only some rows give a cost.
    """
    if told != rows:
        raise LossesError(
            f"setting {setting!r}: {told} of {rows} rows say a cost. Say it in all rows of a setting, or in none."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweptSettings:
    """The complete outputs of every prompt under every setting.

    Attributes:
      folder: Their folder.
      job: The job that made them.
      finished: The mark that they are complete.
    """

    folder: str
    job: SettingJob
    finished: FinishedSettings

    @classmethod
    def read(cls, directory: str) -> Self:
        """Returns the outputs that `SweepWith` has stored.

        Args:
          directory: Its output directory, or a folder below `generations/` in it.

        Raises:
          UsageError: If there are no outputs, or outputs of several sweeps.
          OutputsError: If they are incomplete, or not those of such a decoder.
          OSError: If they are on an unknown object store.
        """
        folder = SettingHome(absolute(directory)).only_folder(flag="--outputs")
        job = SettingJob.read(folder)
        return cls(folder=folder, job=job, finished=FinishedSettings.read(folder, job))

    @property
    def tested(self) -> tuple[str, ...]:
        """The tested settings in testing order: all but the first, which is the reference."""
        return self.job.settings[1:]

    def table(self, objective: Objective, metric: Metric, *, has_groups: bool, has_clusters: bool) -> LossTable:
        """Returns the losses of every tested setting.

        An example without an answer has loss 1 under every setting. A setting's cost is the mean over the other
        examples.

        Args:
          objective: The losses to compute, from scores of outputs against those under the first setting, or against
            references.
          metric: The metric that scores.
          has_groups: Whether the table has the examples' groups.
          has_clusters: Whether clusters are the units.

        Raises:
          DataError: If references are needed, and an example has none.
          MetricError: If the metric fails, or leaves [0, 1]; names the example. Or if its scores show no differences
            (`Contrast`).
          LossesError: If only some answers under a setting give a cost.
          OutputsError: If a shard is damaged, or differs from the one that was marked as complete.
        """
        rows: list[LossRow] = []
        costs: dict[str, list[float]] = {name: [] for name in self.job.settings}
        duplicates, contrast, metrics = 0, Contrast(), {objective.metric: metric}
        for generation in self._generations():
            duplicates += generation.duplicate
            scored = score_by_policy(
                generation, [objective], metrics=metrics, num_thresholds=len(self.tested), on_error="fail"
            )
            contrast = Contrast.merged((contrast, scored.contrast))
            example, losses = generation.example, scored.losses[0].tolist()
            group, cluster = example.group if has_groups else None, example.cluster if has_clusters else None
            for name, loss in zip(self.tested, losses, strict=True):
                rows.append(LossRow(example.id, name, loss / LOSS_SCALE, None, group, cluster))
            for name, output in zip(self.job.settings, generation.outputs, strict=False):
                if output.cost is not None:
                    costs[name].append(output.cost)
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
                    f"{path}: was replaced after decoding was complete. Decode again, with overwrite=True."
                )
            yield from read_generations(path)
