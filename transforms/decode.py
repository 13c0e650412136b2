"""Decoding shards of examples at every threshold, into one Parquet file a shard."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import apache_beam as beam
from apache_beam.utils.shared import Shared

from calm_beam.examples import Example
from calm_beam.failures import check_failures, failure_limit
from calm_beam.generations import (
    FinishedSweep,
    Generation,
    StoredShard,
    check_one_engine,
    shard_digest,
    stored_shard,
    write_generations,
)
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
    """

    assignment: Assignment
    kept: beam.pvalue.AsSingleton | None = None

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of one True, given pairs of int and Iterable[Example]."""
        return (
            shards
            | "CheckStored" >> beam.ParDo(_CheckStored(self.assignment))
            | "ListShards" >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "CheckFolder" >> beam.Map(_check_folders, self.kept, assignment=self.assignment)
        )


class _CheckStored(beam.DoFn):
    """Yields the numbers of shards, and fails for one that is stored, or was above, of other examples than now."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment

    def process(self, element: tuple[int, Iterable[Example]]) -> Iterator[int]:
        shard, unordered = element
        examples = with_unique_ids(unordered)
        taken_over(self._assignment, shard, examples=examples)
        check_above(self._assignment, shard, examples=examples)
        yield shard


def _check_folders(shards: list[int], kept: Collection[int] | None, *, assignment: Assignment) -> bool:
    check_folders(assignment, list(shards if kept is None else kept))
    return True


def _mark_complete(shards: list[StoredShard], count: int, *, assignment: Assignment) -> FinishedSweep:
    return mark_complete(assignment, shards, examples=count)


class DecodeShard(beam.DoFn):
    """Decodes one shard; threads of a process share its copies of the model."""

    def __init__(self, assignment: Assignment, progress: ProgressLog, *, needs_accelerator: bool) -> None:
        """Keeps what to decode; arguments as in `DecodeExamples`."""
        self._assignment = assignment
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
            lambda: ModelCopies(lambda: worker.load_model(self._assignment), most=self._assignment.model_copies),
            tag=repr(self._assignment),
        )

    def teardown(self) -> None:
        """Lets go of the model."""
        self._models = None

    def process(self, element: tuple[int, Iterable[Example]], is_checked: bool, count: int) -> Iterator[StoredShard]:
        """Yields what is stored of a shard, given its examples, that folders were checked, and the data set's size."""
        from calm_beam.sweeps.stopwatch import ShardStopwatch

        assert self._models is not None
        shard, unordered = element
        examples = with_unique_ids(unordered)
        stored = taken_over(self._assignment, shard, examples=examples)
        if stored is not None:
            self._metrics.count_taken_over(stored.examples)
            self._progress.report("stored", stored.examples)
        else:
            # For all of a shard, before what follows sees any of it: that must not keep others waiting for the model.
            above = generations_above(self._assignment, shard, examples=examples)
            self._progress.report("loading", 1)
            with (
                self._models.borrowed() as loaded,
                ShardStopwatch(loaded.decoder, lanes=self._assignment.lanes) as watch,
            ):
                # Beam counts nothing before the end, and until the first prompt is decoded, XLA compiles.
                self._progress.report("compiling", 1)
                generations = self._decode(
                    loaded,
                    examples=examples,
                    above=above,
                    limit=failure_limit(self._assignment.max_failures, examples=count),
                    after_each=watch.lap,
                )
            path = self._assignment.stored.shard_path(shard)
            engine = self._engine_to_say(loaded)
            write_generations(
                path,
                sorted(generations, key=lambda generation: generation.example.id),
                shard=shard,
                digest=shard_digest(self._assignment.job.digest(), shard, examples=examples),
                engine=engine,
            )
            # As it was stored, not as it is remembered.
            stored = stored_shard(path)
            loads = self._models.take_load_msecs()
            watch.write_timing(self._assignment.stored, stored, load_seconds=sum(loads) / 1000)
            # Here, since Beam has nowhere to count in `setup`.
            self._metrics.count_loads(loads)
        yield stored

    def _engine_to_say(self, loaded: "LoadedModel") -> str | None:
        """Returns what has decoded, in words, where the run does not know it of its workers; no folder has two."""
        assigned = self._assignment.job.settings.engine
        if assigned is None or assigned.instructions is not None:
            return None
        engine = loaded.decoder.engine.in_words()
        check_one_engine(self._assignment.stored.directory, engine)
        return engine

    def _decode(
        self,
        loaded: "LoadedModel",
        *,
        examples: list[Example],
        above: Mapping[str, Generation] | None,
        limit: int,
        after_each: Callable[[], None],
    ) -> list[Generation]:
        from calm_beam.sweeps.worker import decode_shard

        generations: list[Generation] = []
        failures: list[tuple[str, str]] = []
        start, before = time.perf_counter(), loaded.decoder.work
        for generation in decode_shard(self._assignment, loaded, examples=examples, above=above):
            generations.append(generation)
            self._progress.report("decoded", 1)
            after_each()
            if generation.failure is not None:
                failures.append((generation.example.id, generation.failure))
                # Now, and not after hours on a device that is broken.
                check_failures(failures, failed=len(failures), limit=limit)
        self._metrics.count_call(loaded.decoder.work - before, seconds=time.perf_counter() - start)
        self._metrics.count_failures(len(failures))
        return generations
