"""Checking all of a training that can be checked before its first step: what is wrong is refused here.

`train` reads a model, rows, and the vocabulary that turns rows into token ids.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from calm_beam.checkpoints import (
    Arrays,
    Checkpoint,
    CheckpointError,
    Declared,
    GenerationFacts,
    load_checkpoint,
    pieces,
)
from calm_beam.errors import UsageError
from calm_beam.inputs import AS_USUAL, Reading, place_of, read_examples
from calm_beam.inputs.examples import DataError, Example
from calm_beam.inputs.vocabularies.chat_templates import check_turns, chosen_chat
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, VocabularyError
from calm_beam.inputs.vocabularies.vocabulary import open_vocabulary as with_its_sentinels
from calm_beam.launch.flags.shared_options import checked_metrics, declared, find_files, metric_settings
from calm_beam.model import ModelConfig, architecture_of
from calm_beam.storage import refuse_links
from calm_beam.training.batches import EncodedPairs, encoded_pairs, end_of_targets
from calm_beam.training.config import ClassifierConfig, TrainingConfig
from calm_beam.training.new_model import NEW_MODELS, train_vocabulary, with_own_exits
from calm_beam.training.saved_state import SavedState, StateFolder
from calm_beam.training.validation import GenerationScore

from .request import LOSS, TrainRequest

_NOTHING = Declared()


def load_model(path: str, declared: Declared = _NOTHING) -> Checkpoint:
    """Returns the model of `--checkpoint`, of which the user has declared what its files do not say.

    Raises:
      UsageError: If it cannot be read, or comes without its vocabulary.
    """
    try:
        checkpoint = load_checkpoint(path, declared=declared)
    except (CheckpointError, OSError) as error:
        raise UsageError(f"--checkpoint: {error}") from error
    if checkpoint.vocabulary_path is None:
        raise UsageError(
            f"--checkpoint={path}: has no vocabulary. Put its sentencepiece.model or tokenizer.json next to it."
        )
    return checkpoint


def with_exits(request: TrainRequest, config: ModelConfig, arrays: Arrays | None) -> tuple[ModelConfig, Arrays | None]:
    """Returns a model, and its weights if it is not new, with the norms and heads of exits that are asked for.

    Raises:
      UsageError: If it has but one layer, or heads that would have to be given up.
    """
    if request.exit_heads == "shared" and config.exit_heads:
        raise UsageError(
            "--exit_heads=shared: the layers of --checkpoint have heads of their own, which no training makes one. "
            "Leave it out."
        )
    asked = {"exit_norms": request.exit_norm, "exit_heads": request.exit_heads == "separate"}
    try:
        if arrays is not None:
            return with_own_exits(config, arrays, **asked)
        return dataclasses.replace(cast(Any, config), **asked), None
    except ValueError as error:
        raise UsageError(f"--exit_norm, --exit_heads: {error}") from error


def read_rows(flag: str, patterns: Sequence[str], *, reading: Reading = AS_USUAL) -> list[Example]:
    """Returns all examples of the files, each with text and at least one reference to learn from.

    Raises:
      UsageError: If there is no file or no example, or one is malformed; names file and row.
    """
    examples = []
    try:
        for path in find_files(flag, patterns, reading=reading).files:
            for example in read_examples(path, reading):
                if example.input is None or not example.references:
                    place = place_of(path, example.line, reading=reading)
                    raise DataError(
                        f"{place}: training needs input as text, and references. In a chat, the reference is the "
                        "assistant's message after the user's."
                    )
                examples.append(example)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if not examples:
        raise UsageError(f"{flag} {','.join(patterns)}: there are no examples.")
    return examples


def write_vocabulary(rows: Sequence[Example], task_prefix: str, *, path: pathlib.Path, vocab_size: int) -> None:
    """Writes a vocabulary of the rows' texts.

    Raises:
      UsageError: If the texts do not give one of that size.
    """
    texts = [text for row in rows for text in (f"{task_prefix}{row.input}", *row.references)]
    try:
        train_vocabulary(texts, path, vocab_size=vocab_size)
    except VocabularyError as error:
        raise UsageError(f"--vocab_size={vocab_size}: {error}") from error


def open_vocabulary(path: pathlib.Path, model: ModelConfig, *, request: TrainRequest) -> Vocabulary:
    """Returns the vocabulary of a model, with the chat that prompts become.

    Args:
      path: Its file.
      model: Sizes of the model.
      request: Says how prompts become chats.

    Raises:
      UsageError: If it or the template cannot be read, or it has more ids than the model; or if there is a template
        and nobody says whether it is used.
    """
    try:
        chat = chosen_chat(request.chat_template, tokenizer=str(path), system=request.system)
        vocabulary = with_its_sentinels(path, chat=chat)
    except VocabularyError as error:
        raise UsageError(str(error)) from error
    if vocabulary.size > model.vocab_size:
        raise UsageError(
            f"vocabulary {path}: has {vocabulary.size} ids, the model only {model.vocab_size}. "
            "They do not belong together."
        )
    return vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A training, all of which has been found good.

    Attributes:
      request: What was asked for.
      output: The folder to write to.
      vocabulary: Turns texts into ids.
      vocabulary_path: Its file.
      learned: What is learned from.
      measured: What is measured on; may be none where a model is trained.
      end_id: Ends every target.
    """

    request: TrainRequest
    output: pathlib.Path
    vocabulary: Vocabulary
    vocabulary_path: pathlib.Path
    learned: EncodedPairs
    measured: EncodedPairs
    end_id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedTraining(Prepared):
    """The training of a model.

    Attributes:
      config: Settings of the run.
      states: Holds the log and the states of a run that goes on.
      saved: The state to resume from; None to start from the beginning.
      going_on: Says which that is.
      model: Sizes of the model.
      initial: Weights to start from; None for a new model.
      gets_exits: Whether a model that had none gets norms or heads of its exits.
      best_by: What decides the best weights: the loss, or a metric by its full name.
      score: That metric; None if the loss decides.
      generation: What is kept of the `generation_config.json` that the model came with.
    """

    config: TrainingConfig
    states: StateFolder
    saved: SavedState | None
    going_on: str
    model: ModelConfig
    initial: Arrays | None
    gets_exits: bool
    best_by: str
    score: GenerationScore | None
    generation: GenerationFacts


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedClassifier(Prepared):
    """The training of an exit classifier.

    Attributes:
      config: Settings of the run.
      checkpoint: The model, which stays as it is.
    """

    config: ClassifierConfig
    checkpoint: Checkpoint


