"""Native code's confidences of states, against the measures' own."""

import numpy as np
import pytest

from calm_beam.exits.measures.built_in import STATE
from calm_beam.model.native import library

pytestmark = pytest.mark.usefixtures("instruction_set")


@pytest.mark.parametrize("width", [1, 7, 16, 40])
@pytest.mark.parametrize("scores", [1, 2])
def test_confidences_of_states(width: int, scores: int) -> None:
    """Confidences are the measures', and XLA's, for any vector padding; for a single layer, its own."""
    generator = np.random.default_rng(0)
    states = generator.standard_normal((4, 30, width)).astype(np.float32)
    states[2, 5] = np.nan
    states[2, 6] = 0
    kernel, bias = generator.standard_normal((width, scores)), generator.standard_normal(scores)
    below, branches = generator.permutation(30), generator.permutation(30)
    inputs = np.stack([states[0, below], states[1, branches], states[2, branches]])
    outputs = states[1:, branches]
    logits = outputs.astype(np.float64) @ kernel + bias
    with np.errstate(all="ignore"):
        expected = {
            "state": STATE.confidence(outputs, inputs, np.arange(1, 4)[:, None]),
            "classifier": 1 / (1 + np.exp(-(logits[..., -1] - (logits[..., 0] if scores > 1 else 0)))),
            "static": np.repeat([[0.25], [0.5], [1]], 30, axis=1),
        }
    assert np.isnan(expected["state"]).sum() == 4
    for name, of_all in expected.items():
        measure = library.measure_of(name, vocab_size=9, classifier=(kernel, bias), by_layer=[0.25, 0.5, 1])
        assert measure is not None
        found = library.measure_states(measure, range(1, 4), states=states, below=below, branches=branches)
        np.testing.assert_allclose(found, of_all, rtol=2e-6, atol=2e-6)
        some = library.measure_states(measure, range(2, 4), states=states, below=branches[:7], branches=branches[:7])
        np.testing.assert_array_equal(some, found[1:, :7])


def test_measures_that_native_code_does_not_know() -> None:
    """Measures that native code does not know are left to others."""
    assert library.measure_of("patience", vocab_size=9) is None
