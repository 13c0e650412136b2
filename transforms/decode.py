"""Decoding shards of examples into one Parquet file a shard, for a sweep or for one entry of a manifest.

Prompts are answered under a manifest in the same way: one file of answers a shard.

A worker decodes on its devices. One process keeps some copies of a model, and lends each to one thread at a time.
A transform finds out what an earlier one of its pipeline was told, so that users say it once.
"""

import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import apache_beam as beam
from apache_beam.utils.shared import Shared

from calm_beam.errors import UsageError
from calm_beam.inputs.examples import Example
from calm_beam.manifest import MANIFEST, EntryChoice, Manifest, read_manifest
from calm_beam.metrics import NO_SETTINGS, MetricSettings
from calm_beam.options import again, option, switch
from calm_beam.options.groups import (
    Answers,
    Copies,
    Decoding,
    Entry,
    ExactEngine,
    FactsOfAny,
    ModelSource,
    Replacing,
    Trusted,
)
from calm_beam.options.option import documented, naming_arguments, shared
from calm_beam.outputs import StoredShard
from calm_beam.outputs.finished import check_failures, failure_limit
from calm_beam.outputs.folder import AnswerHome
from calm_beam.outputs.request import AnswerRequest, Assignment, SweepAssignment
from calm_beam.outputs.sharding import with_unique_ids
from calm_beam.outputs.stored_shards import (
    AnyAssignment,
    check_above,
    check_folder,
    finish,
    generations_above,
    publish_shard,
    store_shard,
    taken_over,
)
from calm_beam.storage import absolute, is_folder, joined

from .examples import ExamplesRead, ReadExamples, ReadPrompts, ShardPrompts
from .metrics import NOWHERE, DecodeMetrics, ProgressLog

if TYPE_CHECKING:
    from calm_beam.outputs import Generation
    from calm_beam.outputs.worker import Loaded, ShardStopwatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of the workers that decode.

    Attributes:
      hint: Resource hint of the step that decodes, and of no other; None for none.
      are_accelerators: Whether a worker on which JAX finds only a CPU refuses to decode.
    """

    hint: str | None = None
    are_accelerators: bool = False


ANY_DEVICES = Devices()
"""The devices that JAX finds."""


def require_accelerator() -> None:
    """Raises `RuntimeError` if JAX would compute on the CPU, which it does silently if it finds no driver."""
    import jax

    if jax.default_backend() == "cpu":
        raise RuntimeError(
            "this worker was started with an accelerator, but JAX finds only its CPU. Use an image that has JAX for "
            "that accelerator (launch/Dockerfile), and let Dataflow install the driver of a GPU "
            "(install-nvidia-driver)."
        )


T = TypeVar("T")


class ModelCopies(Generic[T]):
    """At most so many copies of a model, the first loaded at once, the others when more threads want one.

    A thread that finds all copies lent out waits: two threads that decode with one copy would need the memory of two.
    """

    def __init__(self, load: Callable[[], T], *, most: int) -> None:
        """Loads the first copy.

        Args:
          load: Loads one.
          most: How many there may be, at least 1.
        """
        self._load = load
        self._most = most
        self._loaded = 1
        self._lock = threading.Lock()
        # The last one given back is lent first, so that others stay unused if they are not needed.
        self._idle: queue.LifoQueue[T] = queue.LifoQueue()
        self._load_msecs: list[int] = []
        self._idle.put(self._timed_load())

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[T]:
        """Lends a copy for the block."""
        copy = self._take()
        try:
            yield copy
        finally:
            self._idle.put(copy)

    def take_load_msecs(self) -> list[int]:
        """Returns how long each load took that has not been returned before."""
        with self._lock:
            taken, self._load_msecs = self._load_msecs, []
        return taken

    def _take(self) -> T:
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        with self._lock:
            may_load = self._loaded < self._most
            self._loaded += may_load
        if not may_load:
            return self._idle.get()
        try:
            return self._timed_load()
        except BaseException:
            with self._lock:
                self._loaded -= 1
            raise

    def _timed_load(self) -> T:
        start = time.perf_counter()
        copy = self._load()
        with self._lock:
            self._load_msecs.append(round(1000 * (time.perf_counter() - start)))
        return copy


@dataclasses.dataclass
class DecodeExamples(beam.PTransform):
    """Decodes shards of examples into a folder, and marks it as complete at the end.

    A shard that the folder holds already is taken over if it is of the same job and the same examples; if it is not,
    the run fails before anything is decoded. So a retried bundle, or a later run, finds what an earlier one has done.

    A sweep may have several exit rules, each with a folder of its own. Computation that the rules share is done once,
    and each folder holds the same files as decoding by its rule alone.

    Attributes:
      assignments: What to decode, and how; several differ in exit rules and folders alone.
      progress: Where to report.
      devices: What workers decode on.
    """

    assignments: Sequence[Assignment]
    progress: ProgressLog
    _: dataclasses.KW_ONLY
    devices: Devices = ANY_DEVICES

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, examples: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of a `Finished` for each assignment, given `ExamplesRead`."""
        read = ExamplesRead(*examples)
        count = beam.pvalue.AsSingleton(read.count)
        return (
            read.shards
            | "DecodeShards"
            >> decoding(
                self.assignments,
                self.progress,
                is_checked=read.shards | "CheckFolders" >> CheckFolders(self.assignments),
                count=count,
                devices=self.devices,
            )
            | "ListDecoded" >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "MarkComplete" >> beam.FlatMap(finished, count, assignments=self.assignments)
        )


