"""The whole set, calibration and test parts together, at every threshold."""

import dataclasses
from collections.abc import Iterator, Sequence

from calm_beam.manifest import Objective
from calm_beam.risk.fixed_point import LOSS_SCALE
from calm_beam.risk.statistics import Loss

from .outcomes import lane_counts
from .splits import SplitTotals


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridRow:
    """The whole set at one threshold under one loss.

    Attributes:
      measure: Name of the generations.
      threshold: Exit threshold; None for the full model.
      consistency: Kind of consistency.
      metric: Name of the metric.
      loss: What is made of its scores.
      n: Number of independent units.
      risk: Mean loss.
      layers: Decoder layers per token.
      flops_appendix_b: As in `TrialOutcome`.
      flops_calm_table: As there.
      bleu: As there.
      cut: Outputs that ended at the greatest length and not with eos.
      examples: Number of examples, those that failed included.
      repeated: Examples whose prompt another one has too, each prompt's first not counted.
      failed: Examples without outputs, which count with loss 1.
    """

    measure: str
    threshold: float | None
    consistency: str
    metric: str
    loss: str
    n: int
    risk: float
    layers: float
    flops_appendix_b: float | None
    flops_calm_table: float | None
    bleu: float | None
    cut: int
    examples: int
    repeated: int
    failed: int

    @property
    def objective(self) -> Objective:
        """The loss that the risk is the mean of."""
        return Objective(self.consistency, self.metric, loss=self.loss)


def grid_rows(
    measure: str, totals: SplitTotals, *, thresholds: Sequence[float], count_rows: Sequence[str], num_layers: int
) -> Iterator[GridRow]:
    """Yields the whole set at every threshold under every loss, the full model first.

    Args:
      measure: Name of the generations.
      totals: Sums over them.
      thresholds: The grid, descending.
      count_rows: Names of what was counted.
      num_layers: Decoder depth, reported where there is no token.
    """
    counts, whole = totals.whole_counts(), totals.whole
    for lane, threshold in enumerate((None, *thresholds)):
        found = lane_counts(counts, count_rows, lane=lane)
        for objective in whole.layout.objectives:
            evidence = totals.calibration_part(-1, objective)
            risk = 0.0 if threshold is None else int(evidence.sums[Loss()][lane - 1]) / LOSS_SCALE / evidence.n
            yield GridRow(
                measure=measure,
                threshold=threshold,
                consistency=objective.consistency,
                metric=objective.metric,
                loss=objective.loss,
                n=evidence.n,
                risk=risk,
                layers=float(num_layers) if found.layers is None else found.layers,
                flops_appendix_b=found.flops_appendix_b,
                flops_calm_table=found.flops_calm_table,
                bleu=found.bleu,
                cut=found.cut,
                examples=whole.examples,
                repeated=whole.duplicates,
                failed=whole.failed,
            )


def objectives_of_grid(grid: Sequence[GridRow]) -> list[Objective]:
    """Returns the losses of a grid, each once."""
    return list(dict.fromkeys(row.objective for row in grid))


def full_score(objective: Objective) -> float:
    """Returns what the full model scores where an objective's risk is taken from it."""
    # Without early exits, an output is like the full model's, and as good.
    above = objective.tail
    return 0.0 if objective.consistency == "risk" and above is None else 1.0


def score_in_words(objective: Objective) -> str:
    """Returns what is high where an objective's risk is low."""
    above = objective.tail
    if above is not None:
        against = "the full model's output" if objective.consistency == "textual" else "the references"
        return f"share of outputs that lose at most {above:g} {objective.metric} against {against}"
    if objective.consistency == "textual":
        return f"{objective.metric} against the full model's output"
    losses_only = " (losses only)" if objective.loss == "relu" else ""
    return f"{objective.metric} against the references, less the full model's{losses_only}"
