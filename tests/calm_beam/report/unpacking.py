"""Reads packed outputs as the page's script does."""

from collections.abc import Sequence
from typing import Any

from calm_beam.report.examples import _DIGITS, _MORE_LAYERS

Unpacked = tuple[list[int], list[int], list[float]]


def unpack_outputs(packed: Sequence[Any], tokens: Sequence[int]) -> list[Unpacked]:
    """Returns token ids, exit layers and confidences of every output.

    Args:
      packed: Result of `pack_outputs`.
      tokens: Tokens of the dictionary, by place.
    """
    places: list[int] = []
    exits: list[str] = []
    outputs = []
    for change in packed:
        if change != 0:
            of_tokens, of_exits = change
            if of_tokens != 0:
                places = _spliced(places, *of_tokens)
            if of_exits != 0:
                head, tail, text = of_exits
                exits = _spliced(exits, head, tail, [text[start : start + 3] for start in range(0, len(text), 3)])
        outputs.append(
            (
                [tokens[place] for place in places],
                [_layer(exit_[0]) for exit_ in exits],
                [(64 * _DIGITS.index(exit_[1]) + _DIGITS.index(exit_[2]) - 1000) / 1000 for exit_ in exits],
            )
        )
    return outputs


def _layer(digit: str) -> int:
    return _DIGITS.index(digit) if digit in _DIGITS else ord(digit) - _MORE_LAYERS


def _spliced(before: list[Any], head: int, tail: int, between: list[Any]) -> list[Any]:
    return [*before[:head], *between, *before[len(before) - tail :]]
