"""Scoring generations, summing exactly, testing, and writing the results."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import apache_beam as beam

from calm_beam.calibration import Layout, Plan, RunRecord, Tally, calibrate, has_ended, risk_rows
from calm_beam.calibration.publish import EarlierResult, publish
from calm_beam.calibration.totals import CalibrationTotals
from calm_beam.examples import DataError
from calm_beam.failures import check_failures, failure_limit
from calm_beam.generations import StoredShard
from calm_beam.generations.folder import Completion, StoredGenerations
from calm_beam.metrics.registry import get_metric
from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings
from calm_beam.risk.clusters import ClusterLosses

from .scoring import ShardScorer


@dataclasses.dataclass
class CalibrateGenerations(beam.PTransform):
    """Turns complete generations into a risk table and a manifest in the output directory.

    Every shard counts once, however often runner or reader bring it: shards are told apart by their number, and at the
    end what was counted is compared with what is stored.

    Attributes:
      plan: The guarantees asked for, and their tests.
      plan_digest: Digest of the plan when it was settled.
      record: What else the manifest says.
      stored: The generations.
      tested: How many of the plan's thresholds are tested, from the top. If the tests of some guarantee would go on
        below, nothing is written.
      output: Output directory, which exists.
      earlier: The result there that may be replaced.
      max_failures: Most examples that may fail, in decoding and scoring together; None as in `failure_limit`.
      metric_settings: What metrics need.
    """

    plan: Plan
    plan_digest: str
    record: RunRecord
    stored: StoredGenerations
    tested: int
    output: str
    earlier: EarlierResult
    max_failures: int | None = None
    metric_settings: MetricSettings = NO_SETTINGS

    def expand(self, completions: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of str with the manifest's path if it was written, given one of a `Completion`."""
        tested = self.plan.upper_part(self.tested)
        completion = beam.pvalue.AsSingleton(completions)
        shards = (
            completions
            | "ListShards" >> beam.FlatMap(_numbered_shards)
            # Also spreads them over workers: the list is one element.
            | "CountShardsOnce" >> beam.GroupByKey()
        )
        scorer = ShardScorer(tested, self.stored, self.max_failures, self.metric_settings)
        if self.plan.cluster_key is None:
            tallies = shards | "ScoreExamples" >> beam.ParDo(_ScoreShard(scorer), completion)
        else:
            tallies = (shards, completions) | "ScoreClusters" >> _ScoreClusters(scorer)
        return (
            tallies
            | "SumLosses" >> beam.CombineGlobally(_SumTallies(tested.layout()))
            | "WriteResults"
            >> beam.FlatMap(
                _write_results,
                completion,
                plan=self.plan,
                tested=tested,
                digest=self.plan_digest,
                record=self.record,
                output=self.output,
                earlier=self.earlier,
                max_failures=self.max_failures,
                metric_settings=self.metric_settings,
            )
        )


def _numbered_shards(completion: Completion) -> Iterator[tuple[int, StoredShard]]:
    return ((shard.shard, shard) for shard in completion.shards)


class _ScoreShard(beam.DoFn):
    """Yields the tally of a stored shard, each example of which is a unit by itself."""

    def __init__(self, scorer: ShardScorer) -> None:
        self._scorer = scorer

    def setup(self) -> None:
        self._scorer.setup()

    def process(self, element: tuple[int, Iterable[StoredShard]], completion: Completion) -> Iterator[Tally]:
        plan = self._scorer.plan
        layout = plan.layout()
        whole = Tally.zero(layout)
        for tally, generations, losses in self._scorer.batches(element, completion):
            ids = [generation.example.id for generation in generations]
            of_losses = CalibrationTotals.of_losses(ids, losses, layout, salt=plan.salt)
            whole = whole.merge(tally).merge(Tally(totals=of_losses, scored=len(ids)))
        yield whole


