"""A worker's part: decode a shard, and time it where it is decoded.

A worker loads the model, and makes generations or answers of the shard's examples.

Importing this loads JAX; a process that only distributes work does without it.
"""

import contextlib
import dataclasses
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

import jax

from calm_beam.checkpoints import Checkpoint, CheckpointError, load_checkpoint
from calm_beam.decoding.branches import Branch, PromptResult, sweep_branches
from calm_beam.decoding.compilation import CompileTime, use_compilation_cache
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.engine import Work
from calm_beam.decoding.engine_choice import check_assigned
from calm_beam.decoding.isolation import DecodeError, reason_of, results_or_reasons
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import DataError, Example
from calm_beam.inputs.prompts import Prompt, encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, VocabularyError, ends_output, open_recorded
from calm_beam.serving.answer import Answer, PromptError, ServedRequest
from calm_beam.serving.generator import Generator
from calm_beam.serving.loss_meter import AnsweredRequest, LossMeter, MeasuredLoss
from calm_beam.storage import size
from calm_beam.storage.free_memory import peak_bytes

from .generate import ServedBranches, SweptPart, generate
from .job import StoredGenerations
from .request import BATCH, AnswerAssignment, Assignment, SweepAssignment
from .rows import Answered, Generation
from .sharding import duplicate_prompts
from .shards import ProbedLoss, StoredShard
from .timing import Lap, ShardTiming

_LIST = "Pass --on_error=list to list such prompts in failures.jsonl, and to answer the others."


