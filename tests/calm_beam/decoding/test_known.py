"""Decoding that continues from a known output at a higher threshold."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from calm_beam.decoding.branches import EndsOutput, KnownOutput, PromptResult, Request, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.exits.rule import ExitRule
from tests.builders import build_checkpoint

_GRID = (0.95, 0.8, 0.6, 0.45, 0.3, 0.1, 0.0)
_CHECKPOINT = build_checkpoint()


def _prompts(count: int) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(8)
    return [tuple(generator.integers(2, 64, generator.integers(2, 12)).tolist()) for _ in range(count)]


def _known(result: PromptResult) -> KnownOutput:
    length = result.lengths[-1]
    assert result.max_rejected_confidence is not None
    return KnownOutput(
        tokens=result.tokens[-1, :length],
        exit_layers=result.exit_layers[-1, :length],
        confidences=result.confidences[-1, :length],
        max_rejected_confidence=result.max_rejected_confidence[-1, :length],
    )


def _requests(prompts: Sequence[Sequence[int]], known: Sequence[KnownOutput] | None) -> list[Request]:
    return [Request(prompt, known=None if known is None else known[index]) for index, prompt in enumerate(prompts)]


def _decoder(rule: ExitRule, thresholds: tuple[float, ...], *, with_full_model: bool = True, **options: Any) -> Decoder:
    return Decoder(
        _CHECKPOINT,
        sweep_branches(rule, thresholds, max_decode_length=10, with_full_model=with_full_model),
        batch_size=8,
        **options,
    )


def _ends_output(tokens: Sequence[int]) -> bool:
    return sum(tokens[-2:]) % 4 == 0


@pytest.mark.parametrize("ends_output", [None, _ends_output])
@pytest.mark.parametrize(
    "rule",
    [
        ExitRule(),
        ExitRule(confidence="state", state_propagation="from_first_exit", min_exit_layer=2),
        ExitRule(confidence="classifier", state_propagation="projected", schedule="decay", tau=4.0),
        ExitRule(confidence="static", exit_interval=2),
    ],
    ids=lambda rule: f"{rule.confidence}-{rule.state_propagation}-{rule.schedule}",
)
def test_blocks_give_the_outputs_of_the_whole_grid(rule: ExitRule, ends_output: EndsOutput | None) -> None:
    """Decoding the grid in blocks, each from the last output of the block above, changes no output."""
    prompts = _prompts(9)
    whole = dict(_decoder(rule, _GRID, ends_output=ends_output).decode(prompts))
    known = None
    for start, end in ((0, 2), (2, 3), (3, 7)):
        chosen = [*([0] if start == 0 else []), *range(1 + start, 1 + end)]
        block = _decoder(rule, _GRID[start:end], with_full_model=start == 0, ends_output=ends_output)
        results = dict(block.decode(_requests(prompts, known)))
        for index, result in results.items():
            expected = whole[index]
            np.testing.assert_array_equal(result.tokens, expected.tokens[chosen])
            np.testing.assert_array_equal(result.exit_layers, expected.exit_layers[chosen])
            np.testing.assert_array_equal(result.lengths, expected.lengths[chosen])
            np.testing.assert_allclose(result.confidences, expected.confidences[chosen], atol=1e-5)
        known = [_known(results[index]) for index in range(len(prompts))]


def test_what_is_known_is_not_decided_again() -> None:
    """From a known output a block computes fewer head projections than without; an output shared whole takes none."""
    prompts = _prompts(9)
    above = dict(_decoder(ExitRule(), _GRID[:4]).decode(prompts))
    known = [_known(above[index]) for index in range(len(prompts))]
    costs = []
    for given in (None, known):
        decoder = _decoder(ExitRule(), _GRID[4:], with_full_model=False)
        list(decoder.decode(_requests(prompts, given)))
        costs.append(decoder.work.projection_rows)
    assert costs[1] < costs[0]
    certain = [
        dataclasses.replace(output, max_rejected_confidence=np.full_like(output.max_rejected_confidence, -1))
        for output in known
    ]
    decoder = _decoder(ExitRule(), _GRID[4:], with_full_model=False)
    results = dict(decoder.decode(_requests(prompts, certain)))
    assert decoder.work.layer_rows == 0
    for index, result in results.items():
        for place in range(3):
            np.testing.assert_array_equal(result.tokens[place], above[index].tokens[-1])


def test_steps_are_shared_until_a_layer_below_would_exit() -> None:
    """A branch parts at the first step whose runner-up reaches its threshold, equality included."""
    output = KnownOutput(
        tokens=np.array([5, 6, 1], np.int32),
        exit_layers=np.array([3, 4, 2], np.int32),
        confidences=np.array([0.9, 0.9, 0.95], np.float32),
        max_rejected_confidence=np.array([0.2, 0.5, -np.inf], np.float32),
    )
    thresholds = np.tile(np.array([0.6, 0.5, 0.3, 0.2, 0.0], np.float32), (4, 1))
    np.testing.assert_array_equal(output.steps_shared(thresholds), [3, 1, 1, 0, 0])
