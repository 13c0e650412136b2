"""The sweep's own contract: the variants of the paper's analyses, and thresholds that never cross."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from calm_beam.decoding.compilation import bucket_width
from calm_beam.exits.rule import ExitRule
from tests.builders import build_checkpoint, build_config, build_prompts, checkpoint_of
from tests.calm_beam.decoding.decoders import DECODERS, assert_all_same
from tests.numpy_t5 import NumpyT5

pytestmark = pytest.mark.usefixtures("strict_promotion")

_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=3, exit_classifier=2)
_DEPTH = _CONFIG.num_decoder_layers
_RULE = ExitRule()
_THRESHOLDS = (1.0, 0.93, 0.7, 0.5, 0.3, 0.0)
_PROMPTS = build_prompts(4, 9, 1, 30, 6, 2, 13)

_sweep = DECODERS["sweep"].decode


def test_the_paper_s_classifier_has_one_logit() -> None:
    """A classifier of d + 1 weights gives the exits of the two logits whose difference it is."""
    two = build_checkpoint(_CONFIG)
    kernel, bias = (two.arrays[f"decoder/meta_cls/{part}"] for part in ("kernel", "bias"))
    difference = {
        "decoder/meta_cls/kernel": kernel[:, 1:] - kernel[:, :1],
        "decoder/meta_cls/bias": bias[1:] - bias[:1],
    }
    one = checkpoint_of(dataclasses.replace(_CONFIG, exit_classifier=1), {**two.arrays, **difference})
    rule = ExitRule(confidence="classifier")
    assert_all_same(*(_sweep(checkpoint, rule, _PROMPTS, thresholds=_THRESHOLDS) for checkpoint in (one, two)))


@pytest.mark.parametrize("rule", [ExitRule(confidence="oracle"), ExitRule(token_from="last_layer")], ids=str)
def test_with_the_full_cache_an_oracle_gives_the_full_output(rule: ExitRule) -> None:
    """With the full cache the oracle, which takes only the right token, gives the full model's output."""
    full_cache = dataclasses.replace(rule, state_propagation="full_cache")
    exits: set[int] = set()
    for result in _sweep(build_checkpoint(_CONFIG), full_cache, _PROMPTS, thresholds=(0.9, 0.5)):
        np.testing.assert_array_equal(result.tokens[1:], np.broadcast_to(result.tokens[0], result.tokens[1:].shape))
        exits |= set(result.exit_layers[1:].ravel().tolist())
    assert exits > {1, _DEPTH}


def test_the_oracle_leaves_at_the_first_layer_that_agrees() -> None:
    """At the first step, no layer below the oracle's exit predicts the last layer's token.

    There layers can be recomputed alone.
    """
    checkpoint = build_checkpoint(_CONFIG)
    plain = NumpyT5(_CONFIG, checkpoint.arrays)
    for prompt, result in zip(
        _PROMPTS, _sweep(checkpoint, ExitRule(confidence="oracle"), _PROMPTS, thresholds=_THRESHOLDS), strict=True
    ):
        predicted = [int(np.argmax(plain.logits(state[0]))) for state in plain.teacher_forced(prompt, [0])]
        agreeing = 1 + predicted.index(predicted[-1])
        assert set(result.exit_layers[1:-1, 0].tolist()) == {agreeing}
        assert set(result.tokens[:-1, 0].tolist()) == {predicted[-1]}


def test_a_width_depends_on_the_prompt_alone() -> None:
    """Widths are powers of two from 32 on, cut at the longest input, and never below the prompt's length."""
    assert [bucket_width(length, 200) for length in (1, 32, 33, 64, 65, 128, 129, 200)] == [
        32, 32, 64, 64, 128, 128, 200, 200,
    ]  # fmt: skip
    assert bucket_width(5, 8) == 8


def test_an_unknown_id_is_not_finite() -> None:
    """A prompt with an id beyond the embedding is reported, and the others do not change."""
    checkpoint = build_checkpoint(_CONFIG)
    results = _sweep(checkpoint, _RULE, [_PROMPTS[0], [8, 64, 1], _PROMPTS[1]], thresholds=_THRESHOLDS)
    assert [result.is_finite for result in results] == [True, False, True]
    assert_all_same(results[::2], _sweep(checkpoint, _RULE, _PROMPTS[:2], thresholds=_THRESHOLDS))


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**16),
    thresholds=st.lists(st.floats(0, 1, width=32), min_size=8, max_size=8),
    prompt=st.lists(st.integers(2, 63), min_size=1, max_size=32),
)
def test_first_exits_fall_with_the_threshold(seed: int, thresholds: list[float], prompt: list[int]) -> None:
    """At the first step, where all branches are in the same state, a lower threshold never exits later."""
    descending = sorted(thresholds, reverse=True)
    (result,) = _sweep(build_checkpoint(_CONFIG, seed=seed), _RULE, [prompt], thresholds=descending)
    first = result.exit_layers[:, 0]
    assert first[0] == _DEPTH
    assert (np.diff(first) <= 0).all()
    # Branches with the same exit layer have the same token and confidence.
    for layer in set(first.tolist()):
        assert len(set(result.tokens[first == layer, 0].tolist())) == 1
        assert np.ptp(result.confidences[first == layer, 0]) <= 1e-5
