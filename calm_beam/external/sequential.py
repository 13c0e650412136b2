"""What the rounds of a certification prove: running p-values, the looks that led there, and where the rule stops.

The same as `calm_beam.calibration.sequential` for settings: after every round the p-values of all examples up to then
are computed, and the least of each setting up to then is its p-value. By Ville's inequality that is valid at every
round, and whatever decides when to stop, if the p-values are the inverse of a capital (`is_anytime`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from calm_beam.manifest import ExternalCalibration, ExternalLook, ExternalPlan, ExternalTest, external_end
from calm_beam.risk.evidence import Evidence
from calm_beam.risk.fixed_point import loss_sum_upper
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.setting_sums import LossesError
from calm_beam.risk.statistics import Loss
from calm_beam.risk.stopping import Proved

from .evaluated import EvaluatedLosses
from .result import SettingRow, entries_of, evidence_of, tested_rows
from .sweep import SweepLosses


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedSettings:
    """What the rounds prove that have been looked at.

    Attributes:
      rounds: How many these are; rounds after the one that the rule stops at are not looked at.
      ended_by: What ends the certification there, one of `EXTERNAL_ENDS`; None if it goes on.
      rows: For every test, what it says of every setting.
      calibrations: For every test, its manifest entry, with a look after each round.
    """

    rounds: int
    ended_by: str | None
    rows: tuple[tuple[SettingRow, ...], ...]
    calibrations: tuple[ExternalCalibration, ...]


def watched_settings(
    evaluated: EvaluatedLosses,
    plan: ExternalPlan,
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
    tests = [_Watched.of(evaluated.rounds, test, plan=plan) for test in plan.tests]
    looks = [
        [_proved(each.places[number], of_round, plan.order) for each in tests]
        for number, of_round in enumerate(costs_by_round)
    ]
    rounds, ended_by = len(looks), None
    for number in range(looked_at, len(looks) + 1):
        ended_by = external_end(looks[:number], plan.sequential, order=plan.order, of_rounds=of_rounds)
        if ended_by is not None:
            rounds = number
            break
    rows = tuple(each.rows(rounds, plan=plan, costs=costs_by_round[rounds - 1]) for each in tests)
    entries = entries_of(plan, rows)
    return WatchedSettings(
        rounds=rounds,
        ended_by=ended_by,
        rows=rows,
        calibrations=tuple(
            dataclasses.replace(entry, looks=each.looks(entry, plan=plan, costs=costs_by_round[:rounds]))
            for entry, each in zip(entries, tests, strict=True)
        ),
    )


def _proved(place: int, costs: Mapping[str, float], order: Sequence[str]) -> Proved:
    return Proved(place, costs.get(order[place], math.inf) if place >= 0 else math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Watched:
    """One test after every round.

    Attributes:
      test: The test.
      evidence: After each round, over all examples up to then.
      p_values: Running, shape (rounds, settings).
      places: After each round, index of the last setting accepted; -1 for none.
    """

    test: ExternalTest
    evidence: tuple[Evidence, ...]
    p_values: np.ndarray
    places: tuple[int, ...]

    @classmethod
    def of(cls, rounds: Sequence[SweepLosses], test: ExternalTest, *, plan: ExternalPlan) -> "_Watched":
        evidence: list[Evidence] = []
        for each in rounds:
            names, fixed = each.units(order=plan.order, group=test.group, tail=test.tail)
            added = evidence_of(names, fixed, p_value=test.p_value, delta=test.delta, salt=plan.salt)
            evidence.append(_together(evidence[-1], added) if evidence else added)
        running = np.minimum.accumulate(np.stack([_p_values(each, test, len(plan.order)) for each in evidence]))
        last = PROCEDURES[test.procedure](running, epsilon=test.epsilon).last_rejected()
        return cls(test=test, evidence=tuple(evidence), p_values=running, places=tuple(last.tolist()))

    def rows(self, rounds: int, *, plan: ExternalPlan, costs: Mapping[str, float]) -> tuple[SettingRow, ...]:
        """Returns what the test says of every setting after some rounds."""
        return tested_rows(
            self.test,
            self.evidence[rounds - 1],
            p_values=self.p_values[rounds - 1],
            order=plan.order,
            costs=costs,
        )

    def looks(
        self, entry: ExternalCalibration, *, plan: ExternalPlan, costs: Sequence[Mapping[str, float]]
    ) -> tuple[ExternalLook, ...]:
        """Returns the looks of the entry that the test has come to, one for each round whose costs are given."""
        followed = 0 if entry.setting is None else plan.order.index(entry.setting)
        log_capital = P_VALUES[self.test.p_value].log_capital
        assert log_capital is not None, "the plan has checked it"
        looks = []
        for evidence, place, of_round in zip(self.evidence, self.places, costs, strict=False):
            setting = plan.order[place] if place >= 0 else None
            risk = capital = 0.0
            # The first rounds may have no example of a group.
            if evidence.n:
                risk = float(loss_sum_upper(evidence.sums[Loss()])[followed] / evidence.n)
                capital = float(log_capital(evidence, self.test.delta)[followed])
            looks.append(
                ExternalLook(
                    n=evidence.n,
                    setting=setting,
                    cost=None if setting is None else of_round.get(setting),
                    risk=risk,
                    log_capital=capital,
                )
            )
        return tuple(looks)


def _together(one: Evidence, other: Evidence) -> Evidence:
    return Evidence(n=one.n + other.n, sums={name: sums + other.sums[name] for name, sums in one.sums.items()})


def _p_values(evidence: Evidence, test: ExternalTest, settings: int) -> np.ndarray:
    """Returns a p-value for every setting; a group without examples proves nothing."""
    if evidence.n == 0:
        return np.ones(settings)
    return P_VALUES[test.p_value].p_values(evidence, test.delta)
