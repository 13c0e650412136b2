"""Sweeping every prompt of a calibration set under every setting, into a folder of outputs.

`Sweep` decodes at every threshold, and a later run can resume it. `SweepWith` runs a decoder that is not ours, under
each of its settings.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import apache_beam as beam
from apache_beam.utils.shared import Shared

from calm_beam import __version__
from calm_beam.calibration.asked_data import AskedData, DecodedExamples, FilesToDecode
from calm_beam.calibration.publish import EarlierResult, withdraw
from calm_beam.decoding.engine import Work
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import descending_grid, uniform_grid
from calm_beam.inputs.examples import Example
from calm_beam.inputs.losses.tables import name_of
from calm_beam.inputs.set_parts import Split
from calm_beam.manifest.plan_list import PlanList, home_of
from calm_beam.options import again, listed, option, switch
from calm_beam.options.groups import (
    GRID_STEP,
    Chat,
    Copies,
    Decoding,
    ExitGrid,
    FactsOfAny,
    Failures,
    ModelSource,
    OutputSettings,
    Replacing,
)
from calm_beam.options.option import documented, naming_arguments
from calm_beam.outputs import DecodeJob, FinishedSweep, SettingJob, StoredGenerations, StoredShard
from calm_beam.outputs.finished import check_failures, failure_limit
from calm_beam.outputs.folder import SettingHome, SweepHome, check_may_choose
from calm_beam.outputs.hosted_decoder import HostedDecoder, Setting, SettingDecoder
from calm_beam.outputs.job import SettingAssignment
from calm_beam.outputs.request import SweepRequest
from calm_beam.outputs.sharding import with_unique_ids
from calm_beam.outputs.stored_shards import publish_shard, store_shard, taken_over
from calm_beam.storage import absolute, make_folder

from .decode import CheckFolders, DecodeExamples, finished, maker_of
from .examples import ExamplesRead, ReadExamples
from .metrics import NOWHERE, DecodeMetrics, ProgressLog


class Swept(Protocol):
    """A transform that yields one `FinishedSweep`, and knows of what.

    Attributes:
      job: What the generations are.
      folder: Where they are.
      on_error: The policy for prompts that cannot be decoded.
      plans: Those that were asked of the outputs before.
      data: What plans are asked of.
      command: What asks.
    """

    job: DecodeJob
    folder: str
    on_error: str
    plans: PlanList
    data: AskedData
    command: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepOptions(FactsOfAny, Chat, OutputSettings, Decoding, Failures, Copies, Replacing):
    """The request of a sweep of `ReadExamples`."""

    model: str | os.PathLike[str] = option(dataclasses.MISSING, "folder of the model")
    output: str | os.PathLike[str] = option(dataclasses.MISSING, "output directory, in which generations/ is made")
    vocabulary: str | None = again(ModelSource, "vocabulary", belongs_to=())
    extra_ids: int | None = again(ModelSource, "extra_ids", belongs_to=())
    chat_template: str | None = again(Chat, "chat_template", belongs_to=())
    thresholds: float | Sequence[float] = again(
        ExitGrid, "thresholds", default=uniform_grid(GRID_STEP), sentence="the grid, tested from the top"
    )
    resume: bool = switch("go on with what an unfinished run has left there")
    exits: ExitRule = dataclasses.field(default_factory=ExitRule)
    runs_here: bool = True
    progress: ProgressLog = NOWHERE


@documented
class Sweep(SweepOptions, beam.PTransform):
    """Decodes the examples of `ReadExamples` at every threshold and by the full model, and stores all outputs.

        pipeline | ReadExamples("data/*.jsonl.gz") | Sweep(model="model", thresholds=grid(0.05), output="calibration")

    Model, vocabulary and the first examples are checked, and the folder is made, when the pipeline is put together.

    Attributes:
      exits: How tokens exit.
      runs_here: Whether this machine decodes, so that its memory has to do.
      progress: Where to report.
    """

    command = "Calibrate"

    def __post_init__(self) -> None:
        with naming_arguments(SweepOptions):
            super().__post_init__()

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, examples: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of one `FinishedSweep`, given `ExamplesRead`."""
        # Here, since it needs JAX, which calibrating stored generations does not.
        from calm_beam.outputs.prepared import prepare_sweep

        source = maker_of(ExamplesRead(*examples).shards, ReadExamples)
        if source is None:
            raise UsageError("Sweep takes what ReadExamples gives.")
        with naming_arguments(SweepOptions):
            prepared = prepare_sweep(
                self._request(source.shard_count(), source.part), source.files(), runs_here=self.runs_here
            ).without_weights()
            output = absolute(os.fspath(self.output))
            earlier = EarlierResult.found_in(output)
            earlier.check_may_go(output, overwrite=self.overwrite)
        self.prepared = prepared
        self.job: DecodeJob = prepared.job()
        self.data: AskedData = FilesToDecode(prepared.data)
        make_folder(output)
        # Before an earlier result is taken away, which shows what was asked for it.
        self.plans = PlanList(output)
        self.folder: str = SweepHome(output).begin(
            [self.job],
            resume=self.resume,
            overwrite=self.overwrite,
            tell=lambda _: None,
            withdraw=functools.partial(withdraw, output, earlier),
        )
        return examples | DecodeExamples([prepared.assignment(self.folder)], self.progress)

    def _request(self, num_shards: int, part: Split | None) -> SweepRequest:
        thresholds = descending_grid(listed(self.thresholds))
        settings = DecodeSettings.of(self, self.exits.with_source(), thresholds=thresholds)
        return SweepRequest.asked_by(self, settings, model=self.model, num_shards=num_shards, part=part)


