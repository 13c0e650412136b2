"""`calibrate` warns about exit tests that cost more than exits save."""

import dataclasses
from typing import Any

import pytest

from calm_beam.evaluation.flops import DecoderSizes, shares_of_operations
from calm_beam.launch.calibrate.command import price_of_tests
from tests.calm_beam.manifest.builders import build_manifest, build_timed_manifest

# A layer takes 12 d a + 4 d_f d = 64 operations, a skipped one 4 d a = 16, a projection 2 V d.
_SIZES = DecoderSizes(num_layers=6, width=2, attention_width=2, mlp_width=2, encoder_width=2, vocab_size=16)


@pytest.mark.parametrize(
    ("decode", "vocab_size", "share"),
    [
        # At 4.25 layers: (4.25 * (64 + 64) + 1.75 * 16) / (6 * 64 + 64).
        ({}, 16, 572 / 448),
        # From layer 3 on: 2.25 tests.
        ({"min_exit_layer": 3}, 64, 1.37),
        ({}, 1, 317 / 388),
        ({"confidence": "state", "schedule": "constant", "tau": None}, 16, 364 / 448),
        # Layers 1 and 6: 0.65 of the way from 208 operations to 512.
        ({"exit_interval": 5}, 16, 405.6 / 448),
        # Layers 1, 3, 5 and 6: the mean does not tell how many tests there are.
        ({"exit_interval": 2}, 16, None),
    ],
)
def test_what_decoding_takes_of_the_full_models_operations(
    decode: dict[str, Any], vocab_size: int, share: float | None
) -> None:
    """Decoding's share of the full model's operations counts tests; it is None without mean layers or exits."""
    manifest = build_manifest()
    manifest = dataclasses.replace(manifest, decode=dataclasses.replace(manifest.decode, **decode))
    first, second = shares_of_operations(manifest, dataclasses.replace(_SIZES, vocab_size=vocab_size))
    assert second is None
    assert first == (None if share is None else pytest.approx(share, abs=0.005))
    assert shares_of_operations(manifest, None) == (None, None)


def test_a_variant_is_counted_with_its_own_exits() -> None:
    """The exit layers of the chosen variant say how many tests there are, and a warning names its measure."""
    manifest = build_timed_manifest()
    # From layer 2 on, 3.5 layers: 1.5 tests before the one that gives the token.
    first, second = shares_of_operations(manifest, _SIZES)
    assert (first, second) == (pytest.approx((3.5 * 64 + 2.5 * 16 + 1.5 * 64 + 64) / 448), None)
    (sentence,) = price_of_tests(manifest, (1.28, None))
    assert "the tests of softmax cost more" in sentence


def test_tests_that_cost_more_than_exits_save() -> None:
    """Tests that cost more than exits save get a warning with advice; tests that pay, or without counts, get none."""
    (sentence,) = price_of_tests(build_manifest(), (1.28, None))
    assert "the tests of softmax cost more operations than exits save" in sentence
    assert "calm-beam suitability forecasts which layers had better exit" in sentence
    assert list(price_of_tests(build_manifest(), (0.9, None))) == []
    assert list(price_of_tests(build_manifest(), (None, None))) == []
