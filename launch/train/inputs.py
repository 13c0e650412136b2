"""What `train` reads: a model, rows, and the vocabulary that turns them into token ids."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, cast

from calm_beam.checkpoints import Arrays, Checkpoint, CheckpointError, Declared, load_checkpoint
from calm_beam.errors import UsageError
from calm_beam.inputs import AS_USUAL, Reading, place_of, read_examples
from calm_beam.inputs.examples import DataError, Example
from calm_beam.inputs.vocabularies.chat import chosen_chat
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, VocabularyError
from calm_beam.inputs.vocabularies.vocabulary import open_vocabulary as with_its_sentinels
from calm_beam.launch.flags.data import find_files
from calm_beam.model import ModelConfig
from calm_beam.training.own_exits import with_own_exits
from calm_beam.training.vocabulary import train_vocabulary

from .request import TrainRequest

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
            f"--checkpoint={path}: has no vocabulary. Put its sentencepiece.model or tokenizer.json beside it."
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
                    raise DataError(f"{place}: training needs input as text, and references.")
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
