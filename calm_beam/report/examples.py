"""The examples on the page: texts, and the outputs of a prompt at all thresholds, packed as short JSON.

Neighbouring thresholds share most of an output. So an output is written as two splices of its neighbour's: of the
tokens, and of the exits. A splice names how much of the beginning and of the end stays, and what stands in between.
`report.js` has the reader; `tests/calm_beam/report/unpacking.py` is its twin.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, Vocabulary
from calm_beam.outputs import Generation, Output
from calm_beam.text import printable, printable_line, shortened

from .elements import with_short_places

# Longer ones are cut, which the page says of each.
_LONGEST_TEXT = 2_000
_MOST_REFERENCES = 5
# Layers are written by one character: of these, and beyond them by code points from _MORE_LAYERS on.
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
_MORE_LAYERS = 0x100


class Dictionary:
    """Token ids in the order in which they first occur; what is stored of a token is its index here."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def index(self, token: int) -> int:
        """Returns the index of a token, the next free one if it is new."""
        return self._places.setdefault(token, len(self._places))

    def tokens(self) -> tuple[int, ...]:
        """Returns all tokens by index."""
        return tuple(self._places)


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
        "id": printable_line(shortened(example.id, _LONGEST_TEXT)),
        "prompt": printable(shortened(prompt, _LONGEST_TEXT)),
        "references": [
            printable(shortened(reference, _LONGEST_TEXT)) for reference in example.references[:_MOST_REFERENCES]
        ],
    }
    marks = [
        name for name, holds in (("prompt cut", generation.truncated), ("repeated", generation.duplicate)) if holds
    ]
    if marks:
        values["marks"] = marks
    if generation.failure is not None:
        values["failure"] = printable(with_short_places(shortened(generation.failure, _LONGEST_TEXT)))
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


def pack_outputs(outputs: Sequence[Output], dictionary: Dictionary) -> list[Any]:
    """Returns outputs as JSON values, each as the difference to the one before, the first to an empty one.

    Args:
      outputs: The full model's, then one per threshold.
      dictionary: Takes up the tokens.

    Returns:
      For each output 0 if it equals the one before, else `[tokens, exits]`: `tokens` is 0 or [kept at the beginning,
      kept at the end, list of indices between]; `exits` is 0 or [kept at the beginning, kept at the end, text between],
      three characters a token: its layer, then its confidence in thousandths, 1000 added, rounded down.
    """
    packed: list[Any] = []
    tokens: list[int] = []
    exits: list[str] = []
    for output in outputs:
        next_tokens = [dictionary.index(token) for token in output.tokens]
        next_exits = [
            _layer_digit(layer) + _confidence_digits(confidence)
            for layer, confidence in zip(output.exit_layers, output.confidences, strict=True)
        ]
        of_tokens = _splice(tokens, next_tokens)
        of_exits = _splice(exits, next_exits)
        if of_exits != 0:
            of_exits[2] = "".join(of_exits[2])
        packed.append([of_tokens, of_exits] if of_tokens != 0 or of_exits != 0 else 0)
        tokens, exits = next_tokens, next_exits
    return packed


def _splice(before: Sequence[Any], after: Sequence[Any]) -> Any:
    """Returns how much of the beginning and of the end stays, and what comes between; 0 if all stays."""
    if before == after:
        return 0
    most = min(len(before), len(after))
    head = next((index for index in range(most) if before[index] != after[index]), most)
    most -= head
    tail = next((index for index in range(most) if before[-1 - index] != after[-1 - index]), most)
    return [head, tail, list(after[head : len(after) - tail])]


def _layer_digit(layer: int) -> str:
    return _DIGITS[layer] if layer < len(_DIGITS) else chr(_MORE_LAYERS + layer)


def _confidence_digits(confidence: float) -> str:
    # Down, so that what is shown never reaches a threshold that was missed; the little that is added is what a
    # threshold such as 0.95 loses as a float32.
    thousandths = math.floor(1000 * min(max(confidence, -1.0), 1.0) + 1e-3) + 1000
    high, low = divmod(thousandths, len(_DIGITS))
    return _DIGITS[high] + _DIGITS[low]
