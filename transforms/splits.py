"""Repeated splits of stored generations into calibration and test parts: every trial of every measure in one pass."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Self

import apache_beam as beam
import numpy as np

from calm_beam.calibration.plan import layout_of
from calm_beam.evaluation.outcomes import GridRow, TrialOutcome, grid_rows, trial_outcomes, write_grid, write_trials
from calm_beam.evaluation.splits import OutputCounter, Splits, SplitTotals
from calm_beam.inputs.examples import DataError, Example
from calm_beam.inputs.prompts import encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, open_recorded
from calm_beam.manifest import Plan
from calm_beam.outputs import FinishedSweep, StoredGenerations, StoredShard
from calm_beam.outputs.scoring import USUAL_SCORING, Scoring
from calm_beam.risk.evidence import RiskTotals

from .scoring import ShardScorer, SumMerged


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitSource:
    """The generations of one measure.

    Attributes:
      measure: Name of the measure.
      plan: The guarantees asked for, and their tests.
      stored: The generations.
      finished: What they hold.
      counter: What is counted of outputs.
      vocabulary: Path of the vocabulary that prompts were encoded with; None if there was none, or nothing needs it.
      is_tested: Whether thresholds are chosen for it; if not, it is shown next to the others as a bound.
    """

    measure: str
    plan: Plan
    stored: StoredGenerations
    finished: FinishedSweep
    counter: OutputCounter
    vocabulary: str | None
    is_tested: bool

    @property
    def num_layers(self) -> int:
        """Decoder depth."""
        return self.stored.job.model.layers


@dataclasses.dataclass
class SplitGenerations(beam.PTransform):
    """Splits stored generations again and again, and writes what was found.

    Attributes:
      sources: The measures; all of the same examples, which is checked at the end.
      splits: How they are split.
      trials_path: Parquet file of every trial, to write.
      grid_path: Parquet file of the whole set at every threshold, to write.
      scoring: How losses are made; the limit of failures is one of each measure.
    """

    sources: tuple[SplitSource, ...]
    splits: Splits
    _: dataclasses.KW_ONLY
    trials_path: str
    grid_path: str
    scoring: Scoring = USUAL_SCORING

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """Returns a PCollection of str with the path of the trials, once everything is written."""
        shards = (
            begin
            | "ListShards"
            >> beam.Create(
                [
                    ((index, shard.shard), shard)
                    for index, source in enumerate(self.sources)
                    for shard in source.finished.shards
                ]
            )
            # Also spreads them over workers.
            | "CountShardsOnce" >> beam.GroupByKey()
        )
        score = _ScoreShard(self.sources, self.splits, scoring=self.scoring)
        if self.sources[0].plan.cluster_key is None:
            totals = shards | "ScoreExamples" >> beam.ParDo(score)
        else:
            scored = shards | "ScoreMembers" >> beam.ParDo(score).with_outputs("members", main="totals")
            clusters = (
                scored.members
                | "GroupByCluster" >> beam.CombinePerKey(SumMerged())
                | "SplitClusters" >> beam.Map(_totals_of_cluster, sources=self.sources, splits=self.splits)
            )
            totals = (scored.totals, clusters) | "JoinTotals" >> beam.Flatten()
        return (
            totals
            | "SumSplits" >> beam.CombinePerKey(SumMerged())
            | "GatherMeasures" >> beam.combiners.ToList()
            | "WriteResults"
            >> beam.Map(
                _write_results,
                sources=self.sources,
                trials_path=self.trials_path,
                grid_path=self.grid_path,
                scoring=self.scoring,
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Members:
    """Examples of one cluster: sums of their losses and counts."""

    losses: RiskTotals
    counts: np.ndarray

    def merge(self, other: Self) -> Self:
        """Returns the sums over both parts of the cluster."""
        return type(self)(losses=self.losses.merge(other.losses), counts=self.counts + other.counts)


class _ScoreShard(beam.DoFn):
    """Yields the totals of a stored shard, keyed by its measure's index.

    Where units are clusters, their members come under the tag `members`, keyed by index and cluster.
    """

    def __init__(
        self,
        sources: tuple[SplitSource, ...],
        splits: Splits,
        *,
        scoring: Scoring,
    ) -> None:
        self._sources = sources
        self._splits = splits
        self._scorers = [ShardScorer(source.plan, source.stored, scoring=scoring) for source in sources]

    def setup(self) -> None:
        for scorer in self._scorers:
            scorer.setup()
        self._vocabularies: dict[tuple[str | None, str | None], Vocabulary] = {
            (source.vocabulary, source.stored.job.vocabulary_identity()): open_recorded(
                source.vocabulary, source.stored.job.vocabulary
            )
            for source in self._sources
            if source.vocabulary
        }

    # Pairs, and tagged ones: Beam takes a union of both for what `CombinePerKey` gets.
    def process(self, element: tuple[tuple[int, int], Iterable[StoredShard]]) -> Iterator[Any]:
        (index, number), copies = element
        source = self._sources[index]
        layout = layout_of(source.plan)
        sums = SplitTotals.zero(layout, self._splits, count_rows=len(source.counter.rows))
        for of_examples, generations, losses in self._scorers[index].batches(
            (number, copies), examples=source.finished.examples
        ):
            counts = np.stack(
                [
                    source.counter.counts(
                        generation,
                        lanes=1 + layout.thresholds,
                        source_length=functools.partial(self._source_length, source, generation.example),
                    )
                    for generation in generations
                ]
            )
            sums = dataclasses.replace(sums, whole=sums.whole.merge(of_examples))
            if source.plan.cluster_key is None:
                ids = [generation.example.id for generation in generations]
                units = SplitTotals.of_units(ids, losses, counts=counts, layout=layout, splits=self._splits)
                sums = sums.merge(units)
                continue
            for generation, fixed_losses, counted in zip(generations, losses, counts, strict=True):
                cluster = generation.example.cluster
                assert cluster is not None
                members = _Members(losses=RiskTotals(n=1, sums=fixed_losses), counts=counted)
                yield beam.pvalue.TaggedOutput("members", ((index, cluster), members))
        yield index, sums

    def _source_length(self, source: SplitSource, example: Example) -> int:
        """Returns how many tokens of the prompt the encoder saw."""
        vocabulary = self._vocabularies.get((source.vocabulary, source.stored.job.vocabulary_identity()))
        assert source.counter.sizes is not None
        prompt = encode_prompt(
            example,
            vocabulary,
            settings=source.stored.job.settings,
            vocab_size=source.counter.sizes.vocab_size,
            on_long="truncate",
        )
        return len(prompt.ids)


def _totals_of_cluster(
    element: tuple[tuple[int, str], _Members], *, sources: tuple[SplitSource, ...], splits: Splits
) -> tuple[int, SplitTotals]:
    (index, cluster), members = element
    totals = SplitTotals.of_units(
        [cluster],
        members.losses.mean_up()[None],
        counts=members.counts[None],
        layout=layout_of(sources[index].plan),
        splits=splits,
        scored=members.losses.n,
    )
    return index, totals


def _write_results(
    found: list[tuple[int, SplitTotals]],
    *,
    sources: tuple[SplitSource, ...],
    trials_path: str,
    grid_path: str,
    scoring: Scoring,
) -> str:
    """Checks what was counted, then writes trials and grid, and returns the path of the trials."""
    by_index = dict(found)
    assert len(by_index) == len(found) == len(sources)
    outcomes: list[TrialOutcome] = []
    grid: list[GridRow] = []
    for index, source in enumerate(sources):
        totals = by_index[index]
        whole = totals.whole
        whole.check(source.finished)
        whole.contrast.check(layout_of(source.plan).objectives, scoring.metric)
        scoring.check_failures(whole.failures, failed=whole.failed, examples=source.finished.examples)
        if whole.content_sum != by_index[0].whole.content_sum:
            raise DataError(
                f"{source.stored.directory}: holds other examples than {sources[0].stored.directory}. Measures are "
                "compared on the same data: decode them from the same files."
            )
        grid.extend(
            grid_rows(
                source.measure,
                totals,
                thresholds=source.plan.thresholds,
                count_rows=source.counter.rows,
                num_layers=source.num_layers,
            )
        )
        if source.is_tested:
            outcomes.extend(
                trial_outcomes(
                    source.measure,
                    totals,
                    specs=source.plan.tests,
                    thresholds=source.plan.thresholds,
                    count_rows=source.counter.rows,
                    num_layers=source.num_layers,
                )
            )
    write_grid(grid_path, grid)
    write_trials(trials_path, outcomes)
    return trials_path
