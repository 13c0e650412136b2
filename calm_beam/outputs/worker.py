"""What a worker does with a shard, and how long that takes, measured where it is decoded.

A worker loads the model, and makes generations of the shard's examples, or answers.

Importing this loads JAX, which a process that only hands out work need not do.
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
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, VocabularyError, open_recorded
from calm_beam.outputs.generate import SweptPart, generate
from calm_beam.serving.answer import Answer, AnyPrompt, PromptError, ServedRequest
from calm_beam.serving.generator import Generator
from calm_beam.serving.loss_meter import AnsweredRequest, LossMeter, MeasuredLoss
from calm_beam.storage import size
from calm_beam.storage.free_memory import peak_bytes

from .generate import ServedBranches
from .job import StoredGenerations
from .request import BATCH, AnswerAssignment, Assignment, SweepAssignment
from .rows import Answered, Generation
from .sharding import duplicate_prompts
from .shards import ProbedLoss, StoredShard
from .timing import Lap, ShardTiming

_LIST = "Pass --on_error=list to list such prompts in failures.jsonl, and to answer the others."


def load_model(assignment: Assignment, *others: Assignment) -> "Loaded":
    """Returns what an assignment needs, and sweeps that differ from it in exit rules alone.

    Raises:
      CheckpointError: If there is no model, or another than when the run was started.
      VocabularyError: The same for the vocabulary.
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
    """What one thread needs to make generations.

    Attributes:
      assignment: How to decode; the first of several that differ in exit rules.
      decoder: Decodes at the thresholds that are asked for: a sweep, or the decoder that serves.
      rules: How many exit rules it has, each with as many branches.
      vocabulary: None where all prompts are token ids and there is none.
      vocab_size: Number of token ids that the model knows.
    """

    assignment: SweepAssignment
    decoder: Decoder | ServedBranches
    rules: int = 1
    vocabulary: Vocabulary | None
    vocab_size: int

    @classmethod
    def of(cls, assignments: Sequence[SweepAssignment]) -> "LoadedModel":
        """Returns the model and vocabulary of sweeps that differ in exit rules alone; errors as in `load_model`."""
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
        decoder = _served(first, checkpoint) if job.decoder == BATCH else _sweep(first, checkpoint, rules)
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
        """Yields the generations of every example by each rule, first of those whose prompt is unfit, or failed above.

        Args:
          examples: Those of a shard, in their order.
          above: Their generations at the upper part of the grid, by id; None if there is no such part.

        Raises:
          DataError: If a row is wrong and the assignment does not let examples fail.
          DecodeError: If a prompt cannot be encoded or decoded, likewise.
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
        """Returns none: losses of generations are made of what is stored."""
        return []

    def _encode(self, example: Example) -> Prompt | str:
        """Returns the prompt of an example, or in words why it has none, where examples may fail."""
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


def _sweep(assignment: SweepAssignment, checkpoint: Checkpoint, rules: Sequence[ExitRule]) -> Decoder:
    settings, above = assignment.job.settings, assignment.above
    branches = sweep_branches(
        rules,
        settings.thresholds[len(above.thresholds) if above else 0 :],
        max_decode_length=settings.max_decode_length,
        with_full_model=above is None,
    )
    return _decoder(assignment, checkpoint, branches)


def _served(assignment: SweepAssignment, checkpoint: Checkpoint) -> ServedBranches:
    settings = assignment.job.settings
    settings.rule.check_served()
    branches = sweep_branches(settings.rule, settings.thresholds, max_decode_length=settings.max_decode_length)
    return ServedBranches(_decoder(assignment, checkpoint, branches[:1]), branches)


def _decoder(assignment: SweepAssignment, checkpoint: Checkpoint, branches: Sequence[Branch]) -> Decoder:
    settings = assignment.job.settings
    return Decoder(
        checkpoint,
        branches,
        max_input_length=settings.max_input_length,
        precision=settings.precision,
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
    """What one thread needs to answer prompts.

    Attributes:
      assignment: How to answer.
      generator: Answers under the manifest.
      meter: Measures losses; None where none are.
    """

    assignment: AnswerAssignment
    generator: Generator
    meter: LossMeter | None

    @property
    def decoder(self) -> Decoder:
        """What decodes."""
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
        """Yields what becomes of every prompt of a shard: first of those that are unfit, then of each as it ends.

        Args:
          examples: The prompts.
          above: None, since nothing of an answer is known before.

        Raises:
          DataError: If a prompt is unfit and the assignment does not let prompts fail.
          DecodeError: If one cannot be decoded, likewise; or if the device has no memory left.
        """
        assignment, generator = self.assignment, self.generator
        fit: list[Example] = []
        requests: list[ServedRequest] = []
        for example in examples:
            try:
                requests.append(
                    generator.request(prompt_of(example), name=assignment.place_of(example), group=example.group)
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
        """Returns the losses of the prompts that are sampled, by id.

        A prompt that was refused has no output and no loss; one that should have been answered and was not has loss 1.
        What is answered by an entry that is not about its group has no promise to watch.

        Args:
          outcomes: What became of every prompt of a shard, by id.
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
                measured[example.id] = meter.measure(
                    example.id, prompt_of(example), answer=answer, references=references
                )
        else:
            sampled = [AnsweredRequest(id=each.id, prompt=prompt_of(each), answer=answer) for each, answer in answered]
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
        """Returns the place of the entry whose promise is about a prompt; None if none is, or it has no risk."""
        entry = self.generator.entry_for(example.group)
        group = example.group or self.generator.entry.group
        if entry.group != group:
            return None
        place = self.assignment.manifest.calibrations.index(entry)
        return place if place in self.assignment.watched() else None


Loaded = LoadedModel | LoadedGenerator
"""What one thread needs to decode, whatever becomes of its outputs."""


def prompt_of(example: Example) -> AnyPrompt:
    """Returns what a generator is given."""
    return example.input if example.input is not None else example.input_ids or ()


# Of a lap. A single step would be measured by the outputs that happen to end in it.
_STEPS = 4


class _Decoder(Protocol):
    """What is timed."""

    @property
    def work(self) -> Work: ...

    @property
    def slots(self) -> int: ...


class ShardStopwatch:
    """Measures the decoding of one shard while the context is open, and until the shard is stored."""

    def __init__(self, decoder: _Decoder, *, lanes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts.

        Args:
          decoder: Counts its work.
          lanes: How many it decodes.
          clock: Returns seconds.
        """
        self._decoder, self._lanes, self._clock = decoder, lanes, clock
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
        """Is called after every output; ends a lap if there were enough steps."""
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
        """Writes what was measured beside a shard that is stored now; a disk or a store that refuses it ends nothing.

        Args:
          where: The folder.
          stored: The shard.
          load_seconds: As in `timing`.
        """
        with contextlib.suppress(OSError):
            timing = self.timing(stored, where.shard_path(stored.shard), load_seconds=load_seconds)
            timing.write(where.directory, num_shards=where.job.num_shards)

    def timing(self, stored: StoredShard, path: str, *, load_seconds: float) -> ShardTiming:
        """Returns what was measured, now that the shard is stored.

        Args:
          stored: The shard.
          path: Its file.
          load_seconds: What loading the model has taken since another shard was asked.
        """
        work = self._decoder.work - self._before
        return ShardTiming(
            shard=stored.shard,
            digest=stored.digest,
            examples=stored.examples,
            lanes=self._lanes,
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
    """Returns a text of a process, of which the argument is the number, so that one that forks gets another."""
    return uuid.uuid4().hex
