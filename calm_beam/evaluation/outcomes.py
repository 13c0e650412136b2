"""The results of repeated splits: every trial's choice and its test, and the whole set at every threshold.

A trial chooses on its calibration part, and is tested on its test part. The whole set is both together. All trials and
the whole set are written as Parquet files; summaries are available by column.

Source: CALM, "Experimental Setting" (calibration experiments: random trials of 80 % calibration and 20 % test data).
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow
import pyarrow.parquet

from calm_beam.inputs.examples import DataError
from calm_beam.manifest import Objective, PlannedTest
from calm_beam.metrics.corpus_bleu import bleu_of
from calm_beam.risk.counts import binomial_interval
from calm_beam.risk.evidence import Evidence, Loss
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.losses import LOSS_SCALE, loss_sum_upper
from calm_beam.risk.pvalues import hoeffding_bentkus_p_value
from calm_beam.risk.testing import p_values_for
from calm_beam.storage import open_input, replacing
from calm_beam.text import counted

from .splits import BLEU_ROWS, SplitTotals

if TYPE_CHECKING:
    from .serving_speed import Speedup


# Level at which a test part alone proves that the risk exceeds delta.
PROOF_LEVEL = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """One trial of one measure under one spec.

    Attributes:
      measure: Name of the generations.
      spec: The planned test.
      trial: Number of the trial, from 0.
      threshold: The lowest that was accepted; None never exits, which is a result like any other.
      n_calibration: Number of units of the calibration part.
      n_test: Number of units of the test part, at least 1.
      test_risk: Mean loss on the test part; 0 if nothing exits.
      excess_p_value: p-value for "the risk is at most delta", from the test part alone.
      layers: Decoder layers per token on the test part.
      flops_appendix_b: Operations at full depth divided by those with exits, on the test part; None if not counted.
      flops_calm_table: The same ratio by the other count.
      bleu: BLEU of the test part; None without references or sacrebleu.
      full_bleu: BLEU of the full model on the test part.
    """

    measure: str
    spec: PlannedTest
    trial: int
    threshold: float | None
    n_calibration: int
    n_test: int
    test_risk: float
    excess_p_value: float
    layers: float
    flops_appendix_b: float | None
    flops_calm_table: float | None
    bleu: float | None
    full_bleu: float | None

    @property
    def exceeds(self) -> bool:
        """Whether the mean loss on the test part exceeds delta; it may by chance, even if the risk does not."""
        return self.test_risk > self.spec.delta

    @property
    def is_proved_broken(self) -> bool:
        """Whether the test part alone proves, at `PROOF_LEVEL`, that the risk exceeds delta."""
        return self.excess_p_value <= PROOF_LEVEL


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridRow:
    """The whole set at one threshold under one loss.

    Attributes:
      measure: Name of the generations.
      threshold: Exit threshold; None for the full model.
      consistency: Kind of consistency.
      metric: Name of the metric.
      loss: Loss computed from its scores.
      n: Number of independent units.
      risk: Mean loss.
      layers: Decoder layers per token.
      flops_appendix_b: Operations at full depth divided by those with exits; None if not counted.
      flops_calm_table: The same ratio by the other count.
      bleu: BLEU of the whole set; None without references or sacrebleu.
      cut: Outputs that reached the maximum length without eos.
      examples: Number of examples, failed ones included.
      repeated: Examples whose prompt another one has too, not counting each prompt's first.
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
        """The loss whose mean is the risk."""
        return Objective(self.consistency, self.metric, loss=self.loss)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaneCounts:
    """The cost and BLEU of all outputs of one branch.

    Attributes:
      layers: Decoder layers per token; None if there are no tokens.
      flops_appendix_b: Operations at full depth divided by those with exits; None if not counted.
      flops_calm_table: The same ratio by the other count.
      bleu: BLEU of the outputs; None without references or sacrebleu.
      cut: Outputs that reached the maximum length without eos.
    """

    layers: float | None
    flops_appendix_b: float | None
    flops_calm_table: float | None
    bleu: float | None
    cut: int


def lane_counts(counts: np.ndarray, rows: Sequence[str], *, lane: int) -> LaneCounts:
    """Returns the counts of one branch as names and ratios.

    Args:
      counts: shape (count rows, branches), int64: sums over outputs.
      rows: Names of the rows, of an `OutputCounter`.
      lane: 0 for the full model, then the thresholds.
    """
    found = dict(zip(rows, counts[:, lane].tolist(), strict=True))

    def reduction(name: str) -> float | None:
        return found["flops_full"] / found[name] if found.get(name) else None

    return LaneCounts(
        layers=found["layers"] / found["tokens"] if found["tokens"] else None,
        flops_appendix_b=reduction("flops_appendix_b"),
        flops_calm_table=reduction("flops_calm_table"),
        bleu=bleu_of(np.array([found[name] for name in BLEU_ROWS])) if BLEU_ROWS[0] in found else None,
        cut=found["cut"],
    )


