"""What a worker does with the prompts of a shard: it loads the model, answers them, and measures losses.

Importing this loads JAX, which a process that only hands out work need not do.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.decoding.engine_choice import check_assigned
from calm_beam.decoding.isolation import DecodeError, reason_of, results_or_reasons
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.decoding.result import PromptResult
from calm_beam.inputs.examples import DataError, Example
from calm_beam.serving.answer import Answer, PromptError
from calm_beam.serving.generator import Generator
from calm_beam.serving.loss_meter import AnsweredRequest, LossMeter, MeasuredLoss
from calm_beam.serving.request import AnyPrompt, ServedRequest

from .assignment import AnswerAssignment
from .shards import ProbedLoss

_LIST = "Pass --on_error=list to list such prompts in failures.jsonl, and to answer the others."


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedGenerator:
    """What one thread needs to answer prompts.

    Attributes:
      generator: Answers under the manifest.
      meter: Measures losses; None where none are.
    """

    generator: Generator
    meter: LossMeter | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoAnswer:
    """A prompt without an answer.

    Attributes:
      reason: Why, in words.
      is_refused: Whether it was unfit to be decoded. If not, it should have been answered, and counts as a loss of 1
        where losses are measured.
    """

    reason: str
    is_refused: bool


def load_generator(assignment: AnswerAssignment) -> LoadedGenerator:
    """Returns the generator of an assignment.

    Raises:
      ManifestError: If model or vocabulary are not those of the manifest.
      CheckpointError: If there is no model.
      VocabularyError: If there is no vocabulary.
      UsageError: If this worker decodes by another engine than the run was started for.
    """
    keep_freed_memory()
    use_compilation_cache()
    entry, probe = assignment.entry, assignment.job.probe
    generator = Generator.from_manifest(
        assignment.manifest,
        assignment.job.model.uri,
        declared=assignment.declared,
        vocabulary=assignment.vocabulary_path,
        consistency=entry.consistency,
        metric=entry.metric,
        loss=entry.loss,
        delta=entry.delta,
        epsilon=entry.epsilon,
        group=entry.group,
        batch_size=assignment.batch_size,
        token_budget=assignment.token_budget,
        exit_head=assignment.exit_head,
        engine=assignment.engine,
        model_parallelism=assignment.model_parallelism,
        confidence=assignment.confidence,
    )
    check_assigned(generator.engine.batch, assignment.job.engine)
    meter = None
    if probe is not None:
        meter = LossMeter(
            generator,
            share=probe.share,
            salt=probe.salt,
            metric=assignment.metric,
            metric_settings=assignment.metric_settings,
        )
    return LoadedGenerator(generator=generator, meter=meter)


def answer_shard(
    assignment: AnswerAssignment, loaded: LoadedGenerator, *, examples: Sequence[Example]
) -> Iterator[tuple[Example, Answer | NoAnswer]]:
    """Yields what becomes of every prompt of a shard: first of those that are unfit, then of each as it ends.

    Args:
      assignment: How to answer.
      loaded: From `load_generator`.
      examples: The prompts.

    Raises:
      DataError: If a prompt is unfit and the assignment does not let prompts fail.
      DecodeError: If one cannot be decoded, likewise; or if the device has no memory left.
    """
    generator = loaded.generator
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
            yield example, NoAnswer(reason=str(error), is_refused=True)
        else:
            fit.append(example)
    decoder = generator.batch_decoder()

    def decode(members: Sequence[int]) -> Iterator[tuple[int, PromptResult]]:
        return decoder.decode([generator.to_decode(requests[member]) for member in members])

    if not requests:
        return
    for index, result in results_or_reasons(decode, range(len(requests))):
        outcome = _answer(generator, requests[index], result)
        if isinstance(outcome, NoAnswer) and assignment.on_error == "fail":
            raise DecodeError(f"{outcome.reason} Check the checkpoint. {_LIST}")
        yield fit[index], outcome


def measure_losses(
    assignment: AnswerAssignment,
    loaded: LoadedGenerator,
    outcomes: Mapping[str, tuple[Example, Answer | NoAnswer]],
) -> list[ProbedLoss]:
    """Returns the losses of the prompts that are sampled, by id.

    A prompt that was refused has no output and no loss; one that should have been answered and was not has loss 1. What
    is answered by an entry that is not about its group has no promise to watch.

    Args:
      assignment: What is answered.
      loaded: From `load_generator`.
      outcomes: What became of every prompt of a shard, by id.
    """
    meter = loaded.meter
    if meter is None:
        return []
    places: dict[str, int] = {}
    measured: dict[str, MeasuredLoss] = {}
    answered: list[tuple[Example, Answer]] = []
    for name, (example, outcome) in sorted(outcomes.items()):
        place = _watched_place(assignment, loaded.generator, example)
        if place is None or not meter.is_sampled(name):
            continue
        if isinstance(outcome, Answer):
            answered.append((example, outcome))
        elif outcome.is_refused:
            continue
        else:
            measured[name] = MeasuredLoss(value=1.0, failure=outcome.reason)
        places[name] = place
    if meter.needs_references:
        for example, answer in answered:
            references = example.references or example.reference_ids or ()
            measured[example.id] = meter.measure(example.id, prompt_of(example), answer=answer, references=references)
    else:
        sampled = [AnsweredRequest(id=each.id, prompt=prompt_of(each), answer=answer) for each, answer in answered]
        measured |= {sampled[index].id: loss for index, loss in meter.measure_each(sampled)}
    return [
        ProbedLoss(id=name, loss=measured[name].value, failure=measured[name].failure, calibration=place)
        for name, place in places.items()
    ]


def prompt_of(example: Example) -> AnyPrompt:
    """Returns what a generator is given."""
    return example.input if example.input is not None else example.input_ids or ()


def _answer(generator: Generator, request: ServedRequest, result: PromptResult | str) -> Answer | NoAnswer:
    reason = result if isinstance(result, str) else None
    if isinstance(result, PromptResult):
        try:
            return generator.answer(request, result.branch(0))
        except Exception as error:
            reason = reason_of(error)
    return NoAnswer(reason=f"{request.name}: {reason}.", is_refused=False)


def _watched_place(assignment: AnswerAssignment, generator: Generator, example: Example) -> int | None:
    """Returns the place of the entry whose promise is about a prompt; None if none is, or it has no risk."""
    entry = generator.entry_for(example.group)
    group = example.group or generator.entry.group
    if entry.group != group:
        return None
    place = assignment.manifest.calibrations.index(entry)
    return place if place in assignment.watched() else None