@dataclasses.dataclass
class _ScoreClusters(beam.PTransform):
    """Turns stored shards into tallies whose units are clusters, wherever their examples are stored."""

    scorer: ShardScorer

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, inputs: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        shards, completions = inputs
        plan = self.scorer.plan
        scored = shards | "ScoreMembers" >> beam.ParDo(
            _ScoreMembers(self.scorer), beam.pvalue.AsSingleton(completions)
        ).with_outputs("losses", main="examples")
        units = (
            scored.losses
            | "GroupByCluster" >> beam.CombinePerKey(_merged_clusters)
            | "AverageClusters" >> beam.Map(_tally_of_cluster, layout=plan.layout(), salt=plan.salt)
        )
        return (scored.examples, units) | "JoinTotals" >> beam.Flatten()


class _ScoreMembers(beam.DoFn):
    """Yields tallies of a shard without its losses, and those by cluster under the tag `losses`."""

    def __init__(self, scorer: ShardScorer) -> None:
        self._scorer = scorer

    def setup(self) -> None:
        self._scorer.setup()

    def process(
        self, element: tuple[int, Iterable[StoredShard]], completion: Completion
    ) -> Iterator[Tally | beam.pvalue.TaggedOutput]:
        whole = Tally.zero(self._scorer.plan.layout())
        for tally, generations, losses in self._scorer.batches(element, completion):
            whole = whole.merge(tally)
            for generation, of_example in zip(generations, losses, strict=True):
                cluster = generation.example.cluster
                assert cluster is not None
                yield beam.pvalue.TaggedOutput("losses", (cluster, ClusterLosses(size=1, sums=of_example)))
        yield whole


def _merged_clusters(parts: Iterable[ClusterLosses]) -> ClusterLosses:
    first, *others = parts
    for part in others:
        first = first.merge(part)
    return first


def _tally_of_cluster(element: tuple[str, ClusterLosses], *, layout: Layout, salt: str) -> Tally:
    cluster, losses = element
    totals = CalibrationTotals.of_losses([cluster], losses.mean()[None], layout, salt=salt)
    return Tally(totals=totals, scored=losses.size)


class _SumTallies(beam.CombineFn):
    """Merges `Tally`; the arithmetic is theirs."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def create_accumulator(self) -> Tally:
        return Tally.zero(self._layout)

    def add_input(self, accumulator: Tally, element: Tally) -> Tally:
        return accumulator.merge(element)

    def merge_accumulators(self, accumulators: Iterable[Tally]) -> Tally:
        merged = self.create_accumulator()
        for accumulator in accumulators:
            merged = merged.merge(accumulator)
        return merged

    def extract_output(self, accumulator: Tally) -> Tally:
        return accumulator


def _write_results(
    tally: Tally,
    completion: Completion,
    *,
    plan: Plan,
    tested: Plan,
    digest: str,
    record: RunRecord,
    output: str,
    earlier: EarlierResult,
    max_failures: int | None,
    metric_settings: MetricSettings,
) -> Iterator[str]:
    """Checks what was counted, then writes failures, risk table and manifest, and yields the manifest's path.

    Writes and yields nothing if tests would go on below the thresholds that were tested.
    """
    if not completion.examples:
        raise DataError(f"the calibration set is empty: no examples in {', '.join(record.patterns)}.")
    tally.check(completion)
    tally.contrast.check(tested.layout().objectives, functools.partial(get_metric, settings=metric_settings))
    limit = failure_limit(max_failures, examples=completion.examples)
    check_failures(tally.failures, failed=len(tally.failures), limit=limit)
    num_layers = record.model.layers
    rows = risk_rows(tally.totals, tested, num_layers=num_layers)
    calibrations = calibrate(rows, tested, num_layers=num_layers)
    if tested != plan and not has_ended(calibrations):
        return
    manifest = record.manifest(
        tally.totals, calibrations, plan, digest=digest, failed_ids=tuple(name for name, _ in tally.failures)
    )
    yield publish(output, manifest, rows, tally.failures, earlier=earlier)
