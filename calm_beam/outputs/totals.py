"""Sums over a calibration set, and the identity of its examples, which shows that each was counted once.

A layout says which sums a run's losses give, and at which index of the totals each is.

Sets of examples are identified, whatever their order, by sums of digests and by a small stored sample of ids. The ids
with the smallest digests are a sample that nobody can choose, and that does not depend on the order. If a share s of
the certified examples recurs, at least one of k in the sample does with probability 1 - (1 - s)^k, or more.
"""

import collections
import dataclasses
import hashlib
import heapq
import operator
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from calm_beam.inputs.examples import Example
from calm_beam.manifest import MOST_SAMPLED_IDS, Objective, PlannedTest
from calm_beam.risk.evidence import MODULUS, BettingTable, Evidence, Loss, RiskTotals, Statistic
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.testing import statistics_for
from calm_beam.text import counted

from .finished import FinishedSweep
from .job import OutputsError
from .metric_checks import Contrast
from .rows import Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The rows of the sums, and the objectives whose single losses are kept.

    Attributes:
      objectives: Distinct objectives, in the order of the losses.
      rows: Objective and statistic of each row that is summed.
      tabled: Objectives with a spec whose p-value needs every single loss.
      thresholds: Size of the grid.
      groups: Names of the groups that have their own sums, in order of appearance among the specs; or of the parts of
        the set, selection and holdout.
    """

    objectives: tuple[Objective, ...]
    rows: tuple[tuple[Objective, Statistic], ...]
    tabled: tuple[Objective, ...]
    thresholds: int
    groups: tuple[str, ...] = ()

    @classmethod
    def of(cls, specs: Sequence[PlannedTest], *, thresholds: int, parts: Sequence[str] = ()) -> Self:
        """Returns the layout for all specs: the sums that their p-values need, and the losses for the risk table.

        Args:
          specs: The specs.
          thresholds: Size of the grid.
          parts: Names of the parts that have their own sums, if no spec is about a group.
        """
        objectives = objectives_of(specs)
        needed: list[tuple[Objective, Statistic]] = [(objective, Loss()) for objective in objectives]
        for spec in specs:
            needed.extend((spec.objective, statistic) for statistic in statistics_for([spec]))
        return cls(
            objectives=objectives,
            rows=tuple(dict.fromkeys(needed)),
            tabled=objectives_of([spec for spec in specs if P_VALUES[spec.p_value].needs_table]),
            thresholds=thresholds,
            groups=tuple(dict.fromkeys(spec.group for spec in specs if spec.group is not None)) or tuple(parts),
        )

    def values(self, fixed_losses: np.ndarray) -> np.ndarray:
        """Returns the values to sum.

        Args:
          fixed_losses: shape (units, objectives, thresholds), int64 in units of 2^-32.

        Returns:
          Shape (units, rows, thresholds), int64.
        """
        by_objective = dict(zip(self.objectives, np.moveaxis(fixed_losses, 1, 0), strict=True))
        return np.stack([statistic.values(by_objective[objective]) for objective, statistic in self.rows], axis=1)

    def sums_of(self, objective: Objective, sums: np.ndarray) -> dict[Statistic, np.ndarray]:
        """Returns the sums of one objective by statistic, each of shape (thresholds,).

        Args:
          objective: The objective.
          sums: shape (rows, thresholds): sums of `values`.
        """
        rows = zip(self.rows, sums, strict=True)
        return {statistic: row for (each, statistic), row in rows if each == objective}

    def tabled_losses(self, fixed_losses: np.ndarray) -> np.ndarray:
        """Returns the losses that are kept one by one: those of `tabled`, in its order."""
        return fixed_losses[:, [self.objectives.index(objective) for objective in self.tabled]]


def objectives_of(specs: Sequence[PlannedTest]) -> tuple[Objective, ...]:
    """Returns the distinct objectives of specs, in order of appearance; each is scored once for all its specs."""
    return tuple(dict.fromkeys(spec.objective for spec in specs))


def content_sum_of(examples: Iterable[Example]) -> int:
    """Returns the sum of the examples' content digests modulo 2^256."""
    return merged_sums(int.from_bytes(example.content_digest(), "big") for example in examples)


def merged_sums(content_sums: Iterable[int]) -> int:
    """Returns the content sum of several sets together.

    >>> merged_sums([2**256 - 1, 3])
    2
    """
    return sum(content_sums) % MODULUS


def fingerprint_text(content_sum: int) -> str:
    """Returns `sha256-sum:` and 64 digits."""
    return f"sha256-sum:{content_sum:064x}"