def trial_outcomes(
    measure: str,
    totals: SplitTotals,
    *,
    specs: Sequence[PlannedTest],
    thresholds: Sequence[float],
    count_rows: Sequence[str],
    num_layers: int,
) -> list[TrialOutcome]:
    """Returns the outcome of every trial under every spec.

    Args:
      measure: Name of the generations.
      totals: Sums over them.
      specs: The planned tests; no p-value that needs single losses.
      thresholds: The grid, descending.
      count_rows: Names of the counts.
      num_layers: Decoder depth, reported where a part has no token.

    Raises:
      DataError: If a part of some trial is empty.
      EvidenceError: If the losses do not allow a p-value.
    """
    trials = len(totals.sizes) - 1
    outcomes = []
    for trial in range(trials):
        lanes: dict[int, LaneCounts] = {}
        test_counts = totals.test_counts(trial)
        for spec in specs:
            calibration = totals.calibration_part(trial, spec.objective)
            test = totals.test_part(trial, spec.objective)
            if not calibration.n or not test.n:
                raise DataError(
                    f"trial {trial} has {counted(calibration.n, 'unit')} for calibration and {test.n} for the test, "
                    "needs both. "
                    "Take more examples, or a share closer to 0.5."
                )
            index = _chosen_index(calibration, spec)
            lane = index + 1
            for needed in (0, lane):
                if needed not in lanes:
                    lanes[needed] = lane_counts(test_counts, count_rows, lane=needed)
            counts = lanes[lane]
            test_sum = 0 if index < 0 else int(test.sums[Loss()][index])
            outcomes.append(
                TrialOutcome(
                    measure=measure,
                    spec=spec,
                    trial=trial,
                    threshold=None if index < 0 else thresholds[index],
                    n_calibration=calibration.n,
                    n_test=test.n,
                    test_risk=test_sum / LOSS_SCALE / test.n,
                    excess_p_value=_excess_p_value(test_sum, test.n, spec=spec),
                    layers=float(num_layers) if counts.layers is None else counts.layers,
                    flops_appendix_b=counts.flops_appendix_b,
                    flops_calm_table=counts.flops_calm_table,
                    bleu=counts.bleu,
                    full_bleu=lanes[0].bleu,
                )
            )
    return outcomes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """A mean over trials, and the standard deviation of single trials; 0 for a single one."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread | None":
        """Returns mean and deviation; None if there is no value."""
        numbers = [value for value in values if value is not None]
        if not numbers:
            return None
        return cls(mean=statistics.fmean(numbers), std=statistics.stdev(numbers) if len(numbers) > 1 else 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """All trials of one measure under one spec.

    Attributes:
      measure: Name of the generations.
      spec: The planned test.
      trials: Number of trials.
      threshold: Median of the thresholds that trials chose, "never exit" counting as the highest; None if it is that.
      never: Trials that never exit.
      test_risk: Mean loss on the test part.
      exceeding: Trials whose mean loss on the test part exceeds delta.
      proved_broken: Trials whose test part alone proves that the risk exceeds delta.
      layers: Decoder layers per token, as in `TrialOutcome`; so are the following.
      flops_appendix_b: None if not counted.
      flops_calm_table: None if not counted.
      bleu: None without references or sacrebleu.
      full_bleu: None without references or sacrebleu.
    """

    measure: str
    spec: PlannedTest
    trials: int
    threshold: float | None
    never: int
    test_risk: Spread
    exceeding: int
    proved_broken: int
    layers: Spread
    flops_appendix_b: Spread | None
    flops_calm_table: Spread | None
    bleu: Spread | None
    full_bleu: Spread | None


def summaries(outcomes: Sequence[TrialOutcome]) -> list[Summary]:
    """Returns one summary for each measure and spec, in the order of their first trial."""
    groups: dict[tuple[str, PlannedTest], list[TrialOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.measure, outcome.spec), []).append(outcome)
    return [_summary(measure, spec, group=group) for (measure, spec), group in groups.items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitResults:
    """All results of repeated splits.

    Attributes:
      trials: Every trial of every measure and spec.
      curves: A summary for each measure and spec, in the order of their first trial.
      table: The summaries of requested specs; the others only draw curves.
      grid: The whole set at every threshold.
      num_layers: Decoder depth.
      speedups: Measured speedups, by measure and threshold.
    """

    trials: Sequence[TrialOutcome]
    curves: Sequence[Summary]
    table: Sequence[Summary]
    grid: Sequence[GridRow]
    num_layers: int
    speedups: "Mapping[tuple[str, float], Speedup]" = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, trials: Sequence[TrialOutcome], grid: Sequence[GridRow], *, asked: Sequence[PlannedTest], num_layers: int
    ) -> Self:
        """Returns the results of these trials, and of the whole set; `asked` are the specs of the table."""
        curves = summaries(trials)
        table = [summary for summary in curves if summary.spec in asked]
        return cls(trials=trials, curves=curves, table=table, grid=grid, num_layers=num_layers)

    def speedup(self, summary: Summary) -> "Speedup | None":
        """Returns the speedup at a summary's threshold; None if not measured, as for the full model."""
        return None if summary.threshold is None else self.speedups.get((summary.measure, summary.threshold))


