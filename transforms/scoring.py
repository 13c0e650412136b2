"""Reading stored shards, with the losses of every example, and adding up what merges.

Totals of examples, losses of clusters and sums of losses of any origin are added; they define the arithmetic.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics

from calm_beam.calibration.plan import group_of, layout_of
from calm_beam.manifest import COUNT_NEAR_TIES, Plan
from calm_beam.metrics.registry import take_clipped
from calm_beam.outputs import Generation, OutputsError, StoredGenerations, StoredShard, read_generations, stored_shard
from calm_beam.outputs.metric_checks import Contrast
from calm_beam.outputs.scoring import USUAL_SCORING, ScoredGeneration, Scoring, score_by_policy
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.risk.evidence import RiskTotals
from calm_beam.text import counted

from .metrics import CLIPPED_SCORES, NAMESPACE

# Examples whose totals are made at once: arrays long enough to be fast, short enough to stay in the cache.
_BATCH = 64


class ShardScorer:
    """Reads a stored shard in batches, with the losses of every example."""

    def __init__(
        self,
        plan: Plan,
        stored: StoredGenerations,
        *,
        scoring: Scoring = USUAL_SCORING,
    ) -> None:
        self.plan = plan
        self._scoring = scoring
        self._clipped = Metrics.counter(NAMESPACE, CLIPPED_SCORES)
        self._stored = stored
        # The full model's output stands before those of the thresholds.
        self._lanes = (0, *(1 + stored.thresholds.index(threshold) for threshold in plan.thresholds))

    def setup(self) -> None:
        """Looks up metrics, which may not travel between processes."""
        self._layout = layout_of(self.plan)
        self._metrics = {
            objective.metric: self._scoring.metric(objective.metric) for objective in self._layout.objectives
        }

    def batches(
        self, element: tuple[int, Iterable[StoredShard]], *, examples: int
    ) -> Iterator[tuple[CalibrationTotals, list[Generation], np.ndarray]]:
        """Yields batches of a shard: totals without losses, the generations, and their losses.

        Losses have shape (examples, objectives, thresholds), int64.

        Args:
          element: Number of the shard, and what is known of it.
          examples: Size of the data set, which says how many may fail.

        Raises:
          OutputsError: If the file is not the one that was marked as complete.
          DataError: If more examples fail than may.
        """
        number, copies = element
        (shard,) = set(copies)
        path = self._stored.shard_path(number)
        if stored_shard(path) != shard:
            raise OutputsError(f"{path}: was replaced after decoding was complete. Decode again, with --overwrite.")
        generations = read_generations(path)
        failures: list[tuple[str, str]] = []
        while batch := list(itertools.islice(generations, _BATCH)):
            scored = [self._score(self._at_lanes(generation, path)) for generation in batch]
            self._clipped.inc(sum(map(take_clipped, self._metrics.values())))
            kept = [each.generation for each in scored]
            failures.extend((each.example.id, each.failure) for each in kept if each.failure is not None)
            # Before they are more than a worker can hold.
            self._scoring.check_failures(failures, failed=len(failures), examples=examples)
            totals = CalibrationTotals.of_examples(
                kept,
                self._layout,
                shard=number,
                contrast=Contrast.merged(each.contrast for each in scored),
                groups=self._groups(kept),
            )
            yield totals, kept, np.stack([each.losses for each in scored])

    def totals(
        self, element: tuple[int, Iterable[StoredShard]], *, examples: int
    ) -> tuple[CalibrationTotals, dict[str, RiskTotals]]:
        """Returns the totals of a shard, and by cluster the losses of its examples.

        Where examples are the units, their losses are in the totals, and there are no clusters. Arguments and errors
        are those of `batches`.
        """
        whole = CalibrationTotals.zero(self._layout)
        clusters: dict[str, RiskTotals] = {}
        for of_examples, generations, losses in self.batches(element, examples=examples):
            whole = whole.merge(of_examples)
            if self.plan.cluster_key is None:
                whole = whole.merge(self._totals_of_losses(generations, losses))
                continue
            for generation, of_example in zip(generations, losses, strict=True):
                cluster, member = generation.example.cluster, RiskTotals(n=1, sums=of_example)
                assert cluster is not None
                clusters[cluster] = clusters[cluster].merge(member) if cluster in clusters else member
        return whole, clusters

    def _totals_of_losses(self, generations: Sequence[Generation], losses: np.ndarray) -> CalibrationTotals:
        """Returns the totals of the losses of a batch, each example of which is a unit by itself."""
        return CalibrationTotals.of_losses(
            [generation.example.id for generation in generations],
            losses,
            layout=self._layout,
            salt=self.plan.salt,
            groups=self._groups(generations),
        )

    def _groups(self, generations: Sequence[Generation]) -> list[str | None]:
        return [group_of(self.plan, generation.example) for generation in generations]

    def _at_lanes(self, generation: Generation, path: str) -> Generation:
        """Returns the generation with the outputs of the plan's thresholds alone."""
        if generation.failure is not None:
            return generation
        if len(generation.outputs) != 1 + len(self._stored.thresholds):
            raise OutputsError(
                f"{path}: example {generation.example.id} has {counted(len(generation.outputs), 'output')}, not one "
                "for the full "
                f"model and each of {len(self._stored.thresholds)} thresholds."
            )
        return dataclasses.replace(generation, outputs=tuple(generation.outputs[lane] for lane in self._lanes))

    def _score(self, generation: Generation) -> ScoredGeneration:
        layout = self._layout
        return score_by_policy(
            generation,
            layout.objectives,
            metrics=self._metrics,
            num_thresholds=layout.thresholds,
            on_error=self.plan.on_error,
            near_ties=self.plan.near_ties or COUNT_NEAR_TIES,
        )


class SumMerged(beam.CombineFn):
    """Adds up sums, each over some elements, by their `merge`, which is associative and commutative."""

    def __init__(self, zero: Callable[[], Any] | None = None) -> None:
        """Keeps what there is where nothing is to be added up.

        Args:
          zero: Makes the sums over no elements; None where there are always some, as there are for every key.
        """
        super().__init__()
        self._zero = zero

    def create_accumulator(self) -> Any:
        """Returns the sums over no elements; None where nobody says what they are."""
        return None if self._zero is None else self._zero()

    def add_input(self, accumulator: Any, element: Any) -> Any:
        """Adds the sums over more elements."""
        return element if accumulator is None else accumulator.merge(element)

    def merge_accumulators(self, accumulators: Iterable[Any]) -> Any:
        """Adds all sums."""
        merged = self.create_accumulator()
        for accumulator in accumulators:
            if accumulator is not None:
                merged = accumulator if merged is None else merged.merge(accumulator)
        return merged

    def extract_output(self, accumulator: Any) -> Any:
        """Returns the sums."""
        return accumulator