def id_sample(ids: Iterable[str]) -> tuple[str, ...]:
    """Returns the smallest digests of ids, `MOST_SAMPLED_IDS` or all if fewer, ascending.

    Source: bottom-k sketches (Cohen and Kaplan, 2007, "Summarizing data using bottom-k sketches").
    """
    return tuple(heapq.nsmallest(MOST_SAMPLED_IDS, set(map(_digest, ids))))


def come_again(sample: Iterable[str], ids: Iterable[str]) -> int:
    """Returns how many ids of a sample recur among other ids.

    >>> come_again(id_sample(["a", "b", "c"]), ["b", "c", "d"])
    2
    """
    wanted = set(sample)
    return len(wanted.intersection(map(_digest, ids)))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums and counts over some examples, all or one group; merging is exact, associative and commutative.

    Attributes:
      risk: Number of independent units (examples, or clusters of them) and sums over their losses.
      layer_sums: For the full model and each threshold, decoder layers used by all tokens; length 1 + thresholds.
      token_counts: For the full model and each threshold, tokens generated; same length.
      tie_counts: First the number of examples that do not record near ties; then, for each threshold, the number whose
        output there, or the full model's, depends on a near tie. Empty for no examples.
    """

    risk: RiskTotals
    layer_sums: tuple[int, ...]
    token_counts: tuple[int, ...]
    tie_counts: tuple[int, ...] = ()

    @classmethod
    def zero(cls, layout: Layout) -> Self:
        """Returns the sums over no examples."""
        nothing = (0,) * (layout.thresholds + 1)
        risk = RiskTotals.zero(rows=len(layout.rows), thresholds=layout.thresholds)
        return cls(risk=risk, layer_sums=nothing, token_counts=nothing)

    @classmethod
    def of_examples(cls, generations: Sequence[Generation], layout: Layout) -> Self:
        """Returns the sums over some examples, except for their losses."""
        zero = cls.zero(layout)
        nothing = zero.layer_sums
        layers = (tuple(sum(output.exit_layers) for output in item.outputs) or nothing for item in generations)
        tokens = (tuple(len(output.tokens) for output in item.outputs) or nothing for item in generations)
        return dataclasses.replace(
            zero,
            layer_sums=_sum(nothing, *layers),
            token_counts=_sum(nothing, *tokens),
            tie_counts=_sum(*(_ties_of(item, layout) for item in generations)) if generations else (),
        )

    def merge(self, other: Self) -> Self:
        """Returns the sums over both sets of examples together."""
        return type(self)(
            risk=self.risk.merge(other.risk),
            layer_sums=_sum(self.layer_sums, other.layer_sums),
            token_counts=_sum(self.token_counts, other.token_counts),
            tie_counts=_added_ties(self.tie_counts, other.tie_counts),
        )

    def near_ties(self, place: int) -> int | None:
        """Returns how many examples depend on a near tie at a threshold, given its index; None if some do not say."""
        return None if not self.tie_counts or self.tie_counts[0] else self.tie_counts[1 + place]

    def mean_layers(self, num_layers: int) -> tuple[float, ...]:
        """Returns decoder layers per generated token, for the full model and then each threshold.

        Args:
          num_layers: Decoder depth, returned if no token was generated.
        """
        pairs = zip(self.layer_sums, self.token_counts, strict=True)
        return tuple(layers / tokens if tokens else float(num_layers) for layers, tokens in pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationTotals:
    """Sums and counts over a calibration set; merging is exact, associative and commutative.

    Attributes:
      layout: The layout of the sums.
      whole: The sums over all units.
      groups: Name and sums of every group of the layout that has examples here, ascending.
      table: Single losses, if a p-value needs them.
      over_examples: Number of examples and sums over their losses, where units are clusters, shape (objectives,
        thresholds); None if units are examples.
      scored: Number of examples whose losses are in these sums, alone or within their cluster.
      by_shard: For every shard, ascending, how many of its examples are counted.
      failures: Id and reason of every example that counts with loss 1, sorted.
      truncated: Examples whose prompt was cut.
      duplicates: Examples whose prompt an earlier example has.
      several_turns: Examples that are chats of several turns.
      content_sum: Sum of the examples' content digests modulo 2^256: a fingerprint of the set, whatever its order.
      contrast: What the scores of the examples distinguish.
    """

    layout: Layout
    whole: Sums
    groups: tuple[tuple[str, Sums], ...] = ()
    table: BettingTable = dataclasses.field(default_factory=BettingTable)
    over_examples: RiskTotals | None = None
    scored: int = 0
    by_shard: tuple[tuple[int, int], ...] = ()
    failures: tuple[tuple[str, str], ...] = ()
    truncated: int = 0
    duplicates: int = 0
    several_turns: int = 0
    content_sum: int = 0
    contrast: Contrast = dataclasses.field(default_factory=Contrast)

    @property
    def risk(self) -> RiskTotals:
        """Number of independent units (examples, or clusters of them) and sums over their losses."""
        return self.whole.risk

    @property
    def examples(self) -> int:
        """Number of examples, failed ones included."""
        return sum(count for _, count in self.by_shard)

    @property
    def failed(self) -> int:
        """Examples that could not be decoded or scored."""
        return len(self.failures)

    @classmethod
    def zero(cls, layout: Layout) -> Self:
        """Returns the totals of no examples."""
        return cls(layout=layout, whole=Sums.zero(layout))

    @classmethod
    def of_examples(
        cls,
        generations: Sequence[Generation],
        layout: Layout,
        *,
        shard: int = 0,
        contrast: Contrast | None = None,
        groups: Sequence[str | None] | None = None,
    ) -> Self:
        """Returns the totals of some examples, except for their losses.

        Args:
          generations: One per example, with a failure if it could not be scored.
          layout: The layout of the sums.
          shard: Number of their shard.
          contrast: What their scores distinguish; None for nothing.
          groups: The group of each in the layout, if that has groups; None for the group that the example names.

        Raises:
          OutputsError: If the layout has groups and an example is in none of them.
        """
        groups = [item.example.group for item in generations] if groups is None else groups
        return dataclasses.replace(
            cls.zero(layout),
            whole=Sums.of_examples(generations, layout),
            groups=tuple(
                (group, Sums.of_examples([generations[place] for place in places], layout))
                for group, places in _places(groups, layout)
            ),
            by_shard=((shard, len(generations)),) if generations else (),
            failures=tuple(sorted((item.example.id, item.failure) for item in generations if item.failure is not None)),
            truncated=sum(item.truncated for item in generations),
            duplicates=sum(item.duplicate for item in generations),
            several_turns=sum(item.example.earlier is not None for item in generations),
            content_sum=content_sum_of(item.example for item in generations),
            contrast=contrast or Contrast(),
        )

    @classmethod
    def of_losses(
        cls,
        keys: Sequence[str],
        fixed_losses: np.ndarray,
        *,
        layout: Layout,
        salt: str,
        scored: int | None = None,
        groups: Sequence[str | None] = (),
    ) -> Self:
        """Returns the totals of the losses of some units, and of nothing else.

        Args:
          keys: One per unit: ids of examples, or names of clusters.
          fixed_losses: shape (units, objectives, thresholds), int64 in units of 2^-32.
          layout: The layout of the sums.
          salt: Decides the order of the single losses that are kept.
          scored: Number of examples in these units; None if each unit is one.
          groups: The group of each unit if the layout has groups; units are then examples.

        Raises:
          OutputsError: If the layout has groups and a unit is in none of them.
        """
        table = (
            BettingTable.of(keys, layout.tabled_losses(fixed_losses), salt=salt) if layout.tabled else BettingTable()
        )
        values, zero = layout.values(fixed_losses), Sums.zero(layout)
        return dataclasses.replace(
            cls.zero(layout),
            whole=dataclasses.replace(zero, risk=RiskTotals.of(values)),
            groups=tuple(
                (group, dataclasses.replace(zero, risk=RiskTotals.of(values[places])))
                for group, places in _places(groups, layout)
            ),
            table=table,
            scored=len(keys) if scored is None else scored,
        )

    def merge(self, other: Self) -> Self:
        """Returns the totals of both sets together; counts of the same shard add up, so that counting twice shows.

        Raises:
          ValueError: If their objectives, statistics or grids differ.
        """
        if other.layout != self.layout:
            raise ValueError("only totals with the same layout (objectives, statistics and grid) can be added.")
        return dataclasses.replace(
            self,
            whole=self.whole.merge(other.whole),
            groups=_merged_groups(self.groups, other.groups),
            table=self.table.merge(other.table),
            over_examples=_merged_totals(self.over_examples, other.over_examples),
            scored=self.scored + other.scored,
            by_shard=_added(self.by_shard, other.by_shard),
            failures=tuple(sorted((*self.failures, *other.failures))),
            truncated=self.truncated + other.truncated,
            duplicates=self.duplicates + other.duplicates,
            several_turns=self.several_turns + other.several_turns,
            content_sum=merged_sums((self.content_sum, other.content_sum)),
            contrast=Contrast.merged((self.contrast, other.contrast)),
        )

    def check(self, finished: FinishedSweep) -> None:
        """Raises unless every example of a sweep was counted exactly once.

        Raises:
          OutputsError: If a shard or an example was left out or counted twice. One check covers all thresholds, since
            each example has one loss for each.
        """
        expected = tuple((shard.shard, shard.examples) for shard in finished.shards)
        if self.by_shard != expected:
            wrong = sorted(set(self.by_shard) ^ set(expected))[0][0]
            raise OutputsError(
                f"shard {wrong}: {counted(dict(self.by_shard).get(wrong, 0), 'example was', several='examples were')} "
                "counted, but it has "
                f"{dict(expected).get(wrong, 0)}. A shard that is missing or counts twice would void the guarantee."
            )
        if self.scored != finished.examples:
            raise OutputsError(
                f"{counted(self.scored, 'example was', several='examples were')} scored, but {finished.examples} "
                "decoded."
            )
        grouped = sum(of_group.risk.n for _, of_group in self.groups)
        if self.layout.groups and grouped != self.risk.n:
            raise OutputsError(f"the groups have {counted(grouped, 'example')}, but {self.risk.n} were scored.")
        kept = sum(len(keys) for keys, _ in self.table.chunks)
        if self.layout.tabled and kept != self.risk.n:
            raise OutputsError(f"{kept} single losses were kept, but {self.risk.n} summed.")

    def of_group(self, group: str | None) -> Sums:
        """Returns the sums over the examples of a group, or over all of them for None."""
        if group is None:
            return self.whole
        return dict(self.groups).get(group) or Sums.zero(self.layout)

    def evidence(self, asked: PlannedTest, /) -> Evidence:
        """Returns the sums and losses for one guarantee, over its group or over all examples.

        Raises:
          ValueError: If there are no examples; a group may have none.
        """
        risk, objective = self.of_group(asked.group).risk, asked.objective
        if risk.n == 0 and asked.group is None:
            raise ValueError("evidence needs at least one example, got n = 0. Is the calibration set empty?")
        tabled = self.layout.tabled
        is_kept = asked.group is None and objective in tabled
        return Evidence(
            n=risk.n,
            sums=self.layout.sums_of(objective, risk.sums),
            table=self.table.in_order()[:, tabled.index(objective)] if is_kept else None,
        )

    def data_fingerprint(self) -> str:
        """Returns `sha256-sum:` and 64 digits: equal for the same examples in any order and sharding."""
        return fingerprint_text(self.content_sum)


def _ties_of(generation: Generation, layout: Layout) -> tuple[int, ...]:
    """Returns one example's contribution to `tie_counts`; a failed one has loss 1 whatever the ties."""
    if generation.failure is not None:
        return (0,) * (layout.thresholds + 1)
    if any(output.near_tie is None for output in generation.outputs):
        return (1, *(0,) * layout.thresholds)
    return (0, *map(int, generation.near_ties()))