@dataclasses.dataclass
class ReadGenerations(beam.PTransform):
    """Takes what an earlier `Sweep` has stored.

        pipeline | ReadGenerations("sweep") | Calibrate([Guarantee("textual", "token_f1", delta=0.05)])

    Every plan that `Calibrate` asks of it is listed next to it. Only the first is sure to have been settled before its
    losses were seen.

    Attributes:
      directory: Its output directory, or a folder below `generations/` in it.
      on_error: `worst_case` if prompts that could not be decoded are to count with loss 1.
    """

    directory: str
    _: dataclasses.KW_ONLY
    on_error: str = "fail"

    command = "Calibrate of ReadGenerations"

    def __post_init__(self) -> None:
        self.folder = SweepHome(absolute(self.directory)).only_folder()
        self.job = DecodeJob.read(self.folder)
        check_may_choose(self.folder, self.job)
        self.plans = PlanList(home_of(self.folder))

    @property
    def data(self) -> DecodedExamples:
        """The data that plans are about."""
        stored = StoredGenerations(directory=self.folder, job=self.job)
        return DecodedExamples(stored, FinishedSweep.read(self.folder, self.job))

    def expand(self, pipeline: beam.Pipeline) -> beam.PCollection:
        """Returns a PCollection of one `FinishedSweep`."""
        examples = self.data
        with naming_arguments(Failures):
            examples.check_failed(self.on_error)
        return pipeline | "TakeGenerations" >> beam.Create([examples.finished])


_ON_ERROR = ("fail", "worst_case")


