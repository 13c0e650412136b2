"""What `train` reads: a model, rows, and the vocabulary that turns them into token ids."""

import pathlib
from collections.abc import Sequence

from calm_beam.checkpoints import Checkpoint, CheckpointError, Declared, load_checkpoint
from calm_beam.examples import DataError, Example
from calm_beam.inputs import AS_USUAL, Reading, place_of, read_examples
from calm_beam.launch.flags import UsageError
from calm_beam.launch.flags.data import find_files
from calm_beam.model import T5Config, architecture_of
from calm_beam.training.batches import Pair
from calm_beam.training.vocabulary import train_vocabulary
from calm_beam.vocabulary import Vocabulary, VocabularyError
from calm_beam.vocabulary import open_vocabulary as with_its_sentinels

_NOTHING = Declared()


def load_model(path: str, declared: Declared = _NOTHING) -> Checkpoint:
    """Returns the model of `--checkpoint`, of which the user has declared what its files do not say.

    Raises:
      UsageError: If it cannot be read, is not of a kind that can be trained, or comes without its vocabulary.
    """
    try:
        checkpoint = load_checkpoint(path, declared=declared)
    except (CheckpointError, OSError) as error:
        raise UsageError(f"--checkpoint: {error}") from error
    architecture_of(checkpoint.config).check_teaching()
    if checkpoint.vocabulary_path is None:
        raise UsageError(f"--checkpoint={path}: has no vocabulary. Put its sentencepiece.model beside it.")
    return checkpoint


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


def open_vocabulary(path: pathlib.Path, model: T5Config) -> Vocabulary:
    """Returns the vocabulary of a model.

    Raises:
      UsageError: If it cannot be read, or has more ids than the model.
    """
    try:
        vocabulary = with_its_sentinels(path)
    except VocabularyError as error:
        raise UsageError(str(error)) from error
    if vocabulary.size > model.vocab_size:
        raise UsageError(
            f"vocabulary {path}: has {vocabulary.size} ids, the model only {model.vocab_size}. "
            "They do not belong together."
        )
    return vocabulary


def training_pairs(vocabulary: Vocabulary, task_prefix: str, *, rows: Sequence[Example]) -> list[Pair]:
    """Returns source and target ids, without eos, of every row and each of its references."""
    return [pair for row in rows for pair in _pairs(vocabulary, task_prefix, row=row, targets=row.references)]


def validation_pairs(vocabulary: Vocabulary, task_prefix: str, *, rows: Sequence[Example]) -> list[Pair]:
    """Returns source and target ids, without eos, of every row and its first reference."""
    return [pair for row in rows for pair in _pairs(vocabulary, task_prefix, row=row, targets=row.references[:1])]


def _pairs(vocabulary: Vocabulary, task_prefix: str, *, row: Example, targets: Sequence[str]) -> list[Pair]:
    source = vocabulary.encode(f"{task_prefix}{row.input}")
    return [(source, vocabulary.encode(target)) for target in targets]
