"""What a calibration has proved, round by round: running p-values, and the looks that led there.

After every round the p-values of all examples up to then are computed, and the least of each threshold up to then is
its p-value. For p-values that are the inverse of a capital which no bettor can expect to win (`is_anytime`), Ville's
inequality makes that valid at every round, and whatever decides when to stop.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from calm_beam.manifest import Calibration, Look
from calm_beam.risk.fixed_point import loss_sum_upper
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.statistics import Loss
from calm_beam.risk.stopping import Proved

from .plan import Plan
from .result import RiskRow, choose_thresholds, spec_p_values, tested_rows
from .specs import Objective, Spec
from .totals import CalibrationTotals


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

    def looks(self, plan: Plan) -> list[list[Proved]]:
        """Returns what every entry had come to after each round, as a rule to stop takes it."""
        by_entry = [
            [
                Proved(-1 if look.threshold is None else plan.thresholds.index(look.threshold), look.layers)
                for look in entry.looks or ()
            ]
            for entry in self.calibrations
        ]
        return [list(proved) for proved in zip(*by_entry, strict=True)]


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
    up_to = [rounds[0]]
    for each in rounds[1:]:
        up_to.append(up_to[-1].merge(each))
    # [rounds, thresholds], for each spec
    running = [
        np.minimum.accumulate(np.stack([spec_p_values(totals, spec) for totals in up_to])) for spec in plan.specs
    ]
    final = [p_values[-1] for p_values in running]
    rows = tested_rows(up_to[-1], plan, p_values=final, num_layers=num_layers)
    entries = choose_thresholds(rows, plan, num_layers=num_layers)
    calibrations = tuple(
        dataclasses.replace(entry, looks=_looks(entry, spec, p_values, up_to, plan=plan, num_layers=num_layers))
        for entry, spec, p_values in zip(entries, plan.specs, running, strict=True)
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
        for spec, entry in zip(plan.specs, calibrations, strict=True)
        if spec.group is None and entry.threshold != plan.thresholds[-1]
    }
    return frozenset(spec.objective for spec in plan.specs) - open_objectives


def _looks(
    entry: Calibration,
    spec: Spec,
    p_values: np.ndarray,
    up_to: Sequence[CalibrationTotals],
    *,
    plan: Plan,
    num_layers: int,
) -> tuple[Look, ...]:
    followed = 0 if entry.threshold is None else plan.thresholds.index(entry.threshold)
    log_capital = P_VALUES[spec.p_value].log_capital
    assert log_capital is not None, "the plan has checked it"
    accepted = PROCEDURES[spec.procedure](p_values, epsilon=spec.epsilon).last_rejected()
    looks = []
    for totals, place in zip(up_to, accepted, strict=True):
        if totals.of_group(spec.group).risk.n == 0:
            # The first rounds may have no example of a group.
            looks.append(Look(n=0, threshold=None, layers=float(num_layers), risk=0.0, log_capital=0.0))
            continue
        evidence = totals.evidence(spec.objective, group=spec.group)
        layers = totals.mean_layers(num_layers, group=spec.group)
        looks.append(
            Look(
                n=evidence.n,
                threshold=None if place < 0 else plan.thresholds[place],
                layers=float(num_layers) if place < 0 else layers[1 + place],
                risk=float(loss_sum_upper(evidence.sums[Loss()])[followed] / evidence.n),
                log_capital=float(log_capital(evidence, spec.delta)[followed]),
            )
        )
    return tuple(looks)