def load_model(assignment: Assignment, *others: Assignment) -> "Loaded":
    """Returns the loaded model of an assignment, and of sweeps that differ from it in exit rules only.

    Raises:
      CheckpointError: If there is no model, or another one than when the run was started.
      VocabularyError: If there is no vocabulary, or another one than when the run was started.
      ManifestError: If model or vocabulary are not those of the manifest.
      UsageError: If this worker decodes by another engine than the run was started for.
    """
    keep_freed_memory()
    use_compilation_cache()
    loaded: Loaded
    if isinstance(assignment, AnswerAssignment):
        loaded = LoadedGenerator.of(assignment)
        engine = loaded.generator.engine.batch
    else:
        loaded = LoadedModel.of([each for each in (assignment, *others) if isinstance(each, SweepAssignment)])
        engine = loaded.decoder.engine
    check_assigned(engine, assignment.job.decoded_by)
    return loaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A thread's model, decoder and vocabulary for generations.

    Attributes:
      assignment: How to decode; the first of several that differ in exit rules.
      decoder: Decodes at the requested thresholds: a sweep, or the serving decoder.
      rules: Number of its exit rules, each with as many branches.
      vocabulary: The vocabulary; None if all prompts are token ids and there is none.
      vocab_size: Number of token ids that the model knows.
    """

    assignment: SweepAssignment
    decoder: Decoder | ServedBranches
    rules: int = 1
    vocabulary: Vocabulary | None
    vocab_size: int

    @classmethod
    def of(cls, assignments: Sequence[SweepAssignment]) -> "LoadedModel":
        """Returns the model and vocabulary for sweeps that differ in exit rules only; errors as in `load_model`."""
        first = assignments[0]
        job = first.job
        checkpoint = load_checkpoint(job.model.uri, declared=first.declared)
        found = checkpoint.fingerprint()
        if found != job.model.fingerprint:
            raise CheckpointError(
                f"checkpoint {job.model.uri}: fingerprint is {found}, the run was started for {job.model.fingerprint}. "
                "Do not change a checkpoint while it is calibrated."
            )
        vocabulary = _load_vocabulary(first)
        rules = tuple(each.job.settings.rule for each in assignments)
        decoder: Decoder | ServedBranches
        if job.decoder == BATCH:
            decoder = _served(first, checkpoint, vocabulary=vocabulary)
        else:
            decoder = _sweep(first, checkpoint, vocabulary=vocabulary, rules=rules)
        return cls(
            assignment=first,
            rules=len(rules),
            decoder=decoder,
            vocabulary=vocabulary,
            vocab_size=checkpoint.config.vocab_size,
        )

    def outcomes(
        self, examples: Sequence[Example], *, above: Mapping[str, Generation] | None = None
    ) -> Iterator[tuple[Generation, ...]]:
        """Yields every example's generations, one per rule; first of unfit prompts and those that failed in `above`.

        Args:
          examples: The examples of a shard, in their order.
          above: Their generations at the upper part of the grid, by id; None if there is no such part.

        Raises:
          DataError: If a row is wrong and the assignment does not let examples fail.
          DecodeError: If a prompt cannot be encoded or decoded and the assignment does not let examples fail.
        """
        duplicates = duplicate_prompts(examples)
        prompts: list[Prompt] = []
        for example in examples:
            if above is not None and above[example.id].failure is not None:
                yield (above[example.id],)
                continue
            encoded = self._encode(example)
            if isinstance(encoded, Prompt):
                prompts.append(encoded)
            else:
                is_duplicate = example.id in duplicates
                unfit = Generation(
                    example=example, truncated=False, duplicate=is_duplicate, failure=encoded, outputs=()
                )
                yield (unfit,) * self.rules
        yield from generate(
            self.decoder,
            prompts,
            vocabulary=self.vocabulary,
            on_error=self.assignment.on_error,
            duplicates=duplicates,
            part=SweptPart(
                above=[above[prompt.example.id] for prompt in prompts] if above is not None else None,
                goes_on=self.assignment.goes_on,
                rules=self.rules,
            ),
            end_ids=self.assignment.job.end_ids,
        )

    def losses(self, outcomes: Sequence[tuple[Generation, ...]]) -> list[ProbedLoss]:
        """Returns none: losses of generations are computed later, from the stored shards."""
        return []

    def _encode(self, example: Example) -> Prompt | str:
        """Returns the prompt of an example; if it has none and examples may fail, returns the reason."""
        assignment = self.assignment
        try:
            return encode_prompt(
                example,
                vocabulary=self.vocabulary,
                settings=assignment.job.settings,
                vocab_size=self.vocab_size,
                on_long=assignment.job.on_long,
            )
        except DataError as error:
            if assignment.on_error == "fail":
                raise
            return str(error)
        except Exception as error:
            failure = f"its prompt cannot be turned into token ids ({reason_of(error)})"
            if assignment.on_error == "fail":
                raise DecodeError(f"{example.in_words()}: {failure}.") from error
            return failure


def _sweep(
    assignment: SweepAssignment, checkpoint: Checkpoint, *, vocabulary: Vocabulary | None, rules: Sequence[ExitRule]
) -> Decoder:
    settings, above = assignment.job.settings, assignment.above
    branches = sweep_branches(
        rules,
        settings.thresholds[len(above.thresholds) if above else 0 :],
        max_decode_length=settings.max_decode_length,
        with_full_model=above is None,
    )
    return _decoder(assignment, checkpoint, vocabulary=vocabulary, branches=branches)


def _served(assignment: SweepAssignment, checkpoint: Checkpoint, *, vocabulary: Vocabulary | None) -> ServedBranches:
    settings = assignment.job.settings
    settings.rule.check_served()
    branches = sweep_branches(settings.rule, settings.thresholds, max_decode_length=settings.max_decode_length)
    return ServedBranches(_decoder(assignment, checkpoint, vocabulary=vocabulary, branches=branches[:1]), branches)


def _decoder(
    assignment: SweepAssignment, checkpoint: Checkpoint, *, vocabulary: Vocabulary | None, branches: Sequence[Branch]
) -> Decoder:
    settings = assignment.job.settings
    return Decoder(
        checkpoint,
        branches,
        max_input_length=settings.max_input_length,
        precision=settings.precision,
        ends_output=ends_output(vocabulary),
        **assignment.asked_of_decoder(),
    )


def _load_vocabulary(assignment: SweepAssignment) -> Vocabulary | None:
    path, recorded = assignment.vocabulary_path, assignment.job.vocabulary
    if path is None:
        return None
    assert recorded is not None, "a job whose workers have a vocabulary names it"
    vocabulary = open_recorded(path, recorded)
    if vocabulary.fingerprint != recorded.fingerprint:
        raise VocabularyError(
            f"vocabulary {path}: fingerprint is {vocabulary.fingerprint}, the run was started for "
            f"{recorded.fingerprint}. Do not change a vocabulary while a model is calibrated."
        )
    return vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedGenerator:
    """A thread's generator and loss meter for answers.

    Attributes:
      assignment: How to answer.
      generator: Answers under the manifest.
      meter: Measures losses; None if none are measured.
    """

    assignment: AnswerAssignment
    generator: Generator
    meter: LossMeter | None

    @property
    def decoder(self) -> Decoder:
        """The generator's decoder."""
        return self.generator.batch_decoder()

    @classmethod
    def of(cls, assignment: AnswerAssignment) -> "LoadedGenerator":
        """Returns the generator of an assignment; errors as in `load_model`."""
        probe = assignment.job.probe
        generator = Generator.from_manifest(
            assignment.manifest,
            assignment.job.model.uri,
            declared=assignment.declared,
            vocabulary=assignment.vocabulary_path,
            choice=assignment.choice,
            **assignment.asked_of_decoder(),
        )
        meter = None
        if probe is not None:
            meter = LossMeter(
                generator,
                share=probe.share,
                salt=probe.salt,
                metric=assignment.choice.metric,
                metric_settings=assignment.metric_settings,
            )
        return cls(assignment=assignment, generator=generator, meter=meter)

    def outcomes(
        self, examples: Sequence[Example], *, above: Mapping[str, Generation] | None = None
    ) -> Iterator[tuple[Answered]]:
        """Yields the outcome of every prompt of a shard: first of unfit ones, then of each as it ends.

        Args:
          examples: The prompts.
          above: Always None: no part of an answer is known before.

        Raises:
          DataError: If a prompt is unfit and the assignment does not let prompts fail.
          DecodeError: If one cannot be decoded and may not fail, or if the device runs out of memory.
        """
        assignment, generator = self.assignment, self.generator
        fit: list[Example] = []
        requests: list[ServedRequest] = []
        for example in examples:
            try:
                requests.append(
                    generator.request(example.prompt, name=assignment.place_of(example), group=example.group)
                )
            except PromptError as error:
                if assignment.on_error == "fail":
                    raise DataError(f"{error} {_LIST}") from error
                yield (Answered(example=example, failure=str(error), is_refused=True),)
            else:
                fit.append(example)
        decoder = self.decoder

        def decode(members: Sequence[int]) -> Iterator[tuple[int, PromptResult]]:
            return decoder.decode([generator.to_decode(requests[member]) for member in members])

        if not requests:
            return
        for index, result in results_or_reasons(decode, range(len(requests))):
            answered = self._answered(fit[index], requests[index], result)
            if answered.failure is not None and assignment.on_error == "fail":
                raise DecodeError(f"{answered.failure} Check the checkpoint. {_LIST}")
            yield (answered,)

    def losses(self, outcomes: Sequence[tuple[Answered]]) -> list[ProbedLoss]:
        """Returns the losses of the sampled prompts, by id.

        A refused prompt has no output and no loss; one that should have been answered and was not has loss 1. An answer
        by an entry that is not about the prompt's group has no guarantee to monitor.

        Args:
          outcomes: The outcomes of every prompt of a shard, by id.
        """
        meter = self.meter
        if meter is None:
            return []
        places: dict[str, int] = {}
        measured: dict[str, MeasuredLoss] = {}
        answered: list[tuple[Example, Answer]] = []
        for (outcome,) in outcomes:
            example = outcome.example
            place = self._watched_place(example)
            if place is None or not meter.is_sampled(example.id) or outcome.is_refused:
                continue
            if outcome.answer is not None:
                answered.append((example, outcome.answer))
            else:
                measured[example.id] = MeasuredLoss(value=1.0, failure=outcome.failure)
            places[example.id] = place
        if meter.needs_references:
            for example, answer in answered:
                references = example.references or example.reference_ids or ()
                measured[example.id] = meter.measure(example.id, example.prompt, answer=answer, references=references)
        else:
            sampled = [AnsweredRequest(id=each.id, prompt=each.prompt, answer=answer) for each, answer in answered]
            measured |= {sampled[index].id: loss for index, loss in meter.measure_each(sampled)}
        return [
            ProbedLoss(id=name, loss=measured[name].value, failure=measured[name].failure, calibration=place)
            for name, place in places.items()
        ]

    def _answered(self, example: Example, request: ServedRequest, result: PromptResult | str) -> Answered:
        reason = result if isinstance(result, str) else None
        if isinstance(result, PromptResult):
            try:
                return Answered(example=example, answer=self.generator.answer(request, result.branch(0)))
            except Exception as error:
                reason = reason_of(error)
        return Answered(example=example, failure=f"{request.name}: {reason}.")

    def _watched_place(self, example: Example) -> int | None:
        """Returns the index of the entry whose guarantee is about a prompt; None without one, or if it has no risk."""
        entry = self.generator.entry_for(example.group)
        group = example.group or self.generator.entry.group
        if entry.group != group:
            return None
        place = self.assignment.manifest.calibrations.index(entry)
        return place if place in self.assignment.watched() else None