@dataclasses.dataclass
class SweepWith(beam.PTransform):
    """Decodes the examples of `ReadExamples` by a decoder of yours, under every setting, and stores all outputs.

        def answer(prompts, settings):
            return {budget: [client.ask(prompt, thinking=budget) for prompt in prompts] for budget in settings}

        pipeline | ReadExamples("questions.jsonl") | SweepWith(answer, settings=(4096, 1024, 256), output="swept")

    `calm_beam.certify(outputs="swept", ...)` then proves which settings lose at most delta against the first. A decoder
    gets all settings in one call, with a batch of prompts, so that it can share work between them, and returns answers
    by setting. An answer is a text, a sequence of token ids, or a `SettingOutput`, which may have cost and exit layers.

    A function is called as it is. A class is made an instance of, once in every process, without arguments; an object
    with a method `setup` has it called once in every process, before anything else. There, load what is large. Calls
    come from one thread, one after the other. The decoder has to travel to workers, as every DoFn does.

    What is returned is checked: an answer to every prompt under every setting, texts or ids, no cost that is NaN. A
    prompt at which the decoder raises is isolated from its batch by bisection. Finished shards are stored however a run
    ends, and `resume=True` continues from them.

    >>> import tempfile, apache_beam as beam
    >>> from calm_beam.transforms import ReadExamples, SweepWith
    >>> def shout(prompts, settings):
    ...     return {most: [prompt.upper()[:most] for prompt in prompts] for most in settings}
    >>> folder = tempfile.mkdtemp()
    >>> with open(f"{folder}/data.jsonl", "w") as file:
    ...     _ = file.write('{"id": "a", "input": "hello"}')
    >>> with beam.Pipeline() as pipeline:
    ...     swept = pipeline | ReadExamples(f"{folder}/data.jsonl") | SweepWith(
    ...         shout, settings=(9, 3), output=f"{folder}/swept", decoder_name="shout 1"
    ...     )
    ...     _ = swept | beam.Map(lambda done: print(f"{done.examples} example, {done.failed} failed"))
    1 example, 0 failed

    Attributes:
      decoder: A function of prompts and settings, a class or an object that is called so (`SettingDecoder`).
      settings: Texts or numbers, the safest first: what the others are compared with. The rest is the order of tests.
      output: Output directory, in which `generations/` is made.
      decoder_name: Name and version of the decoder, such as `SmolLM2-135M Q4_1, llama.cpp b4000`: it is in the
        manifest, and outputs under two names are never mixed. Change it whenever answers may change, since nothing else
        tells. None for the name of the function or class.
      batch_size: Most prompts of a call; None for all of a shard.
      decode_timeout: Seconds that a call may take before the run ends; None for any number.
      on_error: `fail`, or `worst_case`, which counts prompts that get no answer with loss 1.
      max_failures: Most examples that may fail; None for few.
      resource_hints: Of the step that decodes, and of no other, such as `{"min_ram": "16GB"}`.
      resume: Whether to go on with what an unfinished run has left there.
      overwrite: Whether to take away what is there.
      progress: Where to report.
    """

    decoder: SettingDecoder | Callable[[], SettingDecoder]
    _: dataclasses.KW_ONLY
    settings: Sequence[Setting]
    output: str
    decoder_name: str | None = None
    batch_size: int | None = None
    decode_timeout: float | None = None
    on_error: str = "fail"
    max_failures: int | None = None
    resource_hints: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    resume: bool = False
    overwrite: bool = False
    progress: ProgressLog = NOWHERE

    def __post_init__(self) -> None:
        self.decoder_name = _name(self.decoder) if self.decoder_name is None else self.decoder_name
        if not self.decoder_name:
            raise UsageError("decoder_name is missing: what decodes has no name of its own. Say what it is.")
        if self.on_error not in _ON_ERROR:
            raise UsageError(f"on_error must be one of {', '.join(_ON_ERROR)}, got {self.on_error!r}.")
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, got {self.batch_size}.")
        if self.decode_timeout is not None and not self.decode_timeout > 0:
            raise UsageError(f"decode_timeout must be a number of seconds above 0, got {self.decode_timeout}.")
        names = self._setting_names()
        if len(names) < 2 or len(set(names)) != len(names):
            raise UsageError(
                "settings must be two or more, each once, the safest first: outputs under the first are what the "
                f"others are compared with. Got {', '.join(names) or 'none'}."
            )

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, examples: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of one `FinishedSettings`, given `ExamplesRead`."""
        read = ExamplesRead(*examples)
        source = maker_of(read.shards, ReadExamples)
        if source is None or source.part is not None:
            raise UsageError("SweepWith takes what ReadExamples gives of a whole data set.")
        output = absolute(self.output)
        earlier = EarlierResult.found_in(output)
        if earlier.manifest and not self.overwrite:
            raise UsageError(f"output {output}: holds a manifest already. Choose another, or pass overwrite=True.")
        make_folder(output)
        job = self._job(source)
        with naming_arguments(SweepOptions):
            self.folder = SettingHome(output).begin(
                [job],
                resume=self.resume,
                overwrite=self.overwrite,
                tell=lambda _: None,
                withdraw=functools.partial(withdraw, output, earlier),
            )
        assignment = SettingAssignment(
            directory=self.folder,
            job=job,
            on_error=self.on_error,
            max_failures=self.max_failures,
            batch_size=self.batch_size,
        )
        count = beam.pvalue.AsSingleton(read.count)
        is_checked = beam.pvalue.AsSingleton(read.shards | "CheckFolder" >> CheckFolders([assignment]))
        decode = beam.ParDo(_DecodeShard(self, assignment), is_checked, count)
        return (
            read.shards
            | "DecodeShards" >> (decode.with_resource_hints(**self.resource_hints) if self.resource_hints else decode)
            | "ListDecoded" >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "MarkComplete" >> beam.FlatMap(finished, count, assignments=[assignment])
        )

    def _job(self, source: ReadExamples) -> SettingJob:
        data = source.files()
        assert self.decoder_name is not None, "it was settled when this was made"
        return SettingJob(
            decoder=self.decoder_name,
            settings=self._setting_names(),
            patterns=data.patterns,
            files=data.files,
            num_shards=source.shard_count(),
            software={"calm-beam": __version__},
            reading=data.reading.choices(),
            group_key=data.reading.group_key,
            cluster_key=data.reading.cluster_key,
        )

    def _setting_names(self) -> tuple[str, ...]:
        return tuple(name_of(setting, "name", where=f"setting {setting!r:.60}") for setting in self.settings)


class _DecodeShard(beam.DoFn):
    """Decodes one shard; threads of a process share its decoder."""

    def __init__(self, sweep: SweepWith, assignment: SettingAssignment) -> None:
        self._assignment = assignment
        self._progress = sweep.progress
        self._host_decoder = functools.partial(
            HostedDecoder,
            sweep.decoder,
            name=assignment.job.decoder,
            settings=tuple(sweep.settings),
            timeout=sweep.decode_timeout,
        )
        self._shared = Shared()
        self._metrics = DecodeMetrics()
        self._host: HostedDecoder | None = None

    def teardown(self) -> None:
        """Lets go of the decoder."""
        self._host = None

    def process(
        self, element: tuple[int, Iterable[Example]], is_checked: bool, count: int
    ) -> Iterator[tuple[int, StoredShard]]:
        """Yields what is stored of a shard, given its examples, that the folder was checked, and the set's size."""
        shard, unordered = element
        examples = with_unique_ids(unordered)
        stored = taken_over(self._assignment, shard, examples=examples)
        if stored is not None:
            self._metrics.count_taken_over(len(examples))
            self._progress.report("stored", len(examples))
        else:
            outcomes = list(self._outcomes(examples, count=count))
            stored = store_shard(
                self._assignment,
                shard,
                examples=examples,
                outcomes=sorted(outcomes, key=lambda generation: generation.example.id),
            )
        publish_shard(self._assignment, shard)
        yield 0, stored

    def _outcomes(self, examples: list[Example], *, count: int) -> Iterator[Any]:
        """Yields the result of every example, as long as few fail."""
        assignment = self._assignment
        limit = failure_limit(assignment.max_failures, examples=count)
        failures: list[tuple[str, str]] = []
        host, start = self._loaded(), time.perf_counter()
        for generation in host.outcomes(examples, batch_size=assignment.batch_size, on_error=assignment.on_error):
            self._progress.report("decoded", 1)
            if generation.failure is not None:
                failures.append((generation.example.id, generation.failure))
                # Now, and not after hours with a decoder that is broken.
                check_failures(failures, failed=len(failures), limit=limit)
            yield generation
        self._metrics.count_call(Work(prompts=len(examples)), seconds=time.perf_counter() - start)
        self._metrics.count_failures(len(failures))

    def _loaded(self) -> HostedDecoder:
        if self._host is None:
            self._progress.report("loading", 1)
            start = time.perf_counter()
            # Unreferenced entries are freed.
            self._host = self._shared.acquire(self._host_decoder, tag=repr(self._assignment))
            self._metrics.count_loads([round(1000 * (time.perf_counter() - start))])
        return self._host


def _name(decoder: object) -> str:
    """Returns what a function or a class is called; of an object, its class."""
    named = decoder if hasattr(decoder, "__qualname__") else type(decoder)
    return f"{named.__module__}.{named.__qualname__}"