def prepare_training(request: TrainRequest, *, folder: str) -> PreparedTraining:
    """Returns the training of a model, of which nothing has been written but the vocabulary of a new one.

    Args:
      request: What is asked for.
      folder: Takes that vocabulary.

    Raises:
      UsageError: If anything is wrong.
    """
    best_by = _best_by(request)
    output, config = _checked_output(request), request.training_config()
    # Next to the output: on the same disk, and never mistaken for a part of the model.
    states = StateFolder(output.with_name(f"{output.name}.training"))
    saved, going_on = _saved_state(request, states)
    checkpoint = None if request.named_model is None else load_model(request.named_model, declared(request))
    begun = request.new_model() if checkpoint is None else checkpoint.config
    model, initial = with_exits(request, begun, None if checkpoint is None else checkpoint.arrays)
    if request.dropout is None:
        config = dataclasses.replace(config, dropout_rate=architecture_of(model).usual_dropout)
    rows, validation_rows = _rows(request)
    if checkpoint is None:
        path = pathlib.Path(folder, NEW_MODELS[request.architecture].vocabulary)
        write_vocabulary(rows, request.task_prefix, path=path, vocab_size=model.vocab_size)
    else:
        assert checkpoint.vocabulary_path is not None
        path = checkpoint.vocabulary_path
    learning = _learning(request, model, path=path, rows=rows, validation_rows=validation_rows, config=config)
    own, after = ((each.exit_norms, each.exit_heads) for each in (begun, model))
    prepared = PreparedTraining(
        **learning,
        output=output,
        config=config,
        states=states,
        saved=saved,
        going_on=going_on,
        model=model,
        initial=initial,
        gets_exits=checkpoint is not None and own != after,
        best_by=best_by,
        score=None,
        generation=GenerationFacts() if checkpoint is None else checkpoint.generation,
    )
    if best_by == LOSS:
        return prepared
    return dataclasses.replace(prepared, score=_score(prepared, validation_rows))


def prepare_classifier(request: TrainRequest) -> PreparedClassifier:
    """Returns the training of an exit classifier, of which nothing has been written.

    Raises:
      UsageError: If anything is wrong.
    """
    config, output = request.classifier_config(), _checked_output(request)
    assert request.named_model is not None, "the request has one"
    checkpoint = load_model(request.named_model, declared(request))
    path, model = checkpoint.vocabulary_path, checkpoint.config
    assert path is not None
    _check_dtype(checkpoint.arrays, request.stored_dtype)
    rows, validation_rows = _rows(request)
    learning = _learning(request, model, path=path, rows=rows, validation_rows=validation_rows, config=config)
    return PreparedClassifier(**learning, output=output, config=config, checkpoint=checkpoint)


