"""Outputs that depend on a decision within rounding."""

from typing import Any

import numpy as np
import pytest

from calm_beam.decoding.branches import Branches, PromptResult, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.engine_choice import near_ties_of
from calm_beam.exits.rule import ExitRule
from tests.builders import BY_LOGITS, build_checkpoint, build_prompts, build_rule
from tests.instruction_sets import needs_native

_INF = float("inf")


def _near(
    *,
    confidences: list[float],
    max_rejected_confidence: list[float],
    exits: list[int],
    at: float = 0.5,
    rule: Any = None,
) -> bool | None:
    """Returns the near-tie mark of one output of a model of 4 layers."""
    result = PromptResult(
        tokens=np.ones((1, len(exits)), np.int32),
        exit_layers=np.array([exits], np.int32),
        confidences=np.array([confidences], np.float32),
        lengths=np.array([len(exits)], np.int32),
        is_finite=True,
        max_rejected_confidence=np.array([max_rejected_confidence], np.float32),
    )
    thresholds = np.full((len(exits), 1), at, np.float32)
    found = near_ties_of(result, Branches.of([rule or ExitRule()], layers=4), thresholds=thresholds)
    return None if found is None else found[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"confidences": [0.9, 0.500005]}, True),
        ({"confidences": [0.9, 0.50002]}, False),
        ({"max_rejected_confidence": [-_INF, 0.499995]}, True),
        ({"max_rejected_confidence": [-_INF, 0.49998]}, False),
        # At the last layer, nothing is compared.
        ({"confidences": [0.9, 0.5], "exits": [1, 4]}, False),
        # The two best tokens are equally likely, there too.
        ({"confidences": [0.9, 5e-6], "exits": [1, 4]}, True),
        ({"confidences": [0.9, 5e-6], "exits": [1, 4], "at": _INF}, True),
        # Steps after the end do not count.
        ({"confidences": [0.9, 0.0], "exits": [1, 0]}, False),
        # The full model compares nothing, and nothing is below 0.
        ({"max_rejected_confidence": [0.5, 0.5], "at": _INF, "exits": [4, 4]}, False),
        ({"confidences": [0.9, 2e-5], "at": 0.0}, False),
        ({"confidences": [0.9, 5e-6], "exits": [1, 4], "rule": build_rule("entropy")}, False),
        ({"confidences": [0.9, 0.5], "rule": build_rule("state")}, True),
    ],
)
def test_decisions_within_rounding(changes: dict[str, Any], expected: bool) -> None:
    """A confidence near its threshold, at the exit or below, is a near tie; so are two tokens for gap measures."""
    given: dict[str, Any] = {"confidences": [0.9, 0.7], "max_rejected_confidence": [-_INF, 0.2], "exits": [1, 2]}
    assert _near(**{**given, **changes}) is expected


@pytest.mark.parametrize("confidence", ["patience", "static", "oracle"])
def test_what_is_made_of_tokens_tells_nothing(confidence: str) -> None:
    """Shares and numbers of layers are not rounded, and the tokens they count are not compared."""
    rule = build_rule(confidence)
    assert not rule.measure().sees_near_ties
    assert _near(confidences=[0.5], max_rejected_confidence=[0.5], exits=[2], rule=rule) is None


@pytest.mark.parametrize(
    ("engine", "exit_head"),
    [("auto", "exact"), pytest.param("auto", "int8", marks=needs_native), ("xla", "exact")],
)
@pytest.mark.parametrize("confidence", [*BY_LOGITS, "state", "classifier"])
def test_a_threshold_at_a_confidence_is_a_near_tie(engine: str, exit_head: str, confidence: str) -> None:
    """With every engine and head, a threshold equal to a confidence of the output is a near tie, and no other is."""
    checkpoint, rule = build_checkpoint(), build_rule(confidence)
    (prompt,) = build_prompts(5)
    sizes: dict[str, Any] = {"max_input_length": 16, "engine": engine}
    # A confidence at which the first token exits, as an exact head computes it: some head decides by an interval.
    grid = tuple(np.linspace(0.95, 0, 20).tolist())
    branches = sweep_branches(rule, grid, max_decode_length=6)
    ((_, told),) = Decoder(checkpoint, branches, exit_head="exact", **sizes).decode([prompt])
    first, layer = told.confidences[1:, 0], told.exit_layers[1:, 0]
    at = float(first[(layer < checkpoint.config.num_decoder_layers) & (first > 1e-3) & (first < 0.999)][0])
    away = at - 5e-4
    found = []
    for threshold in (at, away):
        branches = sweep_branches(rule, (threshold,), max_decode_length=6)
        ((_, result),) = Decoder(checkpoint, branches, exit_head=exit_head, **sizes).decode([prompt])
        assert result.near_ties is not None
        found.append(bool(result.near_ties[1]))
    assert found == [True, False]


def test_every_decoder_counts_the_same() -> None:
    """The sweep and the batch decoder, one threshold at a time, count the same near ties."""
    checkpoint, rule = build_checkpoint(), ExitRule()
    prompts = build_prompts(3, 7, 5)
    ((_, told), *_) = Decoder(
        checkpoint, sweep_branches(rule, (0.0,), max_decode_length=6), max_input_length=16
    ).decode(prompts[:1])
    grid = (0.9, float(told.confidences[1, 0]), 0.01)
    shared = Decoder(checkpoint, sweep_branches(rule, grid, max_decode_length=6), max_input_length=16)
    expected = {index: result.near_ties for index, result in shared.decode(prompts)}
    assert expected[0] is not None
    assert any(expected[0])
    for place, branch in enumerate(sweep_branches(rule, grid, max_decode_length=6)):
        for index, alone in Decoder(checkpoint, [branch], max_input_length=16).decode(prompts):
            of_sweep = expected[index]
            assert alone.near_ties is not None
            assert of_sweep is not None
            assert alone.near_ties[0] == of_sweep[place], (index, place)


def test_each_rule_tells_its_own() -> None:
    """If rules share a sweep, a rule without near-tie counts has none, and the other has all of its own."""
    rules = (ExitRule(), build_rule("static"))
    branches = sweep_branches(rules, (0.5,), max_decode_length=6)
    ((_, result),) = Decoder(build_checkpoint(), branches, max_input_length=16).decode(build_prompts(5))
    softmax, static = result.by_rule(2)
    assert softmax.near_ties is not None
    assert None not in softmax.near_ties
    assert static.near_ties == (None, None)
