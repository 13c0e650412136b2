"""What rounds have proved, of thresholds or of other settings: running p-values, and the looks that led there.

Why that is valid at every round, and whatever decides when to stop: see `calm_beam.risk.testing.GridTest`.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from calm_beam.manifest import (
    Calibration,
    Look,
    Objective,
    Plan,
    SettingCalibration,
    SettingLook,
    SettingPlan,
    looks_by_round,
)
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.risk.setting_sums import LossesError
from calm_beam.risk.stopping import Proved
from calm_beam.risk.testing import GridTest, grid_tests

from . import settings
from .evaluated import EvaluatedLosses
from .result import RiskRow, choose_thresholds, rows_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """What all rounds up to now have proved.

    Attributes:
      totals: Over all of them.
      rows: The risk table.
      calibrations: One manifest entry per spec, with a look after each round.
    """

    totals: CalibrationTotals
    rows: tuple[RiskRow, ...]
    calibrations: tuple[Calibration, ...]

    def ended_by(self, plan: Plan, *, of_rounds: int) -> str | None:
        """Returns what ends the calibration after these rounds, one of its plan's `ends`; None if nothing does.

        Args:
          plan: With the whole grid, and a rule.
          of_rounds: How many rounds the data have.
        """
        assert plan.sequential is not None
        looks = looks_by_round(self.calibrations, plan.thresholds)
        return plan.sequential.ended_by(looks, grid=plan.thresholds, of_rounds=of_rounds)


def watched(rounds: Sequence[CalibrationTotals], plan: Plan, *, num_layers: int) -> Watched:
    """Returns what some rounds have proved.

    Args:
      rounds: What was counted in each, from the first on without a gap; at least one.
      plan: What is tested: all of its p-values may be watched.
      num_layers: Decoder depth.

    Raises:
      EvidenceError: If the losses do not allow a p-value that was planned.

    Source: Ville (1939); CALM Algorithm 1, with p-values that hold at any time.
    """
    up_to = list(itertools.accumulate(rounds, CalibrationTotals.merge))
    tests = grid_tests(rounds, plan.tests)
    tested = [test.after(len(rounds)) for test in tests]
    rows = rows_of(up_to[-1], plan, tested=tested, num_layers=num_layers)
    entries = choose_thresholds(rows, plan, num_layers=num_layers)
    calibrations = tuple(
        dataclasses.replace(entry, looks=_looks(entry, test, up_to, plan=plan, num_layers=num_layers))
        for entry, test in zip(entries, tests, strict=True)
    )
    return Watched(totals=up_to[-1], rows=rows, calibrations=calibrations)


def proved_objectives(calibrations: Sequence[Calibration], plan: Plan) -> frozenset[Objective]:
    """Returns the objectives that nothing is left to prove of: all their entries have come to the end of the grid.

    Args:
      calibrations: One for each spec of the plan.
      plan: What is tested. Entries of groups have no say: of one that is not there nothing is ever proved.
    """
    open_objectives = {
        spec.objective
        for spec, entry in zip(plan.tests, calibrations, strict=True)
        if spec.group is None and entry.threshold != plan.thresholds[-1]
    }
    return frozenset(spec.objective for spec in plan.tests) - open_objectives


def _looks(
    entry: Calibration, test: GridTest, up_to: Sequence[CalibrationTotals], *, plan: Plan, num_layers: int
) -> tuple[Look, ...]:
    followed = 0 if entry.threshold is None else plan.thresholds.index(entry.threshold)
    looks = []
    for totals, found in zip(up_to, test.looks(followed=followed), strict=True):
        layers = totals.of_group(entry.group).mean_layers(num_layers)
        looks.append(
            Look(
                n=found.n,
                threshold=None if found.place < 0 else plan.thresholds[found.place],
                layers=float(num_layers) if found.place < 0 else layers[1 + found.place],
                risk=found.risk,
                log_capital=found.log_capital,
            )
        )
    return tuple(looks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedSettings:
    """What the rounds prove that have been looked at.

    Attributes:
      rounds: How many these are; rounds after the one that the rule stops at are not looked at.
      ended_by: What ends the certification there, one of the plan's `ends`; None if it goes on.
      rows: For every test, what it says of every setting.
      calibrations: For every test, its manifest entry, with a look after each round.
    """

    rounds: int
    ended_by: str | None
    rows: tuple[tuple[settings.SettingRow, ...], ...]
    calibrations: tuple[SettingCalibration, ...]


def watched_settings(
    evaluated: EvaluatedLosses,
    plan: SettingPlan,
    *,
    of_rounds: int,
    costs: Mapping[str, float] | None = None,
    looked_at: int = 1,
) -> WatchedSettings:
    """Returns what the whole rounds prove, up to the first at which the rule says stop.

    Args:
      evaluated: At least one whole round.
      plan: What is asked for, with a rule; all of its p-values may be watched.
      of_rounds: How many rounds the declared examples have.
      costs: What settings cost, as it was declared; None takes the mean costs that rows say.
      looked_at: Number of rounds that a rule before this one had stopped after; 1 if there was none. This rule is asked
        from then on.

    Raises:
      LossesError: If the rule asks for costs, and nobody says them.

    Source: Ville (1939); Angelopoulos et al. (2021), "Learn then Test", with p-values that hold at any time.
    """
    assert plan.sequential is not None
    costs_by_round = evaluated.costs if costs is None else [costs] * len(evaluated.rounds)
    lacking = [name for name in plan.order if name not in costs_by_round[0]]
    if plan.sequential.needs_costs and lacking:
        raise LossesError(
            f"the rule to stop asks what settings cost, and nobody says it of setting {lacking[0]!r}. Declare costs "
            "(--costs), or give the losses a column cost, from the first round on."
        )
    tests = grid_tests([each.ordered(plan.order, salt=plan.salt) for each in evaluated.rounds], plan.tests)
    looks = [
        [_proved(each.places[number], of_round, plan.order) for each in tests]
        for number, of_round in enumerate(costs_by_round)
    ]
    rounds, ended_by = len(looks), None
    for number in range(looked_at, len(looks) + 1):
        ended_by = plan.sequential.ended_by(looks[:number], grid=plan.order, of_rounds=of_rounds)
        if ended_by is not None:
            rounds = number
            break
    rows = tuple(
        settings.rows_of(test, each.after(rounds), order=plan.order, costs=costs_by_round[rounds - 1])
        for test, each in zip(plan.tests, tests, strict=True)
    )
    entries = settings.entries_of(plan, rows)
    return WatchedSettings(
        rounds=rounds,
        ended_by=ended_by,
        rows=rows,
        calibrations=tuple(
            dataclasses.replace(
                entry, looks=_looks_of_settings(entry, each, order=plan.order, costs=costs_by_round[:rounds])
            )
            for entry, each in zip(entries, tests, strict=True)
        ),
    )


def _proved(place: int, costs: Mapping[str, float], order: Sequence[str]) -> Proved:
    return Proved(place, costs.get(order[place], math.inf) if place >= 0 else math.inf)


def _looks_of_settings(
    entry: SettingCalibration, test: GridTest, *, order: Sequence[str], costs: Sequence[Mapping[str, float]]
) -> tuple[SettingLook, ...]:
    """Returns the looks of the entry that a test has come to, one for each round whose costs are given."""
    followed = 0 if entry.setting is None else order.index(entry.setting)
    looks = []
    for found, of_round in zip(test.looks(followed=followed), costs, strict=False):
        setting = order[found.place] if found.place >= 0 else None
        looks.append(
            SettingLook(
                n=found.n,
                setting=setting,
                cost=None if setting is None else of_round.get(setting),
                risk=found.risk,
                log_capital=found.log_capital,
            )
        )
    return tuple(looks)
