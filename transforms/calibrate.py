"""Scoring generations, summing exactly, testing, and writing the results."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import apache_beam as beam

from calm_beam.calibration import CalibrationTotals, RunRecord, Spec, calibrate, risk_rows, score_generation
from calm_beam.calibration.risk_table import write_risk_table
from calm_beam.calibration.specs import objectives_of
from calm_beam.examples import DataError
from calm_beam.generations import read_generations
from calm_beam.manifest import write_manifest
from calm_beam.metrics.registry import get_metric

from .progress import ProgressLog


@dataclasses.dataclass
class CalibrateGenerations(beam.PTransform):
    """Turns paths of generations into a risk table and a manifest in the output directory.

    Attributes:
      specs: The guarantees asked for.
      p_value: Name of the p-value.
      record: What else the manifest says.
      output: Output directory, which exists.
      progress: Where to report.
    """

    specs: Sequence[Spec]
    p_value: str
    record: RunRecord
    output: str
    progress: ProgressLog

    def expand(self, paths: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of str with the manifest's path."""
        num_thresholds = len(self.record.settings.thresholds)
        shards = beam.pvalue.AsSingleton(paths | "ListShards" >> beam.combiners.ToList())
        return (
            paths
            | "ScoreExamples" >> beam.ParDo(_ScoreShard(self.specs, num_thresholds, self.progress))
            | "SumLosses" >> beam.CombineGlobally(_SumTotals(len(objectives_of(self.specs)), num_thresholds))
            | "WriteResults" >> beam.Map(_write_results, shards, self.specs, self.p_value, self.record, self.output)
        )


class _ScoreShard(beam.DoFn):
    """Yields the totals of every example of a stored shard."""

    def __init__(self, specs: Sequence[Spec], num_thresholds: int, progress: ProgressLog) -> None:
        self._objectives = objectives_of(specs)
        self._num_thresholds = num_thresholds
        self._progress = progress

    def setup(self) -> None:
        self._metrics = {objective.metric: get_metric(objective.metric) for objective in self._objectives}

    def process(self, path: str) -> Iterator[CalibrationTotals]:
        count = 0
        for generation in read_generations(path):
            losses = score_generation(generation, self._objectives, self._metrics, num_thresholds=self._num_thresholds)
            yield CalibrationTotals.of(generation, losses)
            count += 1
        self._progress.report("scored", count)


class _SumTotals(beam.CombineFn):
    """Merges `CalibrationTotals`; the arithmetic is theirs."""

    def __init__(self, num_objectives: int, num_thresholds: int) -> None:
        self._num_objectives = num_objectives
        self._num_thresholds = num_thresholds

    def create_accumulator(self) -> CalibrationTotals:
        return CalibrationTotals.zero(objectives=self._num_objectives, thresholds=self._num_thresholds)

    def add_input(self, accumulator: CalibrationTotals, element: CalibrationTotals) -> CalibrationTotals:
        return accumulator.merge(element)

    def merge_accumulators(self, accumulators: Iterable[CalibrationTotals]) -> CalibrationTotals:
        merged = self.create_accumulator()
        for accumulator in accumulators:
            merged = merged.merge(accumulator)
        return merged

    def extract_output(self, accumulator: CalibrationTotals) -> CalibrationTotals:
        return accumulator


def _write_results(
    totals: CalibrationTotals,
    shards: Sequence[str],
    specs: Sequence[Spec],
    p_value: str,
    record: RunRecord,
    output: str,
) -> str:
    """Writes the risk table, then the manifest, which thus never stands beside an older table."""
    if totals.risk.n == 0:
        raise DataError(f"the calibration set is empty: no examples in {', '.join(record.patterns)}.")
    rows = risk_rows(
        totals, specs, thresholds=record.settings.thresholds, p_value=p_value, num_layers=record.model.layers
    )
    manifest = record.manifest(totals, calibrate(rows, specs=specs, p_value=p_value, num_layers=record.model.layers))
    write_risk_table(pathlib.Path(output) / "risk_table.csv", rows)
    path = str(pathlib.Path(output) / "manifest.json")
    write_manifest(manifest, path)
    _remove_other_shards(shards)
    return path


def _remove_other_shards(shards: Sequence[str]) -> None:
    """Removes what an overwritten run left beside these: whoever reads the folder must find this run's outputs only."""
    for path in pathlib.Path(shards[0]).parent.glob("generations-*.parquet"):
        if str(path) not in shards:
            path.unlink(missing_ok=True)
