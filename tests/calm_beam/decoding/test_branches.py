"""Branches of several rules in one sweep have the outputs of a sweep for each rule."""

import numpy as np
import pytest

from calm_beam.decoding.branches import Branch, PromptResult, Request, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.exits.rule import ExitRule
from calm_beam.model.native import library
from tests.builders import build_checkpoint, build_config, build_prompts, build_rule
from tests.calm_beam.decoding.decoders import STEPS, in_order
from tests.calm_beam.exits.measures import own_measures
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("strict_promotion")

_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=4, exit_classifier=2)
_PROMPTS = build_prompts(4, 9, 1, 30, 6, 2, 13)
_THRESHOLDS = (1.0, 0.93, 0.7, 0.5, 0.3, 0.0)
_MODULE = own_measures.__name__

_SETS = {
    "measures": [ExitRule(confidence=name) for name in ("softmax", "state", "classifier", "static")],
    "exit layers": [
        ExitRule(),
        ExitRule(min_exit_layer=2),
        ExitRule(exit_interval=2),
        ExitRule(confidence="state", min_exit_layer=3),
    ],
    "several of logits": [
        ExitRule(),
        ExitRule(confidence="softmax_max"),
        build_rule("entropy", exit_interval=2),
    ],
    "of the user's": [
        ExitRule(),
        ExitRule(confidence=f"{_MODULE}:MARGIN"),
        ExitRule(confidence=f"{_MODULE}:small_change"),
        ExitRule(confidence=f"{_MODULE}:SCORE", exit_interval=2),
    ],
    "schedules and patience": [
        ExitRule(schedule="decay", tau=4.0),
        ExitRule(schedule="decay", tau=1.0),
        build_rule("patience"),
        build_rule("patience", patience=3, exit_interval=2),
        ExitRule(confidence="state"),
    ],
    "copied keys": [
        ExitRule(state_propagation="projected"),
        ExitRule(confidence="classifier", state_propagation="projected", min_exit_layer=2),
    ],
    "first states": [
        ExitRule(state_propagation="from_first_exit"),
        ExitRule(confidence="state", state_propagation="from_first_exit", exit_interval=3),
    ],
}


def _decode(rules: list[ExitRule]) -> tuple[list[list[PromptResult]], int]:
    """Returns the outputs of every rule for every prompt, and the number of layer rows that were run."""
    decoder = Decoder(
        build_checkpoint(_CONFIG),
        sweep_branches(rules, _THRESHOLDS, max_decode_length=STEPS),
        max_input_length=64,
        batch_size=3,
    )
    results = in_order(decoder.decode(_PROMPTS), len(_PROMPTS))
    return [list(each) for each in zip(*(result.by_rule(len(rules)) for result in results), strict=True)], (
        decoder.work.layer_rows
    )


@pytest.mark.parametrize(
    ("name", "engine"),
    [*((name, "native") for name in _SETS), *sampled([(name, "xla") for name in _SETS], keep=(0, 4, 5))],
)
def test_every_rule_has_the_outputs_of_its_own_sweep(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule, and the full model, has the outputs of its own sweep, with less work than in separate sweeps.

    Outputs are tokens, exits, lengths and confidences.
    """
    if engine == "xla":
        monkeypatch.setenv(library.VARIABLE, "none")
    elif not library.is_available():
        pytest.skip("there is no native code here")
    rules = _SETS[name]
    together, work = _decode(rules)
    apart = [_decode([rule]) for rule in rules]
    for found, ((expected,), _) in zip(together, apart, strict=True):
        for one, other in zip(found, expected, strict=True):
            for field in ("tokens", "exit_layers", "lengths", "is_finite"):
                np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
            near = 0 if engine == "native" else 1e-6
            np.testing.assert_allclose(one.confidences, other.confidences, rtol=0, atol=near)
            # An upper bound: other rules' branches test layers that the full model's alone do not.
            assert one.max_rejected_confidence is not None
            assert other.max_rejected_confidence is not None
            assert (one.max_rejected_confidence >= other.max_rejected_confidence - 1e-6).all()
            assert one.near_ties == (other.near_ties or (None,) * len(one.lengths))
    assert len({layer for of_rule in together for one in of_rule for layer in one.exit_layers.ravel().tolist()}) > 3
    assert work < 0.95 * sum(rows for _, rows in apart)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            [ExitRule(), ExitRule(state_propagation="projected")],
            "rules of one sweep must have one state_propagation, got from_exit, projected. Sweep them one after",
        ),
        (
            [
                ExitRule(state_propagation="from_first_exit"),
                ExitRule(state_propagation="from_first_exit", min_exit_layer=2),
            ],
            r"with state_propagation 'from_first_exit' must have one first exit layer, got \[1, 2\]",
        ),
        (
            [ExitRule(), ExitRule(confidence="oracle")],
            "a rule with confidence 'oracle' needs every layer for every token, and must be swept by itself",
        ),
        (
            [ExitRule(), ExitRule(min_exit_layer=5)],
            "min_exit_layer must be at most 4, the decoder's depth; got 5",
        ),
        (
            [ExitRule(confidence="state"), ExitRule(confidence=f"{_MODULE}:largest_logit")],
            "own_measures:largest_logit' takes all logits of a row, and must be swept by itself",
        ),
    ],
    ids=["propagations", "first exits", "oracle", "depth", "all logits"],
)
def test_rules_that_cannot_share_a_sweep_are_refused(rules: list[ExitRule], message: str) -> None:
    """Rules share a sweep only if every rule fits the model and KV of skipped layers depends on exit layers alone."""
    with pytest.raises(ValueError, match=message):
        _decode(rules)


@pytest.mark.parametrize(
    "branches",
    [
        [],
        [Branch.at(ExitRule(), 0.5, max_decode_length=STEPS)] * 2,
        [Branch.at(build_rule("state"), 0.5, max_decode_length=STEPS)],
        [Branch.at(ExitRule(), 0.5, max_decode_length=STEPS + 1)],
    ],
    ids=["none", "too many", "another rule", "more steps"],
)
def test_branches_of_a_request_are_those_of_the_decoder(branches: list[Branch]) -> None:
    """A request's branches must be the decoder's but for thresholds; else nothing is decoded, earlier prompts too."""
    decoder = Decoder(build_checkpoint(_CONFIG), [Branch.at(ExitRule(), None, max_decode_length=STEPS)])
    with pytest.raises(ValueError, match=rf"in their order, and as many steps \({STEPS}\)"):
        next(decoder.decode([Request((5, 1)), Request((6, 1), branches=branches)]))
