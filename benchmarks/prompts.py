"""Reading prompts for a benchmark."""

import itertools

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.inputs.examples import parse_examples
from calm_beam.inputs.prompts import encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary


def read_prompts(path: str, checkpoint: Checkpoint, *, settings: DecodeSettings, count: int) -> list[tuple[int, ...]]:
    """Returns the token ids of the first `count` prompts of a JSONL file."""
    vocabulary = Vocabulary(checkpoint.vocabulary_path) if checkpoint.vocabulary_path else None
    with open(path, "rb") as raw:
        examples = list(itertools.islice(parse_examples(raw, path=path), count))
    vocab_size = checkpoint.config.vocab_size
    return [
        encode_prompt(example, vocabulary, settings=settings, vocab_size=vocab_size, on_long="truncate").ids
        for example in examples
    ]
