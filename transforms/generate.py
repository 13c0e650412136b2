"""Answering shards of prompts under a manifest, into one file a shard."""

import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import apache_beam as beam
from apache_beam.utils.shared import Shared

from calm_beam.answers import AnswerAssignment, AnsweredShard, AnswerRequest, Failure, FinishedAnswers, Tally
from calm_beam.answers.finished import finish, publish_rows
from calm_beam.answers.folder import begin_answers, check_folder
from calm_beam.answers.shards import shard_digest, taken_over, whole_answers, write_answers
from calm_beam.errors import UsageError
from calm_beam.failures import check_failures, failure_limit
from calm_beam.inputs.examples import DataError, Example
from calm_beam.manifest import MANIFEST, Manifest, read_manifest
from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings
from calm_beam.storage import absolute, is_folder, joined
from calm_beam.sweeps.shard import with_unique_ids

from .decode import decoding
from .devices import require_accelerator
from .examples import ExamplesRead, ReadExamples
from .metrics import DecodeMetrics
from .model_copies import ModelCopies
from .progress import NOWHERE, ProgressLog
from .prompts import ReadPrompts, ShardPrompts
from .upstream import maker_of

if TYPE_CHECKING:
    from calm_beam.answers.worker import LoadedGenerator, NoAnswer
    from calm_beam.serving import Answer


@dataclasses.dataclass
class Generate(beam.PTransform):
    """Answers the prompts of `ReadPrompts` or `ShardPrompts` under a manifest, and stores all answers.

        pipeline | ReadPrompts("prompts/*.jsonl.gz") | Generate(manifest="calibration", model="model", output="answers")

    Every prompt is answered once, or listed with its reason. Manifest, model and the first prompts are checked, and the
    folder is made, when the pipeline is put together.

    Attributes:
      manifest: The manifest, its file, or the calibration directory that holds it.
      output: Folder of the answers.
      model: Folder of the model that was calibrated; None takes where the manifest says that it was.
      consistency: Of the manifest's entry. This and the next five are as in `Generator.from_manifest`.
      metric: Of the entry.
      loss: Of the entry.
      delta: Of the entry.
      epsilon: Of the entry.
      group: Of the entry: the group of prompts that name none.
      confidence: The confidence measure, if the manifest names code of the user's.
      vocabulary: Path of the SentencePiece model; None looks in and beside the model.
      output_format: `parquet`, or `jsonl` for JSON lines packed by gzip.
      on_error: `fail`, or `list` to list prompts that have no answer in `failures.jsonl`, and to answer the others.
      max_failures: Most prompts that may fail; None for few.
      probe_share: Share of the prompts that the full model answers as well, whose losses are written to
        `losses.jsonl`; None for none.
      probe_salt: Decides which these are; None takes the manifest's digest.
      metric_settings: What the metric of losses needs.
      batch_size: Most prompts decoded together; None goes by the memory that is free.
      token_budget: Most positions held at a time; None likewise.
      exit_head: One of `EXIT_HEADS`: the form of the output head that decides. It moves answers at near ties alone.
      engine: As in `Generator.from_manifest`; where other machines decode, `auto` takes no native code unless that was
        calibrated.
      exact_engine: As there.
      model_copies: Most copies of the model in one process.
      model_parallelism: Devices of a worker that share one model, each with a part of it; copies are on the others.
      resume: Whether to go on with what an unfinished run has left there.
      overwrite: Whether to take away what is there.
      runs_here: Whether this machine decodes, so that its memory has to do.
      progress: Where to report.
    """

    _: dataclasses.KW_ONLY
    manifest: Manifest | str
    output: str
    model: str | None = None
    consistency: str | None = None
    metric: str | None = None
    loss: str | None = None
    delta: float | None = None
    epsilon: float | None = None
    group: str | None = None
    confidence: str | None = None
    vocabulary: str | None = None
    output_format: str = "parquet"
    on_error: str = "fail"
    max_failures: int | None = None
    probe_share: float | None = None
    probe_salt: str | None = None
    metric_settings: MetricSettings = NO_SETTINGS
    batch_size: int | None = None
    token_budget: int | None = None
    exit_head: str = "auto"
    engine: str = "auto"
    exact_engine: bool = False
    model_copies: int = 1
    model_parallelism: int = 1
    resume: bool = False
    overwrite: bool = False
    runs_here: bool = True
    progress: ProgressLog = NOWHERE

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, prompts: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of one `FinishedAnswers`, given `ExamplesRead`."""
        # Here, since it needs JAX, which putting other pipelines together does not.
        from calm_beam.answers.prepared import prepare_answers

        shards = ExamplesRead(*prompts).shards
        source = maker_of(shards, ReadPrompts) or maker_of(shards, ShardPrompts) or maker_of(shards, ReadExamples)
        if source is None:
            raise UsageError("Generate takes what ReadPrompts, ShardPrompts or ReadExamples gives.")
        prepared = prepare_answers(self._request(source.shard_count()), source.files(), runs_here=self.runs_here)
        output = absolute(self.output)
        begin_answers(output, prepared.job, resume=self.resume, overwrite=self.overwrite, tell=lambda _: None)
        return prompts | AnswerPrompts(prepared.assignment(output), self.progress)

    def _request(self, num_shards: int) -> AnswerRequest:
        manifest = self.manifest
        if not isinstance(manifest, Manifest):
            manifest = read_manifest(joined(manifest, MANIFEST) if is_folder(manifest) else manifest)
        own = {field.name for field in dataclasses.fields(AnswerRequest)} - {"manifest", "num_shards"}
        asked = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in own}
        return AnswerRequest(manifest=manifest, num_shards=num_shards, **asked)


@dataclasses.dataclass
class AnswerPrompts(beam.PTransform):
    """Answers shards of prompts into a folder, and marks it as complete at the end.

    A shard that the folder holds already is taken over if it is of the same job and the same prompts; if it is not,
    the run fails before anything is decoded. So a retried bundle, or a later run, finds what an earlier one has done.

    Attributes:
      assignment: What to answer, and how.
      progress: Where to report.
      accelerator_hint: Resource hint of the step that decodes, and of no other; None for none.
      needs_accelerator: Whether a worker on which JAX finds only a CPU refuses to decode.
    """

    assignment: AnswerAssignment
    progress: ProgressLog
    _: dataclasses.KW_ONLY
    accelerator_hint: str | None = None
    needs_accelerator: bool = False

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, prompts: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of one `FinishedAnswers`, given `ExamplesRead`."""
        read = ExamplesRead(*prompts)
        count = beam.pvalue.AsSingleton(read.count)
        is_checked = (
            read.shards
            | "CheckStored" >> beam.Map(_checked_shard, assignment=self.assignment)
            | "ListShards" >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "CheckFolder" >> beam.Map(_check_folder, assignment=self.assignment)
        )
        answer = decoding(
            _AnswerShard(self.assignment, self.progress, needs_accelerator=self.needs_accelerator),
            is_checked,
            count,
            accelerator_hint=self.accelerator_hint,
        )
        return (
            read.shards
            | "AnswerShards" >> answer
            | "ListAnswered" >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "MarkComplete" >> beam.Map(_finished, count, assignment=self.assignment)
        )


