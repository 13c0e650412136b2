"""The rounds of a certification that stops when enough is proved: their rule, what every look found, how it ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from calm_beam.risk.stopping import Proved, StopRule

from ._checks import ManifestError, shown
from ._record import Record
from ._tests import LookRecord, TestedEntry, check_looked_at
from ._values import Cost, Positive, Share, Text, one_of
from .records import EarlierEnd, SequentialRecord

EXTERNAL_ENDS = ("stop_at_setting", "stop_at_cost", "stop_gain", "all_proved", "end_of_data")
"""What may end a certification that is looked at after every round; the last two are no rules."""
_REASONS = {"place": "stop_at_setting", "cost": "stop_at_cost", "gain": "stop_gain", "all_proved": "all_proved"}


@dataclass(frozen=True, kw_only=True)
class ExternalSequentialPlan(Record):
    """How a certification is watched that stops when enough is proved.

    Attributes:
      ids: Identifies all examples that may be evaluated, and their groups and clusters; the plan's salt orders them.
      examples: How many they are.
      round_examples: A round ends with the example, or the cluster, that makes it so many examples.
      costs: What settings cost, in the plan's order, as it was declared; None where nobody did, or rows say it.
      stop_at_setting: Stops once every entry has accepted this setting, or a later one; None: whatever they accept.
      stop_at_cost: Stops once no entry's setting costs more than this; None: whatever they cost.
      stop_gain: Stops after rounds in which no entry saved this share of its cost; None: whatever they save.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("costs", "stop_at_setting", "stop_at_cost", "stop_gain")

    ids: Text
    examples: Positive
    round_examples: Positive
    costs: tuple[Cost, ...] | None = None
    stop_at_setting: Text | None = None
    stop_at_cost: Cost | None = None
    stop_gain: Share | None = None

    def check_order(self, order: Sequence[str]) -> None:
        """Refuses costs and a rule that are not about the settings of the plan.

        Raises:
          ManifestError: If there is no cost for each, or no such setting.
        """
        if self.costs is not None and len(self.costs) != len(order):
            raise ManifestError(f"costs must be those of {len(order)} settings, as order has, got {len(self.costs)}")
        if self.stop_at_setting is not None and self.stop_at_setting not in order:
            raise ManifestError(f"stop_at_setting must be one of order, got {shown(self.stop_at_setting)}")

    def rule(self, order: Sequence[str]) -> StopRule:
        """Returns when to stop, given the settings in testing order."""
        return StopRule(
            place=None if self.stop_at_setting is None else order.index(self.stop_at_setting),
            cost=self.stop_at_cost,
            gain=self.stop_gain,
        )

    @property
    def needs_costs(self) -> bool:
        """Whether the rule asks what settings cost."""
        return self.stop_at_cost is not None or self.stop_gain is not None


@dataclass(frozen=True, kw_only=True)
class ExternalEnd(EarlierEnd):
    """Where a certification had ended before it was continued; `ended_by` is one of `EXTERNAL_ENDS`."""

    ended_by: Annotated[str, one_of(EXTERNAL_ENDS)]


@dataclass(frozen=True, kw_only=True)
class ExternalSequentialRecord(SequentialRecord):
    """How a certification ended that was watched round by round; `ended_by` is one of `EXTERNAL_ENDS`."""

    ended_by: Annotated[str, one_of(EXTERNAL_ENDS)]
    continues: tuple[ExternalEnd, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExternalLook(LookRecord):
    """What an entry had come to after a round.

    Attributes:
      setting: The last setting in testing order that was accepted by then; None for none.
      cost: Its cost, or the mean over the examples counted by then; None where nobody told, and without a setting.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("n", "setting", "cost")

    setting: Text | None
    cost: Cost | None

    def proved(self, order: Sequence[str]) -> Proved:
        """Returns what a rule to stop takes, given the settings in testing order."""
        return Proved(
            -1 if self.setting is None else order.index(self.setting), math.inf if self.cost is None else self.cost
        )


_Entry = TestedEntry[Any, ExternalLook]


def external_end(
    looks: Sequence[Sequence[Proved]], plan: ExternalSequentialPlan, *, order: Sequence[str], of_rounds: int
) -> str | None:
    """Returns what ends a certification after some rounds, one of `EXTERNAL_ENDS`; None if nothing does.

    Args:
      looks: For each of these rounds, what every entry had come to.
      plan: The rule.
      order: The settings in testing order.
      of_rounds: How many rounds there are.
    """
    reason = plan.rule(order).reason(looks, settings=len(order))
    if reason is not None:
        return _REASONS[reason]
    return "end_of_data" if len(looks) == of_rounds else None


def check_rounds(
    entries: Sequence[_Entry],
    plan: ExternalSequentialPlan | None,
    ended: ExternalSequentialRecord | None,
    *,
    order: Sequence[str],
    examples: int,
    has_clusters: bool,
) -> None:
    """Refuses rounds that are at odds with the plan, the data or the entries.

    Args:
      entries: All of a manifest.
      plan: Its rule; None where all examples count.
      ended: How it ended; None likewise.
      order: The settings in testing order.
      examples: How many examples were counted.
      has_clusters: Whether clusters and not examples are counted as units.

    Raises:
      ManifestError: If a value is at odds with another.
    """
    check_looked_at(entries, rounds=None if ended is None else ended.rounds, is_planned=plan is not None)
    if plan is None or ended is None:
        return
    if ended.of_examples != plan.examples:
        raise ManifestError(
            f"sequential.of_examples must be plan.sequential.examples, which is {plan.examples}, got "
            f"{ended.of_examples}"
        )
    if ended.of_examples < examples or (ended.rounds == ended.of_rounds) != (ended.of_examples == examples):
        raise ManifestError(
            f"data.examples is {examples} of {ended.of_examples}, but sequential.rounds {ended.rounds} of "
            f"{ended.of_rounds}"
        )
    if not has_clusters:
        _check_sizes(entries, plan, ended)
    if plan.needs_costs and any(
        look.setting is not None and look.cost is None for entry in entries for look in entry.looks or ()
    ):
        raise ManifestError("looks must say costs, since plan.sequential stops by them")
    _check_end(entries, plan, ended, order=order)


def _check_sizes(entries: Sequence[_Entry], plan: ExternalSequentialPlan, ended: ExternalSequentialRecord) -> None:
    """Refuses rounds of other sizes than planned, where every example counts by itself."""
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
    entries: Sequence[_Entry],
    plan: ExternalSequentialPlan,
    ended: ExternalSequentialRecord,
    *,
    order: Sequence[str],
) -> None:
    """Refuses an end other than the first that the rule sees."""
    # What an earlier rule had looked at when it stopped, this one did not.
    first = ended.continues[-1].rounds if ended.continues else 1
    of_entries = [[look.proved(order) for look in entry.looks or ()] for entry in entries]
    looks = list(zip(*of_entries, strict=True))
    for rounds in range(first, ended.rounds + 1):
        end = external_end(looks[:rounds], plan, order=order, of_rounds=ended.of_rounds)
        expected = ended.ended_by if rounds == ended.rounds else None
        if end != expected:
            raise ManifestError(
                f"sequential.ended_by is {shown(ended.ended_by)} after round {ended.rounds}, but after round {rounds} "
                f"plan.sequential says {shown(end)}"
            )