def by_test(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """Returns the summaries grouped by loss and test."""
    groups: dict[tuple[object, ...], list[Summary]] = {}
    for summary in summaries:
        spec = summary.spec
        groups.setdefault((spec.objective, spec.epsilon, spec.p_value, spec.procedure), []).append(summary)
    return list(groups.values())


def grid_rows(
    measure: str, totals: SplitTotals, *, thresholds: Sequence[float], count_rows: Sequence[str], num_layers: int
) -> Iterator[GridRow]:
    """Yields the whole set at every threshold under every loss, the full model first.

    Args:
      measure: Name of the generations.
      totals: Sums over them.
      thresholds: The grid, descending.
      count_rows: Names of the counts.
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
    """Returns the full model's score on the scale from which an objective's risk is subtracted."""
    # Without early exits, an output equals the full model's and scores the same.
    above = objective.tail
    return 0.0 if objective.consistency == "risk" and above is None else 1.0


def score_in_words(objective: Objective) -> str:
    """Returns a name for the score that is high where an objective's risk is low."""
    above = objective.tail
    if above is not None:
        against = "the full model's output" if objective.consistency == "textual" else "the references"
        return f"share of outputs that lose at most {above:g} {objective.metric} against {against}"
    if objective.consistency == "textual":
        return f"{objective.metric} against the full model's output"
    losses_only = " (losses only)" if objective.loss == "relu" else ""
    return f"{objective.metric} against the references, minus the full model's{losses_only}"


def _chosen_index(evidence: Evidence, spec: PlannedTest) -> int:
    """Returns the index of the lowest accepted threshold; -1 if none is."""
    p_values = p_values_for(spec, evidence)
    return int(PROCEDURES[spec.procedure](p_values, epsilon=spec.epsilon).last_rejected())


def _excess_p_value(loss_sum: int, n: int, *, spec: PlannedTest) -> float:
    """Returns Hoeffding-Bentkus' p-value of "the risk is at most delta": losses are reversed."""
    if spec.is_signed:
        # (1 - L) / 2 is in [0, 1].
        reversed_sum, delta = (n * LOSS_SCALE - loss_sum + 1) // 2, (1 - spec.delta) / 2
    else:
        reversed_sum, delta = n * LOSS_SCALE - loss_sum, 1 - spec.delta
    return float(hoeffding_bentkus_p_value(loss_sum_upper(reversed_sum), n=n, delta=delta))


def _summary(measure: str, spec: PlannedTest, *, group: Sequence[TrialOutcome]) -> Summary:
    # Above any threshold.
    never = 2.0
    middle = statistics.median_high([never if each.threshold is None else each.threshold for each in group])
    risk = Spread.of([each.test_risk for each in group])
    layers = Spread.of([each.layers for each in group])
    assert risk is not None
    assert layers is not None
    return Summary(
        measure=measure,
        spec=spec,
        trials=len(group),
        threshold=None if middle == never else middle,
        never=sum(each.threshold is None for each in group),
        test_risk=risk,
        exceeding=sum(each.exceeds for each in group),
        proved_broken=sum(each.is_proved_broken for each in group),
        layers=layers,
        flops_appendix_b=Spread.of([each.flops_appendix_b for each in group]),
        flops_calm_table=Spread.of([each.flops_calm_table for each in group]),
        bleu=Spread.of([each.bleu for each in group]),
        full_bleu=Spread.of([each.full_bleu for each in group]),
    )


_TEXT, _WHOLE, _REAL = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
_SPEC = {"consistency": _TEXT, "metric": _TEXT, "loss": _TEXT, "delta": _REAL, "epsilon": _REAL, "p_value": _TEXT}
_TRIALS = pyarrow.schema(
    {
        "measure": _TEXT,
        **_SPEC,
        "procedure": _TEXT,
        "trial": _WHOLE,
        "threshold": _REAL,
        "n_calibration": _WHOLE,
        "n_test": _WHOLE,
        "test_risk": _REAL,
        "excess_p_value": _REAL,
        "layers": _REAL,
        "flops_appendix_b": _REAL,
        "flops_calm_table": _REAL,
        "bleu": _REAL,
        "full_bleu": _REAL,
    }
)
_GRID = pyarrow.schema(
    {
        "measure": _TEXT,
        "threshold": _REAL,
        "consistency": _TEXT,
        "metric": _TEXT,
        "loss": _TEXT,
        "n": _WHOLE,
        "risk": _REAL,
        "layers": _REAL,
        "flops_appendix_b": _REAL,
        "flops_calm_table": _REAL,
        "bleu": _REAL,
        "cut": _WHOLE,
        "examples": _WHOLE,
        "repeated": _WHOLE,
        "failed": _WHOLE,
    }
)


_OF_SPEC = ("consistency", "metric", "loss", "delta", "epsilon", "p_value", "procedure")


def write_trials(path: str, outcomes: Sequence[TrialOutcome]) -> None:
    """Writes every trial as one row, atomically."""
    _write(path, [trial_row(outcome) for outcome in outcomes], schema=_TRIALS)


def read_trials(path: str) -> list[TrialOutcome]:
    """Returns the trials that `write_trials` wrote."""
    outcomes = []
    for row in _read(path):
        spec = PlannedTest(**{name: row.pop(name) for name in _OF_SPEC})
        outcomes.append(TrialOutcome(spec=spec, **row))
    return outcomes


def trial_row(outcome: TrialOutcome) -> dict[str, Any]:
    """Returns the columns of a trial with their values."""
    row = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome) if field.name != "spec"}
    return {**row, **spec_columns(outcome.spec)}


