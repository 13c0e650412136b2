"""Scoring generations, summing exactly, testing, and writing the results."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics

from calm_beam.calibration import Layout, Plan, RunRecord, Tally, calibrate, has_ended, risk_rows, score_by_policy
from calm_beam.calibration.publish import EarlierResult, publish
from calm_beam.calibration.totals import CalibrationTotals
from calm_beam.examples import DataError
from calm_beam.failures import check_failures, failure_limit
from calm_beam.generation_folder import Completion, StoredGenerations, shard_path
from calm_beam.generations import Generation, GenerationsError, StoredShard, read_generations, stored_shard
from calm_beam.metrics.registry import get_metric, take_clipped
from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings
from calm_beam.risk.clusters import ClusterLosses

from .metrics import CLIPPED_SCORES, NAMESPACE

# Examples whose totals are made at once: arrays long enough to be fast, short enough to stay in the cache.
_BATCH = 64


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
        scorer = _Scorer(tested, self.stored, self.max_failures, self.metric_settings)
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
            )
        )


def _numbered_shards(completion: Completion) -> Iterator[tuple[int, StoredShard]]:
    return ((shard.shard, shard) for shard in completion.shards)


class _Scorer:
    """Reads a stored shard in batches, with the losses of every example."""

    def __init__(
        self,
        plan: Plan,
        stored: StoredGenerations,
        max_failures: int | None,
        metric_settings: MetricSettings = NO_SETTINGS,
    ) -> None:
        self.plan = plan
        self._metric_settings = metric_settings
        self._clipped = Metrics.counter(NAMESPACE, CLIPPED_SCORES)
        self._stored = stored
        self._max_failures = max_failures
        # The full model's output stands before those of the thresholds.
        self._lanes = (0, *(1 + stored.thresholds.index(threshold) for threshold in plan.thresholds))

    def setup(self) -> None:
        """Looks up metrics, which may not travel between processes."""
        self._layout = self.plan.layout()
        self._metrics = {
            objective.metric: get_metric(objective.metric, self._metric_settings)
            for objective in self._layout.objectives
        }

    def batches(
        self, element: tuple[int, Iterable[StoredShard]], completion: Completion
    ) -> Iterator[tuple[Tally, list[Generation], np.ndarray]]:
        """Yields batches of a shard: a tally without losses, the generations, and their losses.

        Losses have shape (examples, objectives, thresholds), int64.

        Raises:
          GenerationsError: If the file is not the one that was marked as complete.
          DataError: If more examples fail than may.
        """
        number, copies = element
        (shard,) = set(copies)
        path = shard_path(self._stored.directory, number, num_shards=self._stored.num_shards)
        if stored_shard(path) != shard:
            raise GenerationsError(f"{path}: was replaced after decoding was complete. Decode anew, with --overwrite.")
        limit = failure_limit(self._max_failures, examples=completion.examples)
        generations = read_generations(path)
        failures: list[tuple[str, str]] = []
        while batch := list(itertools.islice(generations, _BATCH)):
            scored = [self._score(self._at_lanes(generation, path)) for generation in batch]
            self._clipped.inc(sum(map(take_clipped, self._metrics.values())))
            failed = [(each.example.id, each.failure) for each, _ in scored if each.failure is not None]
            failures.extend(failed)
            # Before they are more than a worker can hold.
            check_failures(failures, failed=len(failures), limit=limit)
            tally = Tally(
                totals=CalibrationTotals.of_examples([generation for generation, _ in scored], self._layout),
                by_shard=((number, len(scored)),),
                failures=tuple(sorted(failed)),
            )
            yield tally, [generation for generation, _ in scored], np.stack([losses for _, losses in scored])

    def _at_lanes(self, generation: Generation, path: str) -> Generation:
        """Returns the generation with the outputs of the plan's thresholds alone."""
        if generation.failure is not None:
            return generation
        if len(generation.outputs) != 1 + len(self._stored.thresholds):
            raise GenerationsError(
                f"{path}: example {generation.example.id} has {len(generation.outputs)} outputs, not one for the full "
                f"model and each of {len(self._stored.thresholds)} thresholds."
            )
        return dataclasses.replace(generation, outputs=tuple(generation.outputs[lane] for lane in self._lanes))

    def _score(self, generation: Generation) -> tuple[Generation, np.ndarray]:
        layout = self._layout
        return score_by_policy(
            generation,
            layout.objectives,
            self._metrics,
            num_thresholds=layout.thresholds,
            on_error=self.plan.on_error,
        )


class _ScoreShard(beam.DoFn):
    """Yields the tally of a stored shard, each example of which is a unit by itself."""

    def __init__(self, scorer: _Scorer) -> None:
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

    scorer: _Scorer

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

    def __init__(self, scorer: _Scorer) -> None:
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
) -> Iterator[str]:
    """Checks what was counted, then writes failures, risk table and manifest, and yields the manifest's path.

    Writes and yields nothing if tests would go on below the thresholds that were tested.
    """
    if not completion.examples:
        raise DataError(f"the calibration set is empty: no examples in {', '.join(record.patterns)}.")
    tally.check(completion)
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
