"""What a worker does with the examples of a shard: it loads the model, encodes prompts, and decodes them.

Importing this loads JAX, which a process that only hands out work need not do.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from calm_beam.checkpoints import Checkpoint, CheckpointError, load_checkpoint
from calm_beam.decoding.branches import Branch, sweep_branches
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.engine_choice import check_assigned
from calm_beam.decoding.generate import generate
from calm_beam.decoding.isolation import DecodeError, reason_of
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.decoding.prompts import Prompt, encode_prompt
from calm_beam.exits.rule import ExitRule
from calm_beam.generations import Generation
from calm_beam.inputs.examples import DataError, Example
from calm_beam.vocabularies.vocabulary import Vocabulary, VocabularyError, open_recorded

from .assignment import BATCH, Assignment
from .served_branches import ServedBranches
from .shard import duplicate_prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """What one thread needs to decode.

    Attributes:
      decoder: Decodes at the thresholds that are asked for: a sweep, or the decoder that serves.
      rules: How many exit rules it has, each with as many branches.
      vocabulary: None where all prompts are token ids and there is none.
      vocab_size: Number of token ids that the model knows.
    """

    decoder: Decoder | ServedBranches
    rules: int = 1
    vocabulary: Vocabulary | None
    vocab_size: int


def load_model(assignment: Assignment, *others: Assignment) -> LoadedModel:
    """Returns the model and vocabulary of an assignment, and of others that differ from it in exit rules alone.

    Raises:
      CheckpointError: If there is no model, or another than when the run was started.
      VocabularyError: The same for the vocabulary.
      UsageError: If this worker decodes by another engine than the run was started for.
    """
    keep_freed_memory()
    use_compilation_cache()
    job = assignment.job
    checkpoint = load_checkpoint(job.model.uri, declared=assignment.declared)
    found = checkpoint.fingerprint()
    if found != job.model.fingerprint:
        raise CheckpointError(
            f"checkpoint {job.model.uri}: fingerprint is {found}, the run was started for {job.model.fingerprint}. "
            "Do not change a checkpoint while it is calibrated."
        )
    vocabulary = _load_vocabulary(assignment)
    rules = tuple(each.job.settings.rule for each in (assignment, *others))
    decoder = _served(assignment, checkpoint) if job.decoder == BATCH else _sweep(assignment, checkpoint, rules)
    check_assigned(decoder.engine, job.settings.engine)
    return LoadedModel(
        rules=len(rules), decoder=decoder, vocabulary=vocabulary, vocab_size=checkpoint.config.vocab_size
    )


def _sweep(assignment: Assignment, checkpoint: Checkpoint, rules: Sequence[ExitRule]) -> Decoder:
    settings, above = assignment.job.settings, assignment.above
    branches = sweep_branches(
        rules,
        settings.thresholds[len(above.thresholds) if above else 0 :],
        max_decode_length=settings.max_decode_length,
        with_full_model=above is None,
    )
    return _decoder(assignment, checkpoint, branches)


def _served(assignment: Assignment, checkpoint: Checkpoint) -> ServedBranches:
    settings = assignment.job.settings
    settings.rule.check_served()
    branches = sweep_branches(settings.rule, settings.thresholds, max_decode_length=settings.max_decode_length)
    return ServedBranches(_decoder(assignment, checkpoint, branches[:1]), branches)


def _decoder(assignment: Assignment, checkpoint: Checkpoint, branches: Sequence[Branch]) -> Decoder:
    settings = assignment.job.settings
    return Decoder(
        checkpoint,
        branches,
        max_input_length=settings.max_input_length,
        batch_size=assignment.batch_size,
        token_budget=assignment.token_budget,
        exit_head=assignment.exit_head,
        engine=assignment.engine,
        arithmetic=settings.arithmetic,
        model_parallelism=assignment.model_parallelism,
    )


def _load_vocabulary(assignment: Assignment) -> Vocabulary | None:
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


def decode_shard(
    assignment: Assignment,
    loaded: LoadedModel,
    *,
    examples: Sequence[Example],
    above: Mapping[str, Generation] | None,
) -> Iterator[tuple[Generation, ...]]:
    """Yields the generations of every example by each rule, first of those whose prompt is unfit, or failed above.

    Args:
      assignment: How to decode; the first of several that differ in exit rules.
      loaded: From `load_model`.
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
        encoded = _encode(example, assignment, loaded=loaded)
        if isinstance(encoded, Prompt):
            prompts.append(encoded)
        else:
            is_duplicate = example.id in duplicates
            unfit = Generation(example=example, truncated=False, duplicate=is_duplicate, failure=encoded, outputs=())
            yield (unfit,) * loaded.rules
    yield from generate(
        loaded.decoder,
        prompts,
        vocabulary=loaded.vocabulary,
        on_error=assignment.on_error,
        duplicates=duplicates,
        above=[above[prompt.example.id] for prompt in prompts] if above is not None else None,
        goes_on=assignment.goes_on,
        rules=loaded.rules,
        end_ids=assignment.stored.job.end_ids,
    )


def _encode(example: Example, assignment: Assignment, *, loaded: LoadedModel) -> Prompt | str:
    """Returns the prompt of an example, or in words why it has none, where examples may fail."""
    try:
        return encode_prompt(
            example,
            vocabulary=loaded.vocabulary,
            settings=assignment.job.settings,
            vocab_size=loaded.vocab_size,
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