def _checked_shard(element: tuple[int, Iterable[Example]], *, assignment: AnswerAssignment) -> int:
    """Returns the number of a shard; fails for a stored one of other prompts, or with failures not allowed now."""
    shard, unordered = element
    _taken_over(assignment, shard, examples=with_unique_ids(unordered))
    return shard


def _check_folder(shards: list[int], *, assignment: AnswerAssignment) -> bool:
    check_folder(assignment, shards)
    return True


def _finished(shards: list[AnsweredShard], count: int, *, assignment: AnswerAssignment) -> FinishedAnswers:
    return finish(assignment, shards, prompts=count)


def _taken_over(assignment: AnswerAssignment, shard: int, *, examples: list[Example]) -> AnsweredShard | None:
    path = assignment.shard_path(shard)
    stored = taken_over(path, shard_digest(assignment.job.digest(), shard, examples=examples))
    if stored is not None and stored.failed and assignment.on_error == "fail":
        first = stored.failures[0]
        raise DataError(
            f"{path}: there are prompts without an answer, {first.id} first: {first.reason} Go on with "
            "--on_error=list, or answer anew with --overwrite."
        )
    return stored


class _AnswerShard(beam.DoFn):
    """Answers one shard; threads of a process share its copies of the model."""

    def __init__(self, assignment: AnswerAssignment, progress: ProgressLog, *, needs_accelerator: bool) -> None:
        self._assignment = assignment
        self._progress = progress
        self._needs_accelerator = needs_accelerator
        self._shared = Shared()
        self._metrics = DecodeMetrics()
        self._models: ModelCopies[LoadedGenerator] | None = None

    def teardown(self) -> None:
        """Lets go of the model."""
        self._models = None

    def process(self, element: tuple[int, Iterable[Example]], is_checked: bool, count: int) -> Iterator[AnsweredShard]:
        """Yields what is stored of a shard, given its prompts, that the folder was checked, and how many there are."""
        assignment, (shard, unordered) = self._assignment, element
        examples = with_unique_ids(unordered)
        stored = _taken_over(assignment, shard, examples=examples)
        if stored is not None:
            self._metrics.count_taken_over(stored.prompts)
            self._progress.report("stored", stored.prompts)
        else:
            stored = self._answered(shard, examples, limit=failure_limit(assignment.max_failures, examples=count))
        source, published = assignment.shard_path(shard), assignment.published_path(shard)
        if published != source:
            # Even where there is one, since no digest tells whether it is damaged: it gets the same bytes.
            publish_rows(source, published)
        yield stored

    def _answered(self, shard: int, examples: list[Example], *, limit: int) -> AnsweredShard:
        """Answers a shard and stores it, and returns what is then stored."""
        from calm_beam.answers.worker import measure_losses
        from calm_beam.serving import Answer, answer_row

        assignment = self._assignment
        self._progress.report("loading", 1)
        # Not before there is something to answer: a run that only finds what is stored loads no model.
        models = self._loaded_models()
        with models.borrowed() as loaded:
            # Beam counts nothing before the end, and until the first prompt is answered, XLA compiles.
            self._progress.report("compiling", 1)
            outcomes = self._outcomes(loaded, examples, limit=limit)
            losses = measure_losses(assignment, loaded, outcomes)
        tallies: dict[str | None, Tally] = {}
        rows, failures = [], []
        for name, (example, outcome) in sorted(outcomes.items()):
            before = tallies.get(example.group, Tally())
            if isinstance(outcome, Answer):
                tallies[example.group] = before.answered(outcome)
                rows.append(answer_row(name, outcome, has_groups=assignment.has_groups))
            else:
                tallies[example.group] = before.failing()
                failures.append(Failure(id=name, reason=outcome.reason))
        path = assignment.shard_path(shard)
        write_answers(
            path,
            rows,
            shard=AnsweredShard(
                shard=shard,
                digest=shard_digest(assignment.job.digest(), shard, examples=examples),
                failures=tuple(failures),
                losses=tuple(losses),
                tallies=tallies,
            ),
            has_groups=assignment.has_groups,
        )
        # Here, since Beam has nowhere to count in `setup`.
        self._metrics.count_loads(models.take_load_msecs())
        # As it was stored, which another worker may have done before.
        return whole_answers(path)

    def _outcomes(
        self, loaded: "LoadedGenerator", examples: list[Example], *, limit: int
    ) -> dict[str, tuple[Example, "Answer | NoAnswer"]]:
        from calm_beam.answers.worker import NoAnswer, answer_shard

        outcomes: dict[str, tuple[Example, Answer | NoAnswer]] = {}
        failures: list[tuple[str, str]] = []
        decoder = loaded.generator.batch_decoder()
        start, before = time.perf_counter(), decoder.work
        for example, outcome in answer_shard(self._assignment, loaded, examples=examples):
            outcomes[example.id] = example, outcome
            self._progress.report("decoded", 1)
            if isinstance(outcome, NoAnswer):
                failures.append((example.id, outcome.reason))
                # Now, and not after hours on a device that is broken.
                check_failures(failures, failed=len(failures), limit=limit)
        self._metrics.count_call(decoder.work - before, seconds=time.perf_counter() - start)
        self._metrics.count_failures(len(failures))
        return outcomes

    def _loaded_models(self) -> "ModelCopies[LoadedGenerator]":
        if self._models is not None:
            return self._models
        # Imported by the worker: JAX must not be initialised in the process that forks or pickles.
        from calm_beam.answers import worker

        if self._needs_accelerator:
            require_accelerator()
        found: ModelCopies[LoadedGenerator] = self._shared.acquire(
            lambda: ModelCopies(lambda: worker.load_generator(self._assignment), most=self._assignment.model_copies),
            tag=repr(self._assignment),
        )
        # What nobody holds is let go of.
        self._models = found
        return found
