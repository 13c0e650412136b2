"""The cost of a token by its exit layer."""

import pytest

from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost

_COST = TokenCost(layers=8, layer=10.0, skipped=1.0, output=100.0, tests={Need.LOGITS: 50.0, Need.STATES: 3.0})


@pytest.mark.parametrize(
    ("rule", "layer", "expected"),
    [
        # The first test accepts, and gives the token.
        (ExitRule(min_exit_layer=2, exit_interval=2), 2, 100 + 20 + 6),
        (ExitRule(min_exit_layer=2, exit_interval=2), 6, 100 + 60 + 2 + 2 * 50),
        # Three tests have failed, and the last layer is not tested.
        (ExitRule(min_exit_layer=2, exit_interval=2), 8, 100 + 80 + 3 * 50),
        (ExitRule(confidence="state", min_exit_layer=4, exit_interval=2), 4, 100 + 40 + 4 + 3),
        (ExitRule(confidence="state", min_exit_layer=4, exit_interval=2), 8, 100 + 80 + 2 * 3),
        (ExitRule(confidence="static"), 3, 100 + 30 + 5),
    ],
)
def test_a_token_pays_layers_and_tests(rule: ExitRule, layer: int, expected: float) -> None:
    """A token costs the layers it runs and skips, and every test but the one that gives it."""
    assert _COST.at(layer, rule) == expected


def test_a_mean_lies_between_the_nearest_exits() -> None:
    """Tokens that exit between two exits on average cost a mixture of both; beyond all, the nearest."""
    rule = ExitRule(min_exit_layer=4, exit_interval=2)
    assert _COST.at_mean(4.5, rule) == pytest.approx(0.75 * _COST.at(4, rule) + 0.25 * _COST.at(6, rule))
    assert _COST.at_mean(8, rule) == _COST.at(8, rule)
    assert _COST.at_mean(3.9, rule) == _COST.at(4, rule)


def test_layers_count_alone() -> None:
    """By layers, tests cost nothing."""
    cost = TokenCost.of_layers(8)
    assert (cost.full(), cost.at_mean(3.5, ExitRule())) == (8, 3.5)