def _added_ties(counts: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return _sum(counts, others) if counts and others else counts or others


def _merged_totals(one: RiskTotals | None, other: RiskTotals | None) -> RiskTotals | None:
    if one is None or other is None:
        return one or other
    return one.merge(other)


def _added(counts: tuple[tuple[int, int], ...], others: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    if not counts or not others:
        return counts or others
    added = collections.Counter(dict(counts))
    for shard, count in others:
        added[shard] += count
    return tuple(sorted(added.items()))


def _places(groups: Sequence[str | None], layout: Layout) -> list[tuple[str, list[int]]]:
    """Returns the indices of the examples of every group, groups ascending; empty if the layout has none."""
    if not layout.groups:
        return []
    places: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        if group is None or group not in layout.groups:
            raise OutputsError(
                f"an example is of {'no group' if group is None else f'group {group!r}'}, but planned were "
                f"{', '.join(layout.groups)}. Did the data change after the run had begun?"
            )
        places.setdefault(group, []).append(place)
    return sorted(places.items())


def _merged_groups(
    groups: tuple[tuple[str, Sums], ...], others: tuple[tuple[str, Sums], ...]
) -> tuple[tuple[str, Sums], ...]:
    if not groups or not others:
        return groups or others
    merged = dict(groups)
    for group, totals in others:
        merged[group] = merged[group].merge(totals) if group in merged else totals
    return tuple(sorted(merged.items(), key=operator.itemgetter(0)))


def _sum(*rows: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))
