"""Which ways of filling the cache are compared, and what is known of them beforehand."""

import numpy as np
import pytest

from calm_beam.evaluation.performance import measure_variants
from calm_beam.evaluation.propagation import propagation_variants
from calm_beam.exits.propagations import PROPAGATIONS
from tests.calm_beam.evaluation.builders import build_prompt, build_task


def test_the_oracle_with_every_propagation_and_the_noisy_cache() -> None:
    """Every state propagation is there once, with the oracle; tokens of the noisy cache are the last layer's."""
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