def spec_columns(spec: PlannedTest) -> dict[str, Any]:
    """Returns the columns of a spec with their values."""
    return {name: getattr(spec, name) for name in _OF_SPEC}


def summary_row(summary: Summary, results: SplitResults) -> dict[str, Any]:
    """Returns the columns of a summary with their values; its speedup is taken from the results."""
    low, high = binomial_interval(summary.exceeding, summary.trials)
    speedup = results.speedup(summary)
    return {
        "measure": summary.measure,
        **spec_columns(summary.spec),
        "trials": summary.trials,
        "threshold": summary.threshold,
        "never": summary.never,
        **_spread_columns("test_risk", summary.test_risk),
        "exceeding": summary.exceeding,
        "exceeding_share": summary.exceeding / summary.trials,
        "exceeding_low": low,
        "exceeding_high": high,
        "proved_broken": summary.proved_broken,
        **_spread_columns("layers", summary.layers),
        **_spread_columns("flops_appendix_b", summary.flops_appendix_b),
        **_spread_columns("flops_calm_table", summary.flops_calm_table),
        "speedup": speedup and speedup.factor.mean,
        "speedup_standard_error": speedup and speedup.factor.standard_error,
        **_spread_columns("bleu", summary.bleu),
        **_spread_columns("full_bleu", summary.full_bleu),
    }


def write_grid(path: str, rows: Sequence[GridRow]) -> None:
    """Writes the whole set's numbers, atomically."""
    _write(path, [dataclasses.asdict(row) for row in rows], schema=_GRID)


def read_grid(path: str) -> list[GridRow]:
    """Returns the rows that `write_grid` wrote."""
    return [GridRow(**row) for row in _read(path)]


def _spread_columns(name: str, spread: Spread | None) -> dict[str, Any]:
    mean, std = (None, None) if spread is None else (spread.mean, spread.std)
    return {name: mean, f"{name}_std": std}


def _write(path: str, rows: list[dict[str, Any]], *, schema: pyarrow.Schema) -> None:
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), temporary, compression="zstd")


def _read(path: str) -> list[dict[str, Any]]:
    with open_input(path) as raw, pyarrow.parquet.ParquetFile(raw, pre_buffer=False) as file:
        # An Arrow thread that releases Python memory during interpreter shutdown aborts the process.
        rows: list[dict[str, Any]] = file.read(use_threads=False).to_pylist()
    return rows
