"""Decoding and scoring a calibration set round by round, so that a calibration can stop when enough is proved."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import apache_beam as beam

from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.rounds import Round, division_digest, rounds_of
from calm_beam.inputs.examples import Example
from calm_beam.manifest import Plan
from calm_beam.outputs import FinishedSweep, OutputsError, StoredShard
from calm_beam.outputs.request import SweepAssignment
from calm_beam.outputs.scoring import USUAL_SCORING, Scoring
from calm_beam.outputs.totals import CalibrationTotals

from .calibrate import totals_of_cluster
from .decode import ANY_DEVICES, CheckFolders, Devices, decoding
from .examples import ExamplesRead
from .metrics import ProgressLog
from .scoring import ShardScorer, SumMerged


@dataclasses.dataclass
class CountRounds(beam.PTransform):
    """Decodes some rounds of the examples, scores them, and writes down what was counted in each.

    A round is made of whole shards, in the order of their numbers: which shards end first has no part in it. Shards
    that the folder of generations holds already are taken over, as in `DecodeExamples`. Examples are divided into
    shards by `ReadExamples(order=...)`.

    Attributes:
      assignment: What to decode, and how.
      plan: What is counted; of its grid, as much as is decoded.
      scored_by: What scores, to be written down with each round.
      division: How the data were divided when earlier rounds were counted; None for a first round.
      first: Number of the first round, from 1.
      last: Number of the last.
      progress: Where to report.
      scoring: How losses are made.
      devices: What workers decode on.
    """

    assignment: SweepAssignment
    plan: Plan
    _: dataclasses.KW_ONLY
    scored_by: Mapping[str, str]
    division: str | None
    first: int
    last: int
    progress: ProgressLog
    scoring: Scoring = USUAL_SCORING
    devices: Devices = ANY_DEVICES

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, examples: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of the numbers of the rounds that were counted, given `ExamplesRead`."""
        assert self.plan.sequential is not None
        read = ExamplesRead(*examples)
        count = beam.pvalue.AsSingleton(read.count)
        places = beam.pvalue.AsSingleton(
            read.shards
            | "SizeShards" >> beam.Map(_size)
            | "ListSizes" >> beam.combiners.ToDict()
            | "DivideRounds"
            >> beam.Map(_places, round_examples=self.plan.sequential.round_examples, division=self.division)
        )
        # Of earlier rounds too: their examples must be as they were. Their shards are not read again in each round.
        until = read.shards | "TakeUpToLast" >> beam.Filter(_is_within, places, first=1, last=self.last)
        is_checked = until | "CheckFolders" >> CheckFolders([self.assignment], kept=places, reads_all=False)
        taken = until | "TakeRounds" >> beam.Filter(_is_within, places, first=self.first, last=self.last)
        decode = decoding(
            [self.assignment],
            self.progress,
            is_checked=is_checked,
            count=count,
            devices=self.devices,
        )
        decoded = taken | "DecodeShards" >> decode
        scorer = ShardScorer(
            self.plan,
            self.assignment.stored,
            scoring=self.scoring,
        )
        return (
            decoded
            | "KeyByShard" >> beam.Map(_numbered)
            # Also spreads them over workers, and lets no retry of scoring decode anything again.
            | "CountShardsOnce" >> beam.GroupByKey()
            | "ScoreShards" >> beam.ParDo(_ScoreWhole(scorer), count)
            | "KeyByRound" >> beam.Map(_by_round, places)
            | "SumRounds" >> beam.CombinePerKey(SumMerged())
            | "WriteRounds"
            >> beam.Map(
                _write_round,
                places,
                count,
                beam.pvalue.AsIter(decoded),
                plan=self.plan,
                scored_by=self.scored_by,
                folder=self.assignment.stored.directory,
            )
        )


def _size(element: tuple[int, Iterable[Example]]) -> tuple[int, int]:
    shard, examples = element
    return shard, sum(1 for _ in examples)


@dataclasses.dataclass(frozen=True)
class _Place:
    """The round that a shard is in, and how many examples were read for it."""

    round: int
    examples: int


def _places(sizes: Mapping[int, int], *, round_examples: int, division: str | None) -> dict[int, _Place]:
    if division not in (None, division_digest(sizes, round_examples=round_examples)):
        raise OutputsError(
            "the data have changed since the first rounds were counted: they would be divided into other rounds, and "
            "an example could be left out or count twice. Restore them, or begin again with --overwrite."
        )
    rounds = rounds_of(sizes, round_examples=round_examples)
    return {shard: _Place(number, sizes[shard]) for number, shards in enumerate(rounds, start=1) for shard in shards}


def _is_within(element: tuple[int, Iterable[Example]], places: Mapping[int, _Place], *, first: int, last: int) -> bool:
    return first <= places[element[0]].round <= last


def _numbered(element: tuple[int, StoredShard]) -> tuple[int, StoredShard]:
    _, shard = element
    return shard.shard, shard


class _ScoreWhole(beam.DoFn):
    """Yields the totals of a stored shard, which holds all examples of its clusters if there are some."""

    def __init__(self, scorer: ShardScorer) -> None:
        self._scorer = scorer

    def setup(self) -> None:
        self._scorer.setup()

    def process(self, element: tuple[int, Iterable[StoredShard]], count: int) -> Iterator[CalibrationTotals]:
        plan = self._scorer.plan
        layout = layout_of(plan)
        totals, clusters = self._scorer.totals(element, examples=count)
        for of_cluster in clusters.items():
            totals = totals.merge(totals_of_cluster(of_cluster, layout=layout, plan=plan))
        yield totals


def _by_round(totals: CalibrationTotals, places: Mapping[int, _Place]) -> tuple[int, CalibrationTotals]:
    ((shard, _),) = totals.by_shard
    return places[shard].round, totals


def _write_round(
    element: tuple[int, CalibrationTotals],
    places: Mapping[int, _Place],
    count: int,
    decoded: Iterable[tuple[int, StoredShard]],
    *,
    plan: Plan,
    scored_by: Mapping[str, str],
    folder: str,
) -> int:
    assert plan.sequential is not None
    number, totals = element
    finished = FinishedSweep.of(
        [shard for _, shard in decoded if places[shard.shard].round == number],
        job="",
        examples=sum(place.examples for place in places.values() if place.round == number),
    )
    sizes = {shard: place.examples for shard, place in places.items()}
    Round(
        number=number,
        division=division_digest(sizes, round_examples=plan.sequential.round_examples),
        scored_by=scored_by,
        rounds=max(place.round for place in places.values()),
        examples=count,
        shards=finished.shards,
        totals=totals,
    ).write(folder, plan)
    return number
