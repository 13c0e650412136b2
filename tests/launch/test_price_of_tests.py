"""What `calibrate` says of exit tests that cost more than exits save."""

import dataclasses
from typing import Any

import pytest

from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.launch.calibrate.price import price_of_tests
from tests.calm_beam.manifest.builders import build_manifest

# A layer takes 12 d a + 4 d_f d = 64 operations, a skipped one 4 d a = 16, a projection 2 V d.
_SIZES = DecoderSizes(num_layers=6, width=2, attention_width=2, mlp_width=2, encoder_width=2, vocab_size=16)


@pytest.mark.parametrize(
    ("decode", "vocab_size", "words"),
    [
        # At 4.25 layers: (4.25 * (64 + 64) + 1.75 * 16) / (6 * 64 + 64).
        ({}, 16, "with its tests, softmax takes 128% of the full model's operations at these thresholds"),
        # From layer 3 on: 2.25 tests.
        ({"min_exit_layer": 3}, 64, r"softmax takes 137% of"),
        ({}, 1, None),
        ({"exit_interval": 2}, 16, None),
        ({"confidence": "state", "schedule": "constant", "tau": None}, 16, None),
    ],
)
def test_tests_that_cost_more_than_exits_save(
    decode: dict[str, Any],
    vocab_size: int,
    words: str | None,
) -> None:
    """They are told of, and what may help; nothing is where they save, or the mean of layers does not tell."""
    manifest = build_manifest()
    manifest = dataclasses.replace(manifest, decode=dataclasses.replace(manifest.decode, **decode))
    found = list(price_of_tests(manifest, dataclasses.replace(_SIZES, vocab_size=vocab_size)))
    if words is None:
        assert found == []
    else:
        (sentence,) = found
        assert words in sentence
        assert "calm-beam suitability forecasts which layers had better exit" in sentence
    assert list(price_of_tests(manifest, None)) == []
