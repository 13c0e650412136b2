"""Exit rules: accepted values, and the layers at which tokens may exit."""

from typing import Any

import pytest

from calm_beam.exits.measures import MEASURES
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.exits.rule import TOKEN_SOURCES, ExitRule
from calm_beam.exits.schedules import SCHEDULES
from tests.builders import build_rule


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"confidence": "softmx"},
            "confidence must be one of softmax, softmax_max, state, classifier, entropy, patience, oracle, static; got "
            "'softmx'",
        ),
        ({"schedule": "linear"}, "schedule must be one of constant, decay, decay_t5x; got 'linear'"),
        (
            {"state_propagation": "x"},
            "state_propagation must be one of from_exit, from_first_exit, full_cache, projected; got 'x'",
        ),
        ({"patience": 2}, "patience must not be given with confidence 'softmax', got 2"),
        ({"confidence": "patience"}, "'patience' needs a patience of at least 1, .*; got None"),
        ({"confidence": "patience", "patience": 0}, "'patience' needs a patience of at least 1, .*; got 0"),
        ({"confidence_source": "sha256:0"}, "confidence_source must not be given with confidence 'softmax'"),
        ({"token_from": "x"}, "token_from must be one of exit_layer, last_layer; got 'x'"),
        (
            {"confidence": "oracle", "schedule": "decay", "tau": 4.0},
            "schedule must be constant with confidence 'oracle', .* got 'decay'",
        ),
        ({"confidence": "static", "schedule": "decay_t5x", "tau": 4.0}, "schedule must be constant with .*'static'"),
        ({"tau": 4.0}, r"tau must not be given with schedule 'constant', got 4\.0"),
        ({"schedule": "decay"}, "schedule 'decay' needs a finite tau of at least 0, got None"),
        ({"schedule": "decay_t5x", "tau": -1.0}, r"schedule 'decay_t5x' needs a finite tau of at least 0, got -1\.0"),
        ({"schedule": "decay", "tau": float("nan")}, "needs a finite tau of at least 0, got nan"),
        ({"schedule": "decay", "tau": float("inf")}, "needs a finite tau of at least 0, got inf"),
        ({"min_exit_layer": 0}, "min_exit_layer must be at least 1, got 0"),
        ({"exit_interval": -2}, "exit_interval must be at least 1, got -2"),
    ],
)
def test_bad_rules_are_refused(changes: dict[str, Any], message: str) -> None:
    """Every wrong field is named, with its value."""
    with pytest.raises(ValueError, match=message):
        ExitRule(**changes)


def test_every_named_choice_is_accepted() -> None:
    """All listed confidences, schedules, propagations and token sources make rules."""
    for confidence in MEASURES:
        for schedule in SCHEDULES:
            for propagation in PROPAGATIONS:
                if schedule != "constant" and confidence in ("oracle", "static"):
                    continue
                for source in TOKEN_SOURCES:
                    build_rule(
                        confidence,
                        schedule=schedule,
                        tau=None if schedule == "constant" else 2.0,
                        state_propagation=propagation,
                        token_from=source,
                    )


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (ExitRule(), False),
        (ExitRule(confidence="static", state_propagation="projected"), False),
        (ExitRule(confidence="oracle"), True),
        (ExitRule(state_propagation="full_cache"), True),
        (ExitRule(token_from="last_layer"), True),
    ],
)
def test_rules_that_save_nothing_say_so(rule: ExitRule, expected: bool) -> None:
    """A rule that looks at the last layer for every token needs the full model."""
    assert rule.needs_full_model() is expected


@pytest.mark.parametrize("minimum", range(1, 9))
@pytest.mark.parametrize("interval", range(1, 10))
def test_exit_layers_start_at_the_minimum_and_end_at_the_top(minimum: int, interval: int) -> None:
    """Layers are the minimum, then every interval-th, and always the last; ascending, each once."""
    layers = ExitRule(min_exit_layer=minimum, exit_interval=interval).exit_layers(8)
    expected = [*range(minimum, 8, interval), 8]
    assert list(layers) == expected


def test_a_minimum_above_the_decoder_is_refused() -> None:
    """A rule for which the decoder is too shallow is refused with both numbers."""
    with pytest.raises(ValueError, match="min_exit_layer must be at most 4, the decoder's depth; got 5"):
        ExitRule(min_exit_layer=5).exit_layers(4)