def decoding(
    assignments: Sequence[Assignment],
    progress: ProgressLog,
    *,
    is_checked: beam.PCollection,
    count: beam.pvalue.AsSingleton,
    devices: Devices,
) -> beam.ParDo:
    """Returns the step that decodes shards, once folders were checked; it alone has the hint.

    It takes pairs of int and Iterable[Example], and yields pairs of an assignment's place and what is then stored.
    """
    decode = _DecodeShard(assignments, progress, needs_accelerator=devices.are_accelerators)
    step = beam.ParDo(decode, beam.pvalue.AsSingleton(is_checked), count)
    return step if devices.hint is None else step.with_resource_hints(accelerator=devices.hint)


@dataclasses.dataclass
class CheckFolders(beam.PTransform):
    """Refuses folders in which shards, of the grid or of its upper part, are of other examples than are read now.

    Attributes:
      assignments: What is to be decoded.
      kept: Shards that the folders may hold, as keys of a side input; None for those that are checked.
      reads_all: Whether stored shards are read whole to look for damage. The step that decodes does so too, but only
        after others were decoded.
    """

    assignments: Sequence[AnyAssignment]
    kept: beam.pvalue.AsSingleton | None = None
    reads_all: bool = True

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of one True, given pairs of int and Iterable[Example]."""
        return (
            shards
            | "CheckStored" >> beam.ParDo(_CheckStored(self.assignments, reads_all=self.reads_all))
            | "ListShards" >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "CheckFolder" >> beam.Map(_check_folders, self.kept, assignments=self.assignments)
        )


class _CheckStored(beam.DoFn):
    """Yields the numbers of shards, and fails for one that is stored, or was above, of other examples than now."""

    def __init__(self, assignments: Sequence[AnyAssignment], *, reads_all: bool) -> None:
        self._assignments = tuple(assignments)
        self._reads_all = reads_all

    def process(self, element: tuple[int, Iterable[Example]]) -> Iterator[int]:
        shard, unordered = element
        examples = with_unique_ids(unordered)
        for assignment in self._assignments:
            taken_over(assignment, shard, examples=examples, reads_all=self._reads_all)
            check_above(assignment, shard, examples=examples)
        yield shard


def _check_folders(shards: list[int], kept: Collection[int] | None, *, assignments: Sequence[AnyAssignment]) -> bool:
    for assignment in assignments:
        check_folder(assignment, list(shards if kept is None else kept))
    return True


# Of any kind of `Finished`: Beam compares what it is with what the next step takes.
def finished(
    decoded: list[tuple[int, StoredShard]], count: int, *, assignments: Sequence[AnyAssignment]
) -> Iterator[Any]:
    """Yields the mark of every assignment once it is written, given pairs of its place and a stored shard."""
    for place, assignment in enumerate(assignments):
        yield finish(assignment, [shard for at, shard in decoded if at == place], examples=count)


class _DecodeShard(beam.DoFn):
    """Decodes one shard for each assignment; threads of a process share its copies of the model."""

    def __init__(self, assignments: Sequence[Assignment], progress: ProgressLog, *, needs_accelerator: bool) -> None:
        self._assignments = tuple(assignments)
        self._progress = progress
        self._needs_accelerator = needs_accelerator
        self._shared = Shared()
        self._metrics = DecodeMetrics()
        self._models: ModelCopies[Loaded] | None = None

    def teardown(self) -> None:
        """Lets go of the model."""
        self._models = None

    def process(
        self, element: tuple[int, Iterable[Example]], is_checked: bool, count: int
    ) -> Iterator[tuple[int, StoredShard]]:
        """Yields what is stored of a shard, given its examples, that folders were checked, and the data set's size."""
        shard, unordered = element
        examples = with_unique_ids(unordered)
        found = [taken_over(assignment, shard, examples=examples) for assignment in self._assignments]
        if all(found):
            self._metrics.count_taken_over(len(examples))
            self._progress.report("stored", len(examples))
        else:
            found = self._decoded(shard, examples, found=found, count=count)
        for place, (assignment, stored) in enumerate(zip(self._assignments, found, strict=True)):
            assert stored is not None
            publish_shard(assignment, shard)
            yield place, stored

    def _decoded(
        self, shard: int, examples: list[Example], *, found: Sequence[StoredShard | None], count: int
    ) -> list[StoredShard | None]:
        """Decodes a shard, stores it where it was not found, and returns what is stored for each assignment."""
        from calm_beam.outputs.worker import ShardStopwatch

        first = self._assignments[0]
        # For all of a shard, before what follows sees any of it: that must not keep others waiting for the model.
        above = generations_above(first, shard, examples=examples)
        self._progress.report("loading", 1)
        # Not before there is something to decode: a run that only finds what is stored loads no model.
        models = self._loaded_models()
        num_branches = sum(assignment.num_branches for assignment in self._assignments)
        with models.borrowed() as loaded, ShardStopwatch(loaded.decoder, num_branches=num_branches) as watch:
            # Beam counts nothing before the end, and until the first prompt is decoded, XLA compiles.
            self._progress.report("compiling", 1)
            limit = failure_limit(first.max_failures, examples=count)
            outcomes = self._outcomes(loaded, examples, above=above, limit=limit, watch=watch)
            losses = loaded.losses(outcomes)
            engine = loaded.decoder.engine
        loads = models.take_load_msecs()
        made: list[StoredShard | None] = []
        for assignment, of_rule, earlier in zip(self._assignments, zip(*outcomes, strict=True), found, strict=True):
            if earlier is not None:
                made.append(earlier)
                continue
            assigned = assignment.job.decoded_by
            # Where the run does not know it of its workers.
            said = None if assigned is None or assigned.instructions is not None else engine.in_words()
            stored = store_shard(assignment, shard, examples=examples, outcomes=of_rule, losses=losses, engine=said)
            made.append(stored)
            if isinstance(assignment, SweepAssignment):
                watch.write_timing(assignment.stored, stored, load_seconds=sum(loads) / 1000)
        # Here, since Beam has nowhere to count in `setup`.
        self._metrics.count_loads(loads)
        return made

    def _outcomes(
        self,
        loaded: "Loaded",
        examples: list[Example],
        *,
        above: "Mapping[str, Generation] | None",
        limit: int,
        watch: "ShardStopwatch",
    ) -> list[tuple[Any, ...]]:
        """Returns the result of every example for each assignment, by id."""
        outcomes: list[tuple[Any, ...]] = []
        failures: list[tuple[str, str]] = []
        start, before = time.perf_counter(), loaded.decoder.work
        for of_example in loaded.outcomes(examples, above=above):
            outcomes.append(of_example)
            self._progress.report("decoded", 1)
            watch.lap()
            if of_example[0].failure is not None:
                failures.append((of_example[0].example.id, of_example[0].failure))
                # Now, and not after hours on a device that is broken.
                check_failures(failures, failed=len(failures), limit=limit)
        self._metrics.count_call(loaded.decoder.work - before, seconds=time.perf_counter() - start)
        self._metrics.count_failures(len(failures))
        return sorted(outcomes, key=lambda of_example: of_example[0].example.id)

    def _loaded_models(self) -> "ModelCopies[Loaded]":
        if self._models is None:
            # Imported by the worker: JAX must not be initialised in the process that forks or pickles.
            from calm_beam.outputs import worker

            if self._needs_accelerator:
                require_accelerator()
            # Unreferenced entries are freed.
            self._models = self._shared.acquire(
                lambda: ModelCopies(
                    lambda: worker.load_model(*self._assignments), most=self._assignments[0].model_copies
                ),
                tag=repr(self._assignments),
            )
        return self._models


