"""The examples on the page, and what is counted over all that were looked at."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from calm_beam.outputs import Generation
from calm_beam.text.printable import printable, printable_line
from calm_beam.vocabularies.vocabulary import EOS_ID, Vocabulary

from .exit_counts import ExitCounts, count_exits
from .foreign import with_short_places
from .packing import Dictionary, pack_outputs
from .stored import StoredOutputs

# Longer ones are cut, which the page says of each.
_LONGEST_TEXT = 2_000
_MOST_REFERENCES = 5
_MOST_COLUMNS = 64


def example_values(
    generation: Generation, lanes: Sequence[int], *, dictionary: Dictionary, vocabulary: Vocabulary | None
) -> dict[str, Any]:
    """Returns one example as JSON values.

    Args:
      generation: The example with its outputs.
      lanes: Which of the outputs to show, the full model's being 0.
      dictionary: Takes up the tokens.
      vocabulary: For prompts that were given as token ids; None shows the ids.
    """
    example = generation.example
    prompt = example.input
    if prompt is None:
        ids = example.input_ids or ()
        prompt = vocabulary.decode(ids) if vocabulary else " ".join(map(str, ids))
    values: dict[str, Any] = {
        "id": printable_line(_cut(example.id)),
        "prompt": printable(_cut(prompt)),
        "references": [printable(_cut(reference)) for reference in example.references[:_MOST_REFERENCES]],
    }
    marks = [
        name for name, holds in (("prompt cut", generation.truncated), ("repeated", generation.duplicate)) if holds
    ]
    if marks:
        values["marks"] = marks
    if generation.failure is not None:
        values["failure"] = printable(with_short_places(_cut(generation.failure)))
    else:
        values["outputs"] = pack_outputs([generation.outputs[lane] for lane in lanes], dictionary)
    return values


def pieces_of(tokens: Iterable[int], vocabulary: Vocabulary | None) -> list[str]:
    """Returns the pieces of tokens, ▁ standing for a space; without a vocabulary their ids, each after a space.

    The end of an output is written as an empty piece.
    """
    if vocabulary is None:
        return ["" if token == EOS_ID else f"▁{token}" for token in tokens]
    return ["" if token in vocabulary.end_ids else printable(vocabulary.piece(token)) for token in tokens]


def counted_exits(stored: StoredOutputs, lanes: Sequence[int], *, num_layers: int) -> dict[str, Any]:
    """Returns exit layers by position as JSON values.

    Args:
      stored: The generations.
      lanes: Which outputs, the full model's being 0.
      num_layers: Decoder depth.

    Returns:
      `width`, the positions that stand in one column; `tokens`, for each lane and column the tokens of every layer;
      `cut`, for each lane the outputs cut at the `longest` length; and `outputs`, the examples that have some.
    """
    counts = ExitCounts.zero(lanes=len(lanes), num_layers=num_layers)
    for path in stored.paths:
        counts = counts.merge(
            count_exits(
                path,
                lanes,
                num_layers=num_layers,
                max_decode_length=stored.job.settings.max_decode_length,
                end_ids=stored.job.end_ids,
            )
        )
    width = max(1, -(-counts.tokens.shape[1] // _MOST_COLUMNS))
    return {
        "width": width,
        "tokens": _in_columns(counts.tokens, width).tolist(),
        "cut": counts.cut.tolist(),
        "longest": stored.job.settings.max_decode_length,
        "outputs": counts.outputs,
    }


def _in_columns(tokens: np.ndarray, width: int) -> np.ndarray:
    """Returns the counts of so many positions together."""
    lanes, positions, layers = tokens.shape
    padded = np.pad(tokens, ((0, 0), (0, -positions % width), (0, 0)))
    sums: np.ndarray = padded.reshape(lanes, -1, width, layers).sum(axis=2)
    return sums


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
