"""Which ways of exiting make the trade-off."""

from calm_beam.evaluation.tradeoff import tradeoff_variants
from calm_beam.exits.rule import ExitRule


def test_measures_then_static_layers_then_the_oracle() -> None:
    """Each measure has the whole grid, static layers are L to 1, and the oracle has one threshold."""
    variants = tradeoff_variants(ExitRule(), ("softmax", "state"), thresholds=(0.9, 0.5), num_layers=4)
    assert [(variant.rule.confidence, variant.thresholds) for variant in variants] == [
        ("softmax", (0.9, 0.5)),
        ("state", (0.9, 0.5)),
        ("static", (1.0, 0.75, 0.5, 0.25)),
        ("oracle", (1.0,)),
    ]


def test_the_rule_is_that_of_the_measures() -> None:
    """Schedule and propagation go to the measures; static layers and oracle share all but the schedule."""
    rule = ExitRule(schedule="decay", tau=4.0, state_propagation="projected", min_exit_layer=2, exit_interval=3)
    measure, static, oracle = tradeoff_variants(rule, ("softmax_max",), thresholds=(0.5,), num_layers=8)
    assert (measure.rule.schedule, measure.rule.tau, measure.rule.confidence) == ("decay", 4.0, "softmax_max")
    assert {(variant.rule.schedule, variant.rule.tau) for variant in (static, oracle)} == {("constant", None)}
    assert static.thresholds == (1.0, 5 / 8, 2 / 8)
    for variant in (measure, static, oracle):
        assert (variant.rule.state_propagation, variant.rule.exit_layers(8)) == ("projected", (2, 5, 8))