_T = TypeVar("_T", bound=beam.PTransform)


def maker_of(collection: beam.PCollection, kind: type[_T]) -> _T | None:
    """Returns the transform of a kind that made a collection, whatever it consists of; None if another one did."""
    applied = collection.producer
    while applied is not None:
        if isinstance(applied.transform, kind):
            return applied.transform
        applied = applied.parent
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(FactsOfAny, Entry, Trusted, ExactEngine, Answers, Decoding, Copies, Replacing):
    """The request for answers to `ReadPrompts` or `ShardPrompts`."""

    manifest: Manifest | str
    output: str | os.PathLike[str] = option(dataclasses.MISSING, "folder of the answers")
    model: str | os.PathLike[str] | None = option(
        None, "folder of the model that was calibrated; default: where the manifest says that it was"
    )
    vocabulary: str | None = again(ModelSource, "vocabulary", belongs_to=())
    resume: bool = switch("go on with what an unfinished run has left there")
    metric_settings: MetricSettings = NO_SETTINGS
    runs_here: bool = True
    progress: ProgressLog = NOWHERE


@documented
class Generate(GenerateOptions, beam.PTransform):
    """Answers the prompts of `ReadPrompts` or `ShardPrompts` under a manifest, and stores all answers.

        pipeline | ReadPrompts("prompts/*.jsonl.gz") | Generate(manifest="calibration", model="model", output="answers")

    Every prompt is answered once, or listed with its reason. Manifest, model and the first prompts are checked, and the
    folder is made, when the pipeline is put together.

    Attributes:
      manifest: The manifest, its file, or the calibration directory that holds it.
      metric_settings: What the metric of losses needs.
      runs_here: Whether this machine decodes, so that its memory has to do. Where others decode, `engine=auto` takes no
        native code unless that was calibrated.
      progress: Where to report.
    """

    def __post_init__(self) -> None:
        with naming_arguments(GenerateOptions):
            super().__post_init__()

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, prompts: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of one `FinishedAnswers`, given `ExamplesRead`."""
        # Here, since it needs JAX, which putting other pipelines together does not.
        from calm_beam.outputs.prepared import prepare_answers

        shards = ExamplesRead(*prompts).shards
        source = maker_of(shards, ReadPrompts) or maker_of(shards, ShardPrompts) or maker_of(shards, ReadExamples)
        if source is None:
            raise UsageError("Generate takes what ReadPrompts, ShardPrompts or ReadExamples gives.")
        output = absolute(os.fspath(self.output))
        with naming_arguments(GenerateOptions):
            prepared = prepare_answers(self._request(source.shard_count()), source.files(), runs_here=self.runs_here)
            AnswerHome(output).begin([prepared.job], resume=self.resume, overwrite=self.overwrite, tell=lambda _: None)
        return prompts | DecodeExamples([prepared.assignment(output)], self.progress)

    def _request(self, num_shards: int) -> AnswerRequest:
        manifest = self.manifest
        if not isinstance(manifest, Manifest):
            manifest = read_manifest(joined(manifest, MANIFEST) if is_folder(manifest) else manifest)
        own = {"manifest": manifest, "choice": EntryChoice.named_by(self), "num_shards": num_shards}
        return AnswerRequest(**{**shared(self, AnswerRequest), **own})
