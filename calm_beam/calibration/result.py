"""From totals to chosen thresholds: p-values, fixed sequence test, and the table of risks."""

import dataclasses
from collections.abc import Sequence

from calm_beam.manifest import Calibration, PathEntry
from calm_beam.risk.fwer import fixed_sequence_test
from calm_beam.risk.pvalues import P_VALUES, Evidence
from calm_beam.risk.statistics import Loss

from .specs import Spec, objectives_of
from .totals import CalibrationTotals


@dataclasses.dataclass(frozen=True, kw_only=True)
class RiskRow:
    """One line of the risk table: one threshold under one spec.

    Attributes:
      consistency: Kind of consistency.
      metric: Name of the metric.
      delta: Risk tolerance.
      epsilon: Allowed probability of error.
      threshold: Exit threshold.
      n: Number of examples.
      loss_sum: Exact sum of losses in units of 2^-32.
      risk: Mean loss.
      p_value: Of "the risk exceeds delta".
      tested: Whether fixed sequence testing got to this threshold.
      rejected: Whether it was found safe.
      layers: Mean decoder layers per token.
    """

    consistency: str
    metric: str
    delta: float
    epsilon: float
    threshold: float
    n: int
    loss_sum: int
    risk: float
    p_value: float
    tested: bool
    rejected: bool
    layers: float


def risk_rows(
    totals: CalibrationTotals,
    specs: Sequence[Spec],
    *,
    thresholds: Sequence[float],
    p_value: str,
    num_layers: int,
) -> tuple[RiskRow, ...]:
    """Returns the risk of every threshold under every spec, and how far its fixed sequence test got.

    Args:
      totals: Over the whole calibration set.
      specs: The guarantees asked for.
      thresholds: The grid, descending: the testing order, fixed before any loss was seen.
      p_value: A key of `P_VALUES`.
      num_layers: Decoder depth.

    Raises:
      ValueError: If there are no examples.

    Source: CALM Algorithm 1 (calibration with fixed sequence testing).
    """
    objectives = objectives_of(specs)
    risks = totals.risk.empirical_risk()
    layers = totals.mean_layers(num_layers)[1:]
    rows: list[RiskRow] = []
    for spec in specs:
        index = objectives.index(spec.objective)
        sums = totals.risk.loss_sums[index]
        evidence = Evidence(n=totals.risk.n, sums={Loss(): sums})
        p_values = P_VALUES[p_value].p_values(evidence, spec.delta)
        test = fixed_sequence_test(p_values, epsilon=spec.epsilon)
        rows.extend(
            RiskRow(
                consistency=spec.objective.consistency,
                metric=spec.objective.metric,
                delta=spec.delta,
                epsilon=spec.epsilon,
                threshold=threshold,
                n=totals.risk.n,
                loss_sum=int(sums[place]),
                risk=float(risks[index, place]),
                p_value=float(p_values[place]),
                tested=bool(test.tested[place]),
                rejected=bool(test.rejected[place]),
                layers=layers[place],
            )
            for place, threshold in enumerate(thresholds)
        )
    return tuple(rows)


def calibrate(
    rows: Sequence[RiskRow], *, specs: Sequence[Spec], p_value: str, num_layers: int
) -> tuple[Calibration, ...]:
    """Returns one manifest entry per spec: the lowest threshold found safe, and the whole tested path.

    Args:
      rows: From `risk_rows`.
      specs: As given there.
      p_value: As given there.
      num_layers: Decoder depth, reported for "never exit".
    """
    per_spec = len(rows) // len(specs)
    entries = []
    for index, spec in enumerate(specs):
        tested = [row for row in rows[index * per_spec : (index + 1) * per_spec] if row.tested]
        chosen = next((row for row in reversed(tested) if row.rejected), None)
        entries.append(
            Calibration(
                consistency=spec.objective.consistency,
                metric=spec.objective.metric,
                delta=spec.delta,
                epsilon=spec.epsilon,
                p_value=p_value,
                procedure="fixed_sequence",
                threshold=chosen.threshold if chosen else None,
                layers=chosen.layers if chosen else num_layers,
                risk=chosen.risk if chosen else 0.0,
                path=tuple(
                    PathEntry(
                        threshold=row.threshold,
                        n=row.n,
                        risk=row.risk,
                        p_value=row.p_value,
                        rejected=row.rejected,
                        layers=row.layers,
                    )
                    for row in tested
                ),
            )
        )
    return tuple(entries)
