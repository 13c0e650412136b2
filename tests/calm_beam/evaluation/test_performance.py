"""Costs and quality of ways of exiting, and the compared variants."""

import dataclasses
import math

import numpy as np
import pytest

from calm_beam.decoding.isolation import DecodeError
from calm_beam.evaluation.performance import (
    Variant,
    measure_variants,
    performances,
    propagation_variants,
    tradeoff_variants,
)
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.exits.rule import ExitRule
from calm_beam.metrics.registry import MetricError
from tests.builders import build_arrays, build_config, checkpoint_of
from tests.calm_beam.evaluation.builders import build_generation, build_prompt, build_task

_PROMPTS = [build_prompt("one", [5, 9, 1], references=["k b", "x"]), build_prompt("two", [7, 1], references=["c d"])]


def _random_prompts(count: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [[*generator.integers(2, 63, size=4).tolist(), 1] for _ in range(count)]


def test_known_outputs() -> None:
    """Layers are per token, similarity to the full model's text, quality to the best reference, its change paired."""
    generations = [
        build_generation(_PROMPTS[0], [("k b", [8, 8]), ("k z", [2])]),
        build_generation(_PROMPTS[1], [("c z", [8]), ("c d", [3, 4, 6])]),
    ]
    full, early = performances(build_task(_PROMPTS), generations)
    assert (full.layers.mean, early.layers.mean) == (8.0, 15 / 4)
    assert (full.similarity.mean, early.similarity.mean) == (1.0, 0.5)
    assert full.quality is not None
    assert early.quality is not None
    assert early.quality_change is not None
    assert full.quality.mean == (1 + 0.5) / 2
    assert early.quality.mean == (0.5 + 1) / 2
    # One prompt lost half and the other won half: a mean of 0, with the error of those two differences.
    assert early.quality_change.mean == 0
    assert early.quality_change.standard_error == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    assert full.quality_change == dataclasses.replace(early.quality_change, standard_error=0.0)


def test_without_references() -> None:
    """Without references there is no quality."""
    prompt = build_prompt("one", [5, 1])
    (full, early) = performances(build_task([prompt]), [build_generation(prompt, [("k b", [8]), ("k", [2])])])
    assert (full.quality, full.quality_change, early.quality, early.quality_change) == (None,) * 4
    assert early.similarity.mean == pytest.approx(2 / 3)


def test_variants_in_their_order() -> None:
    """The full model comes first and once, then every variant with its thresholds as given."""
    prompts = [build_prompt(f"row-{index}", ids) for index, ids in enumerate(_random_prompts(5))]
    rules = (ExitRule(), ExitRule(confidence="static"))
    calls: list[None] = []
    measured = measure_variants(
        build_task(prompts),
        [Variant(rule=rules[0], thresholds=(0.9, 0.0)), Variant(rule=rules[1], thresholds=(1 / 3, 1.0))],
        decoded=lambda: calls.append(None),
    )
    assert [(entry.rule, entry.threshold) for entry in measured] == [
        (None, None), (rules[0], 0.9), (rules[0], 0.0), (rules[1], 1 / 3), (rules[1], 1.0),
    ]  # fmt: skip
    full, high, zero, first, last = (entry.performance for entry in measured)
    assert [found.layers.mean for found in (full, zero, first, last)] == [3, 1, 1, 3]
    assert 1 < high.layers.mean <= 3
    assert zero == first
    assert last == full
    assert len(calls) == 2 * len(prompts)


def test_a_broken_example_is_named() -> None:
    """Logits that are not finite end the measurement; no example is left out of a mean."""
    config = build_config(num_encoder_layers=1, num_decoder_layers=3)
    arrays = build_arrays(config, 0)
    arrays["token_embedder/embedding"][63] = np.nan
    prompts = [build_prompt("whole", [5, 1]), build_prompt("broken", [63, 1])]
    task = build_task(prompts, checkpoint=checkpoint_of(config, arrays))
    with pytest.raises(DecodeError, match=r"example broken: the model gave logits that are not finite\. Check the"):
        measure_variants(task, [Variant(rule=ExitRule(), thresholds=(0.5,))], decoded=lambda: None)


def test_a_failing_metric_is_named() -> None:
    """An invalid score names the metric and the example."""
    generation = build_generation(_PROMPTS[0], [("a", [8])])
    with pytest.raises(MetricError, match='metric "builtins:len" on example "one": raised TypeError'):
        performances(build_task(_PROMPTS, metric="builtins:len"), [generation])


def test_the_oracle_with_every_propagation_and_the_noisy_cache() -> None:
    """Every state propagation occurs once, with the oracle; tokens of the noisy cache are the last layer's."""
    *oracles, noisy = propagation_variants("state", [0.9, 0.0])
    assert [variant.rule.state_propagation for variant in oracles] == list(PROPAGATIONS)
    assert {(variant.rule.confidence, variant.rule.token_from) for variant in oracles} == {("oracle", "exit_layer")}
    assert (noisy.rule.confidence, noisy.rule.token_from, noisy.thresholds) == ("state", "last_layer", (0.9, 0.0))


@pytest.mark.slow
def test_only_the_full_cache_is_always_the_full_model() -> None:
    """The oracle loses nothing with the full cache, and does with the others; all of them save layers."""
    generator = np.random.default_rng(0)
    prompts = [build_prompt(f"row-{row}", [*generator.integers(2, 63, size=5).tolist(), 1]) for row in range(12)]
    task = build_task(prompts)
    full, *others = measure_variants(task, propagation_variants("softmax", (0.0,)), decoded=lambda: None)
    found = {entry.rule.state_propagation: entry.performance for entry in others[:-1] if entry.rule}
    assert found["full_cache"].similarity == full.performance.similarity
    assert full.performance.similarity.mean == 1
    for name in set(PROPAGATIONS) - {"full_cache"}:
        assert found[name].similarity.mean < 1
    assert all(performance.layers.mean < 3 for performance in found.values())
    # The noisy cache at threshold 0 is of the first layer's states, and yet not the first layer's output.
    assert others[-1].performance.layers.mean == 1
    assert others[-1].performance.similarity.mean > 0.3


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
    """Schedule and propagation apply to the measures; static layers and oracle share all but the schedule."""
    rule = ExitRule(schedule="decay", tau=4.0, state_propagation="projected", min_exit_layer=2, exit_interval=3)
    measure, static, oracle = tradeoff_variants(rule, ("softmax_max",), thresholds=(0.5,), num_layers=8)
    assert (measure.rule.schedule, measure.rule.tau, measure.rule.confidence) == ("decay", 4.0, "softmax_max")
    assert {(variant.rule.schedule, variant.rule.tau) for variant in (static, oracle)} == {("constant", None)}
    assert static.thresholds == (1.0, 5 / 8, 2 / 8)
    for variant in (measure, static, oracle):
        assert (variant.rule.state_propagation, variant.rule.exit_layers(8)) == ("projected", (2, 5, 8))
