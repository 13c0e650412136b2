"""Decoding shards of examples at every threshold, into one Parquet file a shard."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import apache_beam as beam
from apache_beam.utils.shared import Shared

from calm_beam.failures import check_failures, failure_limit
from calm_beam.generations import (
    FinishedSweep,
    Generation,
    StoredShard,
    check_one_engine,
    shard_digest,
    whole_shard,
    write_generations,
)
from calm_beam.inputs.examples import Example
from calm_beam.sweeps import Assignment
from calm_beam.sweeps.shard import with_unique_ids
from calm_beam.sweeps.stored_shards import check_above, check_folders, generations_above, mark_complete, taken_over

from .devices import require_accelerator
from .examples import ExamplesRead
from .metrics import DecodeMetrics
from .model_copies import ModelCopies
from .progress import ProgressLog

if TYPE_CHECKING:
    from calm_beam.sweeps.worker import LoadedModel


@dataclasses.dataclass
class DecodeExamples(beam.PTransform):
    """Decodes shards of examples into a folder of generations, and marks it as complete at the end.

    A shard that the folder holds already is taken over if it is of the same job and the same examples; if it is not,
    the run fails before anything is decoded. So a retried bundle, or a later run, finds what an earlier one has done.

    Attributes:
      assignment: What to decode, and how.
      progress: Where to report.
      accelerator_hint: Resource hint of the step that decodes, and of no other; None for none.
      needs_accelerator: Whether a worker on which JAX finds only a CPU refuses to decode.
    """

    assignment: Assignment
    progress: ProgressLog
    _: dataclasses.KW_ONLY
    accelerator_hint: str | None = None
    needs_accelerator: bool = False

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, examples: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of one `FinishedSweep`, given `ExamplesRead`."""
        read = ExamplesRead(*examples)
        count = beam.pvalue.AsSingleton(read.count)
        is_checked = read.shards | "CheckFolders" >> CheckFolders(self.assignment)
        decode = decoding(
            DecodeShard(self.assignment, self.progress, needs_accelerator=self.needs_accelerator),
            is_checked,
            count,
            accelerator_hint=self.accelerator_hint,
        )
        return (
            read.shards
            | "DecodeShards" >> decode
            | "ListDecoded" >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "MarkComplete" >> beam.Map(_mark_complete, count, assignment=self.assignment)
        )


def decoding(
    decode: beam.DoFn,
    is_checked: beam.PCollection,
    count: beam.pvalue.AsSingleton,
    *,
    accelerator_hint: str | None,
) -> beam.ParDo:
    """Returns the step that decodes or answers shards, once folders were checked; it alone has the hint."""
    step = beam.ParDo(decode, beam.pvalue.AsSingleton(is_checked), count)
    return step if accelerator_hint is None else step.with_resource_hints(accelerator=accelerator_hint)


