"""Watched calibrations and certifications, which stop when enough is proved: the rule, and how they ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

from calm_beam.errors import ManifestError
from calm_beam.risk.rules import ROUNDS_WITHOUT_GAIN, Proved, StopRule
from calm_beam.storage.record_values import AtLeast, Cost, Layers, OneOf, Positive, Share, Text, Unit, shown
from calm_beam.storage.records import Record

from ._data import CountedData
from ._tests import TestedEntry, check_looked_at

_GAINED_LITTLE = f"{ROUNDS_WITHOUT_GAIN} rounds in a row had saved less than {{}} % of"
_WITHOUT_RULE = {"all_proved": "nothing was left to prove", "end_of_data": "no rule had stopped them before"}


@dataclass(frozen=True, kw_only=True)
class WatchedPlan(Record):
    """The stopping rule of tests that are evaluated after every round of examples.

    Attributes:
      round_examples: Number of examples of a round, at the end of which the tests are evaluated.
      stop_gain: Stops after rounds in which no entry saved this share of its cost; None: whatever they save.
    """

    # The parts of the rule about a place in the testing order and about a cost; and the sentence of each part for a run
    # that it ended.
    _PLACE: ClassVar[str]
    _COST: ClassVar[str]
    _WORDS: ClassVar[Mapping[str, str]]

    round_examples: Positive
    stop_gain: Share | None = None

    @classmethod
    def ends(cls) -> tuple[str, ...]:
        """Returns the names of all possible ends; the last two are not rules."""
        return (cls._PLACE, cls._COST, "stop_gain", "all_proved", "end_of_data")

    def rule(self, grid: Sequence[Any]) -> StopRule:
        """Returns the stopping rule, given all that may be tested, in testing order."""
        return StopRule(place=self._place(grid), cost=getattr(self, self._COST), gain=self.stop_gain)

    def ended_by(self, looks: Sequence[Sequence[Proved]], *, grid: Sequence[Any], of_rounds: int) -> str | None:
        """Returns what ends the run after some rounds, one of `ends`; None if it goes on.

        Args:
          looks: For each of these rounds, the state of every entry.
          grid: All that may be tested, in testing order.
          of_rounds: Number of rounds of the data.
        """
        names = {"place": self._PLACE, "cost": self._COST, "gain": "stop_gain", "all_proved": "all_proved"}
        reason = self.rule(grid).reason(looks, settings=len(grid))
        if reason is not None:
            return names[reason]
        return "end_of_data" if len(looks) == of_rounds else None

    def end_in_words(self, ended_by: str) -> str:
        """Returns why tests ended, as a part of a sentence; `ended_by` is one of `ends`."""
        if ended_by in _WITHOUT_RULE:
            return _WITHOUT_RULE[ended_by]
        value = getattr(self, ended_by)
        number = 100 * value if ended_by == "stop_gain" else value
        return self._WORDS[ended_by].format(value if isinstance(value, str) else f"{number:g}")

    def without_rule(self) -> Self:
        """Returns the same rounds without a stopping rule."""
        nothing: dict[str, Any] = dict.fromkeys((self._PLACE, self._COST, "stop_gain"))
        return replace(self, **nothing)

    def _place(self, grid: Sequence[Any]) -> int | None:
        """Returns the index in the testing order that the rule waits for; None if there is none."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SequentialPlan(WatchedPlan):
    """The stopping rule of a watched calibration; a round has about `round_examples` examples.

    Attributes:
      stop_at_threshold: Stops once every entry has accepted this threshold, or a lower one; None: whatever they accept.
      stop_at_layers: Stops once no entry uses more mean layers than this; None: whatever they use.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("round_examples", "stop_at_threshold", "stop_at_layers")
    _PLACE: ClassVar[str] = "stop_at_threshold"
    _COST: ClassVar[str] = "stop_at_layers"
    _WORDS: ClassVar[Mapping[str, str]] = {
        "stop_at_threshold": "every promise had come down to threshold {}",
        "stop_at_layers": "no promise used more than {} layers",
        "stop_gain": f"{_GAINED_LITTLE} the layers",
    }

    stop_at_threshold: Unit | None = None
    stop_at_layers: Layers | None = None

    def _place(self, grid: Sequence[Any]) -> int | None:
        wanted = self.stop_at_threshold
        if wanted is None:
            return None
        place = next((place for place, threshold in enumerate(grid) if threshold <= wanted), None)
        if place is None:
            raise ValueError(
                f"stop_at_threshold is {wanted:g}, but the lowest threshold of the grid is {grid[-1]:g}. Add it to the "
                "grid, or wait for a higher one."
            )
        return place


@dataclass(frozen=True, kw_only=True)
class SettingSequentialPlan(WatchedPlan):
    """The declared examples and stopping rule of a watched certification.

    A round ends with the example, or the cluster, that brings it to `round_examples`.

    Attributes:
      ids: Fingerprint of all examples that may be evaluated, with their groups and clusters; the plan's salt orders
        them.
      examples: Number of these examples.
      costs: Declared costs of settings, in the plan's order; None if none were declared, or rows give them.
      stop_at_setting: Stops once every entry has accepted this setting, or a later one; None: whatever they accept.
      stop_at_cost: Stops once no entry's setting costs more than this; None: whatever they cost.
    """

    _FIRST: ClassVar[tuple[str, ...]] = (
        "ids",
        "examples",
        "round_examples",
        "costs",
        "stop_at_setting",
        "stop_at_cost",
    )
    _PLACE: ClassVar[str] = "stop_at_setting"
    _COST: ClassVar[str] = "stop_at_cost"
    _WORDS: ClassVar[Mapping[str, str]] = {
        "stop_at_setting": "every promise had come to setting {}, or to a later one",
        "stop_at_cost": "no promise cost more than {}",
        "stop_gain": f"{_GAINED_LITTLE} the cost",
    }

    ids: Text
    examples: Positive
    costs: tuple[Cost, ...] | None = None
    stop_at_setting: Text | None = None
    stop_at_cost: Cost | None = None

    def check_order(self, order: Sequence[str]) -> None:
        """Refuses costs and a rule that do not fit the settings of the plan.

        Raises:
          ManifestError: If the number of costs is wrong, or a setting is unknown.
        """
        if self.costs is not None and len(self.costs) != len(order):
            raise ManifestError(f"costs must be those of {len(order)} settings, as order has, got {len(self.costs)}")
        if self.stop_at_setting is not None and self.stop_at_setting not in order:
            raise ManifestError(f"stop_at_setting must be one of order, got {shown(self.stop_at_setting)}")

    def _place(self, grid: Sequence[Any]) -> int | None:
        return None if self.stop_at_setting is None else grid.index(self.stop_at_setting)

    @property
    def needs_costs(self) -> bool:
        """Whether the rule needs the costs of settings."""
        return self.stop_at_cost is not None or self.stop_gain is not None


@dataclass(frozen=True, kw_only=True)
class EarlierEnd(Record):
    """An earlier end of a calibration or certification that was continued.

    Attributes:
      plan: Digest of the plan then, which differs from the last one in its stopping rule.
      rounds: Number of rounds that had been looked at.
      ended_by: The part that had stopped it.
    """

    plan: Text
    rounds: Positive
    ended_by: Text


@dataclass(frozen=True, kw_only=True)
class SequentialRecord(Record):
    """The end of a calibration or certification that was watched round by round.

    Attributes:
      rounds: Number of rounds that were evaluated and looked at.
      of_rounds: Number of rounds of the data.
      of_examples: Number of examples of the data; those of the rounds looked at are `data.examples`.
      ended_by: The part of the plan that stopped it: one of its rules, `all_proved` if every entry had reached the end
        of the testing order, `end_of_data` if nothing stopped it.
      continues: Earlier ends, if it was continued; the earliest first.
    """

    rounds: Positive
    of_rounds: Positive
    of_examples: Positive
    ended_by: Text
    continues: tuple[EarlierEnd, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        AtLeast(self.rounds)("of_rounds", self.of_rounds)
        if self.ended_by == "end_of_data" and self.rounds != self.of_rounds:
            raise ManifestError(
                f"ended_by must say what stopped it, since rounds is {self.rounds} of {self.of_rounds}, got end_of_data"
            )
        rounds = [*(end.rounds for end in self.continues), self.rounds]
        if any(after < before for before, after in pairwise(rounds)):
            raise ManifestError(f"continues must be of no more rounds than what followed, got {rounds}")


def rules_of_ends(plan: type[WatchedPlan]) -> dict[str, Any]:
    """Returns the JSON Schema rules for `ended_by` of a manifest with such a plan."""
    ended = {"properties": {"ended_by": OneOf(plan.ends()).schema()}}
    of_all = {"properties": {**ended["properties"], "continues": {"items": ended}}}
    return {"allOf": [{"properties": {"sequential": of_all}}]}


_Entry = TestedEntry[Any, Any]


def looks_by_round(entries: Sequence[_Entry], grid: Sequence[object]) -> list[tuple[Proved, ...]]:
    """Returns for each round the state of every entry, as stopping rules take it.

    Args:
      entries: All entries of a manifest, with looks.
      grid: All that may be tested, in testing order.
    """
    of_entries = [[look.proved(grid) for look in entry.looks or ()] for entry in entries]
    return list(zip(*of_entries, strict=True))


def check_rounds(
    entries: Sequence[_Entry],
    plan: WatchedPlan | None,
    ended: SequentialRecord | None,
    *,
    grid: Sequence[Any],
    data: CountedData,
) -> None:
    """Refuses rounds that are at odds with the plan, the data or the entries.

    Args:
      entries: All entries of a manifest.
      plan: The stopping rule; None if all examples count.
      ended: The recorded end; None if all examples count.
      grid: All that may be tested, in testing order.
      data: The examples that were counted.

    Raises:
      ManifestError: If a value is at odds with another.
    """
    check_looked_at(entries, rounds=None if ended is None else ended.rounds, is_planned=plan is not None)
    if plan is None or ended is None:
        return
    for index, end in enumerate(ended.continues):
        OneOf(plan.ends())(f"sequential.continues[{index}].ended_by", end.ended_by)
    OneOf(plan.ends())("sequential.ended_by", ended.ended_by)
    if ended.ended_by.startswith("stop_") and getattr(plan, ended.ended_by) is None:
        raise ManifestError(f"sequential.ended_by is {ended.ended_by}, but plan.sequential has no such rule")
    if isinstance(plan, SettingSequentialPlan):
        _check_declared(entries, plan, ended, has_clusters=data.clusters is not None)
    elif ended.of_examples < data.examples:
        raise ManifestError(
            f"sequential.of_examples must be at least data.examples, which is {data.examples}, got {ended.of_examples}"
        )
    if (ended.rounds == ended.of_rounds) != (ended.of_examples == data.examples) or ended.of_examples < data.examples:
        raise ManifestError(
            f"data.examples is {data.examples} of {ended.of_examples}, but sequential.rounds {ended.rounds} of "
            f"{ended.of_rounds}"
        )
    if isinstance(plan, SettingSequentialPlan):
        _check_end(entries, plan, ended, grid=grid)


def _check_declared(
    entries: Sequence[_Entry], plan: SettingSequentialPlan, ended: SequentialRecord, *, has_clusters: bool
) -> None:
    """Refuses rounds that are not of the declared examples, or lack costs that the rule needs."""
    if ended.of_examples != plan.examples:
        raise ManifestError(
            f"sequential.of_examples must be plan.sequential.examples, which is {plan.examples}, got "
            f"{ended.of_examples}"
        )
    if not has_clusters:
        _check_sizes(entries, plan, ended)
    if plan.needs_costs and any(
        look.setting is not None and look.cost is None for entry in entries for look in entry.looks or ()
    ):
        raise ManifestError("looks must say costs, since plan.sequential stops by them")


def _check_sizes(entries: Sequence[_Entry], plan: SettingSequentialPlan, ended: SequentialRecord) -> None:
    """Refuses rounds of other sizes than planned, if every example counts by itself."""
    of_rounds = -(-plan.examples // plan.round_examples)
    if ended.of_rounds != of_rounds:
        raise ManifestError(
            f"sequential.of_rounds must be {of_rounds}, of {plan.round_examples} of {plan.examples} examples each, got "
            f"{ended.of_rounds}"
        )
    for place, entry in enumerate(entries):
        for index, look in enumerate(entry.looks or () if entry.group is None else ()):
            expected = min((index + 1) * plan.round_examples, plan.examples)
            if look.n != expected:
                raise ManifestError(
                    f"calibrations[{place}].looks[{index}].n must be {expected}, as plan.sequential says, got {look.n}"
                )


def _check_end(
    entries: Sequence[_Entry], plan: SettingSequentialPlan, ended: SequentialRecord, *, grid: Sequence[Any]
) -> None:
    """Refuses an end other than the first one by the rule."""
    # Rounds that an earlier rule looked at before it stopped do not concern this rule.
    first = ended.continues[-1].rounds if ended.continues else 1
    looks = looks_by_round(entries, grid)
    for rounds in range(first, ended.rounds + 1):
        end = plan.ended_by(looks[:rounds], grid=grid, of_rounds=ended.of_rounds)
        expected = ended.ended_by if rounds == ended.rounds else None
        if end != expected:
            raise ManifestError(
                f"sequential.ended_by is {shown(ended.ended_by)} after round {ended.rounds}, but after round {rounds} "
                f"plan.sequential says {shown(end)}"
            )
