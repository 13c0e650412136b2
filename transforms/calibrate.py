"""Scoring generations, summing exactly, testing, and writing the results."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import apache_beam as beam
import numpy as np

from calm_beam.calibration import CalibrationTotals, Layout, Plan, RunRecord, calibrate, risk_rows, score_by_policy
from calm_beam.calibration.risk_table import write_risk_table
from calm_beam.examples import DataError
from calm_beam.generations import Generation, read_generations
from calm_beam.manifest import write_manifest
from calm_beam.metrics.registry import get_metric
from calm_beam.risk.clusters import ClusterLosses
from calm_beam.storage import joined, make_folder

# Examples whose totals are made at once: arrays long enough to be fast, short enough to stay in the cache.
_BATCH = 64


@dataclasses.dataclass
class CalibrateGenerations(beam.PTransform):
    """Turns paths of generations into a risk table and a manifest in the output directory.

    Attributes:
      plan: The guarantees asked for, and their tests.
      plan_digest: Digest of the plan when it was settled.
      record: What else the manifest says.
      output: Output directory.
      replaces: Version of the manifest there that is to be replaced, empty for none; another one is not.
    """

    plan: Plan
    plan_digest: str
    record: RunRecord
    output: str
    replaces: str = ""

    def expand(self, paths: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of str with the manifest's path."""
        if self.plan.cluster_key is None:
            totals = paths | "ScoreExamples" >> beam.ParDo(_ScoreShard(self.plan))
        else:
            totals = paths | "ScoreClusters" >> _ScoreClusters(self.plan)
        return (
            totals
            | "SumLosses" >> beam.CombineGlobally(_SumTotals(self.plan.layout()))
            | "WriteResults"
            >> beam.Map(
                _write_results,
                plan=self.plan,
                digest=self.plan_digest,
                record=self.record,
                output=self.output,
                replaces=self.replaces,
            )
        )


class _Scorer:
    """Reads a stored shard in batches, with the losses of every example."""

    def __init__(self, plan: Plan) -> None:
        self._layout = plan.layout()
        self._metrics = {objective.metric: get_metric(objective.metric) for objective in self._layout.objectives}
        self._on_error = plan.on_error

    def batches(self, path: str) -> Iterator[tuple[list[Generation], np.ndarray]]:
        """Yields generations, and their losses of shape (examples, objectives, thresholds), int64."""
        generations = read_generations(path)
        while batch := list(itertools.islice(generations, _BATCH)):
            scored = [self._score(generation) for generation in batch]
            yield [generation for generation, _ in scored], np.stack([losses for _, losses in scored])

    def _score(self, generation: Generation) -> tuple[Generation, np.ndarray]:
        layout = self._layout
        return score_by_policy(
            generation, layout.objectives, self._metrics, num_thresholds=layout.thresholds, on_error=self._on_error
        )


class _ScoreShard(beam.DoFn):
    """Yields totals over the examples of a stored shard, each of which is a unit by itself."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def setup(self) -> None:
        self._scorer = _Scorer(self._plan)

    def process(self, path: str) -> Iterator[CalibrationTotals]:
        layout = self._plan.layout()
        for generations, losses in self._scorer.batches(path):
            ids = [generation.example.id for generation in generations]
            of_losses = CalibrationTotals.of_losses(ids, losses, layout, salt=self._plan.salt)
            yield CalibrationTotals.of_examples(generations, layout).merge(of_losses)


@dataclasses.dataclass
class _ScoreClusters(beam.PTransform):
    """Turns paths of generations into totals whose units are clusters, wherever their examples are stored."""

    plan: Plan

    def expand(self, paths: beam.PCollection) -> beam.PCollection:
        layout = self.plan.layout()
        scored = paths | "ScoreMembers" >> beam.ParDo(_ScoreMembers(self.plan)).with_outputs("losses", main="examples")
        units = (
            scored.losses
            | "GroupByCluster" >> beam.CombinePerKey(_merged_clusters)
            | "AverageClusters" >> beam.Map(_totals_of_cluster, layout=layout, salt=self.plan.salt)
        )
        return (scored.examples, units) | "JoinTotals" >> beam.Flatten()


class _ScoreMembers(beam.DoFn):
    """Yields totals over the examples of a shard without their losses, and those by cluster under the tag `losses`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def setup(self) -> None:
        self._scorer = _Scorer(self._plan)

    def process(self, path: str) -> Iterator[CalibrationTotals | beam.pvalue.TaggedOutput]:
        layout = self._plan.layout()
        for generations, losses in self._scorer.batches(path):
            for generation, of_example in zip(generations, losses, strict=True):
                cluster = generation.example.cluster
                assert cluster is not None
                yield beam.pvalue.TaggedOutput("losses", (cluster, ClusterLosses(size=1, sums=of_example)))
            yield CalibrationTotals.of_examples(generations, layout)


def _merged_clusters(parts: Iterable[ClusterLosses]) -> ClusterLosses:
    first, *others = parts
    for part in others:
        first = first.merge(part)
    return first


def _totals_of_cluster(element: tuple[str, ClusterLosses], *, layout: Layout, salt: str) -> CalibrationTotals:
    cluster, losses = element
    return CalibrationTotals.of_losses([cluster], losses.mean()[None], layout, salt=salt)


class _SumTotals(beam.CombineFn):
    """Merges `CalibrationTotals`; the arithmetic is theirs."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def create_accumulator(self) -> CalibrationTotals:
        return CalibrationTotals.zero(self._layout)

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
    totals: CalibrationTotals, *, plan: Plan, digest: str, record: RunRecord, output: str, replaces: str
) -> str:
    """Writes the risk table, then the manifest; returns the manifest's path."""
    if totals.risk.n == 0:
        raise DataError(f"the calibration set is empty: no examples in {', '.join(record.patterns)}.")
    num_layers = record.model.layers
    rows = risk_rows(totals, plan, num_layers=num_layers)
    manifest = record.manifest(totals, calibrate(rows, plan, num_layers=num_layers), plan, digest=digest)
    make_folder(output)
    write_risk_table(joined(output, "risk_table.csv"), rows)
    path = joined(output, "manifest.json")
    write_manifest(manifest, path, overwrite=True, replaces=replaces)
    return path