@dataclasses.dataclass
class CheckFolders(beam.PTransform):
    """Refuses folders in which shards, of the grid or of its upper part, are of other examples than are read now.

    Attributes:
      assignment: What is to be decoded.
      kept: Shards that the folder may hold, as keys of a side input; None for those that are checked.
      reads_all: Whether stored shards are read whole to look for damage. `DecodeShard` does so too, but only after
        others were decoded.
    """

    assignment: Assignment
    kept: beam.pvalue.AsSingleton | None = None
    reads_all: bool = True

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of one True, given pairs of int and Iterable[Example]."""
        return (
            shards
            | "CheckStored" >> beam.ParDo(_CheckStored(self.assignment, reads_all=self.reads_all))
            | "ListShards" >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "CheckFolder" >> beam.Map(_check_folders, self.kept, assignment=self.assignment)
        )


class _CheckStored(beam.DoFn):
    """Yields the numbers of shards, and fails for one that is stored, or was above, of other examples than now."""

    def __init__(self, assignment: Assignment, *, reads_all: bool) -> None:
        self._assignment = assignment
        self._reads_all = reads_all

    def process(self, element: tuple[int, Iterable[Example]]) -> Iterator[int]:
        shard, unordered = element
        examples = with_unique_ids(unordered)
        taken_over(self._assignment, shard, examples=examples, reads_all=self._reads_all)
        check_above(self._assignment, shard, examples=examples)
        yield shard


def _check_folders(shards: list[int], kept: Collection[int] | None, *, assignment: Assignment) -> bool:
    check_folders(assignment, list(shards if kept is None else kept))
    return True


def _mark_complete(shards: list[StoredShard], count: int, *, assignment: Assignment) -> FinishedSweep:
    return mark_complete(assignment, shards, examples=count)


@dataclasses.dataclass
class DecodeVariants(beam.PTransform):
    """Decodes shards of examples by several exit rules at once, each into a folder of its own, as `DecodeExamples`.

    Whatever the rules have in common is computed once. Each folder holds what decoding by its rule alone would have
    left there.

    Attributes:
      assignments: One for each rule; they differ in that, and in their folders, alone.
      progress: Where to report.
      accelerator_hint: As in `DecodeExamples`.
      needs_accelerator: As in `DecodeExamples`.
    """

    assignments: Sequence[Assignment]
    progress: ProgressLog
    _: dataclasses.KW_ONLY
    accelerator_hint: str | None = None
    needs_accelerator: bool = False

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, examples: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of pairs of an assignment's place and its `FinishedSweep`, given `ExamplesRead`."""
        read = ExamplesRead(*examples)
        count = beam.pvalue.AsSingleton(read.count)
        checked = tuple(
            read.shards | f"CheckFolders{place}" >> CheckFolders(assignment)
            for place, assignment in enumerate(self.assignments)
        )
        are_checked = checked | "GatherChecks" >> beam.Flatten() | "CheckAll" >> beam.CombineGlobally(all)
        decode = decoding(
            _DecodeVariantsOfShard(self.assignments, self.progress, needs_accelerator=self.needs_accelerator),
            are_checked,
            count,
            accelerator_hint=self.accelerator_hint,
        )
        return (
            read.shards
            | "DecodeShards" >> decode
            | "GatherVariants" >> beam.GroupByKey()
            | "MarkComplete" >> beam.Map(_mark_variant_complete, count, assignments=self.assignments)
        )


def _mark_variant_complete(
    element: tuple[int, Iterable[StoredShard]], count: int, *, assignments: Sequence[Assignment]
) -> tuple[int, FinishedSweep]:
    place, shards = element
    return place, mark_complete(assignments[place], list(shards), examples=count)


