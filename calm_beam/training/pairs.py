"""Pairs of a prompt and a target that a model learns from, as decoding sees prompts."""

import dataclasses
from collections.abc import Sequence

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import DataError, Example
from calm_beam.inputs.prompts import encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.model import ModelConfig

from .batches import Pair


def end_of_targets(vocabulary: Vocabulary, model: ModelConfig) -> int:
    """Returns the id that ends what the model learns to write: the vocabulary's own, if it ends the model's outputs."""
    return next((index for index in vocabulary.end_ids if index in model.end_ids), model.end_ids[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedPairs:
    """Prompts as decoding sees them, targets without their end, and how many prompts were cut for that."""

    pairs: list[Pair]
    cut: int


def encoded_pairs(
    task_prefix: str,
    vocabulary: Vocabulary,
    *,
    rows: Sequence[Example],
    validation_rows: Sequence[Example],
    max_input_length: int,
    vocab_size: int,
) -> tuple[EncodedPairs, EncodedPairs]:
    """Returns pairs to learn from, a row with each of its references, and pairs to measure on, with its first alone.

    Args:
      task_prefix: Stands before every input.
      vocabulary: Turns texts into ids.
      rows: Of `read_rows`.
      validation_rows: Likewise; may be none.
      max_input_length: Most ids of a prompt.
      vocab_size: Ids that the model knows.

    Raises:
      UsageError: If a prompt cannot be made, or is too long and cannot be cut; names its row.
    """
    settings = DecodeSettings(
        # Of these, only what makes a prompt is used.
        rule=ExitRule(),
        thresholds=(1.0,),
        max_decode_length=1,
        max_input_length=max_input_length,
        task_prefix=task_prefix,
    )

    def encoded(examples: Sequence[Example], references: slice) -> EncodedPairs:
        pairs: list[Pair] = []
        cut = 0
        for row in examples:
            try:
                prompt = encode_prompt(row, vocabulary, settings=settings, vocab_size=vocab_size, on_long="truncate")
            except DataError as error:
                raise UsageError(str(error)) from error
            pairs += [(prompt.ids, vocabulary.encode(reference)) for reference in row.references[references]]
            cut += prompt.truncated * len(row.references[references])
        return EncodedPairs(pairs=pairs, cut=cut)

    return encoded(rows, slice(None)), encoded(validation_rows, slice(1))
