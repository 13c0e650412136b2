"""What has been evaluated of the declared examples: as many rounds as are whole, and what is still missing."""

import array
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from calm_beam.inputs.losses.rows import LossRow
from calm_beam.inputs.losses.shown import named
from calm_beam.manifest import content_digest
from calm_beam.risk.setting_sums import LossesError
from calm_beam.text import counted

from .declared import DeclaredExamples
from .loss_table import LossTable, check_every_cost, loss_fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedLosses:
    """The losses that count: those of the first rounds, as far as every example has one under every setting.

    Attributes:
      rounds: The losses of every whole round before the first that is not, in their order.
      costs: After each of these rounds, the mean cost of every setting whose rows say one.
      missing: For every other round, the ids that lack a loss under some setting, in their order.
      lacking: The settings under which some example of the first of these lacks a loss, ascending.
      waiting: Number of losses that are there and do not count yet.
    """

    rounds: tuple[LossTable, ...]
    costs: tuple[Mapping[str, float], ...]
    missing: tuple[tuple[str, ...], ...]
    lacking: tuple[str, ...]
    waiting: int

    @classmethod
    def of(cls, rows: Iterable[LossRow], declared: DeclaredExamples, *, settings: Sequence[str]) -> Self:
        """Returns what rows hold of the declared examples.

        Args:
          rows: Losses, in any order; groups and clusters are those that were declared.
          declared: All examples that may be evaluated.
          settings: All settings that may be.

        Raises:
          LossesError: If an example or setting was not declared, an example has several losses under a setting, or only
            some rows of a setting say a cost; names them.
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
        """Returns for every counted round what identifies its examples, their losses, and the costs up to its end."""
        return tuple(
            content_digest(
                {"losses": {name: f"{value:064x}" for name, value in each.fingerprints.items()}, "costs": dict(costs)}
            )
            for each, costs in zip(self.rounds, self.costs, strict=True)
        )

    def in_words(self) -> str:
        """Returns what the first round lacks that is not whole, and what waits for it; empty if all are whole."""
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
    """Returns for every round the mean costs up to its end, of settings whose rows say one."""
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
        # A mean of equal costs is that cost.
        means.append(float(told[0]) if is_constant else math.fsum(sums) / place.stop)
    return means