Loaded = LoadedModel | LoadedGenerator
"""What `load_model` returns: a thread's decoder, for either kind of outputs."""


# Fewest steps of a lap: the time of a single step would depend on the outputs that happen to end in it.
_STEPS = 4


class _Decoder(Protocol):
    """A decoder that counts its work."""

    @property
    def work(self) -> Work: ...

    @property
    def slots(self) -> int: ...


class ShardStopwatch:
    """Times the decoding of one shard, from entering the context until the shard is stored."""

    def __init__(self, decoder: _Decoder, *, num_branches: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts timing.

        Args:
          decoder: Counts its work.
          num_branches: Number of branches that it decodes.
          clock: Returns seconds.
        """
        self._decoder, self._num_branches, self._clock = decoder, num_branches, clock
        self._compiling = CompileTime()
        self._began, self._cpu = time.time(), time.process_time()
        self._start = self._lap_start = clock()
        self._before = self._lap_before = decoder.work
        self._lap_compiling = 0.0
        self._laps: list[Lap] = []

    def __enter__(self) -> Self:
        self._compiling.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._compiling.__exit__(kind, error, trace)

    def lap(self) -> None:
        """Ends a lap if it has enough steps; called after every output."""
        work = self._decoder.work
        steps = work.steps - self._lap_before.steps
        if steps < _STEPS:
            return
        now, compiling = self._clock(), self._compiling.seconds()
        seconds = now - self._lap_start - (compiling - self._lap_compiling)
        self._laps.append(
            Lap(
                steps=steps,
                rows=work.layer_rows - self._lap_before.layer_rows,
                seconds=round(max(0.0, seconds), 6),
            )
        )
        self._lap_start, self._lap_before, self._lap_compiling = now, work, compiling

    def write_timing(self, where: StoredGenerations, stored: StoredShard, *, load_seconds: float) -> None:
        """Writes the timing next to a stored shard; an error of the disk or the store is ignored.

        Args:
          where: The generations' folder.
          stored: The shard.
          load_seconds: Time to load the model since the previous shard.
        """
        with contextlib.suppress(OSError):
            timing = self.timing(stored, where.shard_path(stored.shard), load_seconds=load_seconds)
            timing.write(where.directory, num_shards=where.job.num_shards)

    def timing(self, stored: StoredShard, path: str, *, load_seconds: float) -> ShardTiming:
        """Returns the timing, after the shard has been stored.

        Args:
          stored: The shard.
          path: Its file.
          load_seconds: Time to load the model since the previous shard.
        """
        work = self._decoder.work - self._before
        return ShardTiming(
            shard=stored.shard,
            digest=stored.digest,
            examples=stored.examples,
            lanes=self._num_branches,
            slots=self._decoder.slots,
            began=round(self._began, 3),
            seconds=round(self._clock() - self._start, 6),
            compile_seconds=round(self._compiling.seconds(), 6),
            cpu_seconds=round(time.process_time() - self._cpu, 6),
            load_seconds=round(load_seconds, 3),
            steps=work.steps,
            rows=work.layer_rows,
            padded_rows=work.padded_rows,
            projections=work.projection_rows,
            tokens=work.tokens,
            laps=tuple(self._laps),
            bytes=size(path),
            peak_bytes=peak_bytes(),
            worker=_worker_named(os.getpid()),
            device=jax.local_devices()[0].device_kind,
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        )


@functools.cache
def _worker_named(_: int) -> str:
    """Returns a random name for a process id: cached by the id, so that a forked process gets another one."""
    return uuid.uuid4().hex
