"""Scoring generations, summing exactly, testing, and writing the results."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import apache_beam as beam
import numpy as np

from calm_beam.calibration import CalibrationTotals, RunRecord, Spec, calibrate, risk_rows, score_generation
from calm_beam.calibration.risk_table import write_risk_table
from calm_beam.calibration.specs import objectives_of
from calm_beam.examples import DataError
from calm_beam.generations import Generation, read_generations
from calm_beam.manifest import write_manifest
from calm_beam.metrics.registry import MetricError, get_metric


@dataclasses.dataclass
class CalibrateGenerations(beam.PTransform):
    """Turns paths of generations into a risk table and a manifest in the output directory.

    Attributes:
      specs: The guarantees asked for.
      p_value: Name of the p-value.
      record: What else the manifest says.
      on_error: `fail` or `worst_case`, for examples on which a metric fails.
      output: Output directory.
    """

    specs: Sequence[Spec]
    p_value: str
    record: RunRecord
    on_error: str
    output: str

    def expand(self, paths: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of str with the manifest's path."""
        num_thresholds = len(self.record.settings.thresholds)
        return (
            paths
            | "ScoreExamples" >> beam.ParDo(_ScoreShard(self.specs, num_thresholds, self.on_error))
            | "SumLosses" >> beam.CombineGlobally(_SumTotals(len(objectives_of(self.specs)), num_thresholds))
            | "WriteResults" >> beam.Map(_write_results, self.specs, self.p_value, self.record, self.output)
        )


class _ScoreShard(beam.DoFn):
    """Yields the totals of every example of a stored shard."""

    def __init__(self, specs: Sequence[Spec], num_thresholds: int, on_error: str) -> None:
        self._objectives = objectives_of(specs)
        self._num_thresholds = num_thresholds
        self._on_error = on_error

    def setup(self) -> None:
        self._metrics = {objective.metric: get_metric(objective.metric) for objective in self._objectives}

    def process(self, path: str) -> Iterator[CalibrationTotals]:
        for generation in read_generations(path):
            try:
                losses = self._score(generation)
            except MetricError as error:
                if self._on_error == "fail":
                    raise
                generation = dataclasses.replace(generation, failure=str(error))
                losses = self._score(generation)
            yield CalibrationTotals.of(generation, losses)

    def _score(self, generation: Generation) -> np.ndarray:
        return score_generation(generation, self._objectives, self._metrics, num_thresholds=self._num_thresholds)


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
    specs: Sequence[Spec],
    p_value: str,
    record: RunRecord,
    output: str,
) -> str:
    """Writes the risk table, then the manifest; returns the manifest's path."""
    if totals.risk.n == 0:
        raise DataError(f"the calibration set is empty: no examples in {', '.join(record.patterns)}.")
    rows = risk_rows(
        totals, specs, thresholds=record.settings.thresholds, p_value=p_value, num_layers=record.model.layers
    )
    manifest = record.manifest(totals, calibrate(rows, specs=specs, p_value=p_value, num_layers=record.model.layers))
    directory = pathlib.Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    write_risk_table(directory / "risk_table.csv", rows)
    path = directory / "manifest.json"
    write_manifest(manifest, path)
    return str(path)