class _ShardDecoder(beam.DoFn):
    """What decodes a shard by one rule or several; threads of a process share its copies of the model."""

    def __init__(self, assignments: Sequence[Assignment], progress: ProgressLog, *, needs_accelerator: bool) -> None:
        self._assignments = tuple(assignments)
        self._progress = progress
        self._needs_accelerator = needs_accelerator
        self._shared = Shared()
        self._metrics = DecodeMetrics()
        self._models: ModelCopies[LoadedModel] | None = None

    def setup(self) -> None:
        """Makes ready to load the model."""
        # Imported by the worker: JAX must not be initialised in the process that forks or pickles.
        from calm_beam.sweeps import worker

        if self._needs_accelerator:
            require_accelerator()
        self._models = self._shared.acquire(
            lambda: ModelCopies(lambda: worker.load_model(*self._assignments), most=self._assignments[0].model_copies),
            tag=repr(self._assignments),
        )

    def teardown(self) -> None:
        """Lets go of the model."""
        self._models = None

    def _stored(self, element: tuple[int, Iterable[Example]], count: int) -> list[StoredShard]:
        """Returns what is stored of a shard by each rule, given its examples and the data set's size."""
        shard, unordered = element
        examples = with_unique_ids(unordered)
        found = [taken_over(assignment, shard, examples=examples) for assignment in self._assignments]
        if all(found):
            self._metrics.count_taken_over(len(examples))
            self._progress.report("stored", len(examples))
            return [stored for stored in found if stored is not None]
        return self._decode_shard(shard, examples, found=found, count=count)

    def _decode_shard(
        self, shard: int, examples: list[Example], *, found: Sequence[StoredShard | None], count: int
    ) -> list[StoredShard]:
        """Decodes a shard by all rules, stores it where it was not found, and returns what is stored by each."""
        from calm_beam.sweeps.stopwatch import ShardStopwatch

        assert self._models is not None
        # For all of a shard, before what follows sees any of it: that must not keep others waiting for the model.
        above = generations_above(self._assignments[0], shard, examples=examples)
        self._progress.report("loading", 1)
        lanes = sum(assignment.lanes for assignment in self._assignments)
        with self._models.borrowed() as loaded, ShardStopwatch(loaded.decoder, lanes=lanes) as watch:
            # Beam counts nothing before the end, and until the first prompt is decoded, XLA compiles.
            self._progress.report("compiling", 1)
            generations = self._decode(
                loaded,
                examples=examples,
                above=above,
                limit=failure_limit(self._assignments[0].max_failures, examples=count),
                after_each=watch.lap,
            )
        generations.sort(key=lambda of_example: of_example[0].example.id)
        loads = self._models.take_load_msecs()
        made = []
        for assignment, of_rule, earlier in zip(self._assignments, zip(*generations, strict=True), found, strict=True):
            if earlier is not None:
                made.append(earlier)
                continue
            path = assignment.stored.shard_path(shard)
            digest = shard_digest(assignment.job.digest(), shard, examples=examples)
            engine = self._engine_to_say(assignment, loaded)
            write_generations(path, of_rule, shard=shard, digest=digest, engine=engine)
            # As it was stored, not as it is remembered.
            made.append(whole_shard(path))
            watch.write_timing(assignment.stored, made[-1], load_seconds=sum(loads) / 1000)
        # Here, since Beam has nowhere to count in `setup`.
        self._metrics.count_loads(loads)
        return made

    def _engine_to_say(self, assignment: Assignment, loaded: "LoadedModel") -> str | None:
        """Returns what has decoded, in words, where the run does not know it of its workers; no folder has two."""
        assigned = assignment.job.settings.engine
        if assigned is None or assigned.instructions is not None:
            return None
        engine = loaded.decoder.engine.in_words()
        check_one_engine(assignment.stored.directory, engine)
        return engine

    def _decode(
        self,
        loaded: "LoadedModel",
        *,
        examples: list[Example],
        above: Mapping[str, Generation] | None,
        limit: int,
        after_each: Callable[[], None],
    ) -> list[tuple[Generation, ...]]:
        from calm_beam.sweeps.worker import decode_shard

        generations: list[tuple[Generation, ...]] = []
        failures: list[tuple[str, str]] = []
        start, before = time.perf_counter(), loaded.decoder.work
        for of_example in decode_shard(self._assignments[0], loaded, examples=examples, above=above):
            generations.append(of_example)
            self._progress.report("decoded", 1)
            after_each()
            generation = of_example[0]
            if generation.failure is not None:
                failures.append((generation.example.id, generation.failure))
                # Now, and not after hours on a device that is broken.
                check_failures(failures, failed=len(failures), limit=limit)
        self._metrics.count_call(loaded.decoder.work - before, seconds=time.perf_counter() - start)
        self._metrics.count_failures(len(failures))
        return generations


class DecodeShard(_ShardDecoder):
    """Decodes one shard by one rule."""

    def __init__(self, assignment: Assignment, progress: ProgressLog, *, needs_accelerator: bool) -> None:
        """Keeps what to decode; arguments as in `DecodeExamples`."""
        super().__init__([assignment], progress, needs_accelerator=needs_accelerator)

    def process(self, element: tuple[int, Iterable[Example]], is_checked: bool, count: int) -> Iterator[StoredShard]:
        """Yields what is stored of a shard, given its examples, that folders were checked, and the data set's size."""
        yield from self._stored(element, count)


class _DecodeVariantsOfShard(_ShardDecoder):
    """Decodes one shard by several rules; yields what is stored by each, with the place of its assignment."""

    def process(
        self, element: tuple[int, Iterable[Example]], is_checked: bool, count: int
    ) -> Iterator[tuple[int, StoredShard]]:
        yield from enumerate(self._stored(element, count))