def _learning(
    request: TrainRequest,
    model: ModelConfig,
    *,
    path: pathlib.Path,
    rows: Sequence[Example],
    validation_rows: Sequence[Example],
    config: TrainingConfig | ClassifierConfig,
) -> dict[str, Any]:
    """Returns what both stages learn from, as fields of `Prepared`."""
    vocabulary = open_vocabulary(path, model, request=request)
    if vocabulary.chat is not None and any(row.earlier is not None for row in (*rows, *validation_rows)):
        try:
            check_turns(vocabulary.chat)
        except VocabularyError as error:
            raise UsageError(str(error)) from error
    learned, measured = encoded_pairs(
        request.task_prefix,
        vocabulary,
        rows=rows,
        validation_rows=validation_rows,
        max_input_length=config.max_input_length,
        vocab_size=model.vocab_size,
    )
    return {
        "request": request,
        "vocabulary": vocabulary,
        "vocabulary_path": path,
        "learned": learned,
        "measured": measured,
        "end_id": end_of_targets(vocabulary, model),
    }


def _score(run: PreparedTraining, rows: Sequence[Example]) -> GenerationScore:
    """Returns the metric that decides the best weights, on some of the rows to validate on."""
    chosen = slice(run.request.best_by_rows)
    return GenerationScore(
        run.best_by,
        run.model,
        config=run.config,
        prompts=[prompt for prompt, _ in run.measured.pairs[chosen]],
        references=[row.references for row in rows[chosen]],
        decode=run.vocabulary.decode,
        metric_settings=metric_settings(run.request),
    )


def _best_by(request: TrainRequest) -> str:
    """Returns what decides the best weights: the loss, or the full name of a metric, which was tried."""
    if request.best_by == LOSS:
        return LOSS
    try:
        (name,) = checked_metrics([request.best_by], metric_settings(request))
    except ValueError as error:
        raise UsageError(f'--best_by is "loss" or a metric; {error}') from error
    return name


def _checked_output(request: TrainRequest) -> pathlib.Path:
    """Returns the output folder, which is not a file, and holds only files that may stay next to the model."""
    output = pathlib.Path(request.output).resolve()
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output={request.output}: is a file, expected a folder or nothing.")
    if output.is_dir() and any(output.iterdir()) and not request.overwrite:
        raise UsageError(f"--output={request.output}: is not empty. Name another folder, or pass --overwrite.")
    return output


def _saved_state(request: TrainRequest, states: StateFolder) -> tuple[SavedState | None, str]:
    """Returns the state to resume from, or None to start from the beginning; and a message to print once it fits."""
    refuse_links(states.path, inside=states.path.parent)
    steps = states.steps()
    if not request.resume:
        if steps and not request.overwrite:
            raise UsageError(
                f"--output={os.fspath(request.output)}: an interrupted run of it left states in {states.path}. Pass "
                "--resume to go on with it, or --overwrite to start again."
            )
        return None, ""
    if not steps:
        raise UsageError(f"--resume: there is no state of an interrupted run in {states.path}. Leave it out to start.")
    saved = states.load()
    unread = "" if saved.step == steps[-1] else f" (the newer state, of step {steps[-1]}, cannot be read)"
    return saved, f"Going on after step {saved.step}{unread}."


def _rows(request: TrainRequest) -> tuple[list[Example], Sequence[Example]]:
    """Returns the rows to learn from, and those to measure on, which may be none."""
    reading, validation = request.reading(), request.validation_patterns
    rows = read_rows("--data", request.patterns or (), reading=reading)
    return rows, [] if validation is None else read_rows("--validation_data", validation, reading=reading)


def _check_dtype(arrays: Arrays, dtype: str) -> None:
    """Refuses a type of storage that would change the model."""
    for name, array in arrays.items():
        for values in pieces(array):
            with np.errstate(over="ignore"):
                stored = values.astype(dtype)
            if not name.startswith("decoder/meta_cls/") and not np.array_equal(values, stored):
                raise UsageError(
                    f"--stored_dtype={dtype}: would change {name}, and an exit classifier leaves the model as it is. "
                    "Use float32."
                )
