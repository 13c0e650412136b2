"""The sweep against plain numpy, and what rows and lanes may not do to each other."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.padding import bucket_width
from calm_beam.decoding.sweep import SweepDecoder, SweepResult
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.exits.rule import ExitRule
from calm_beam.model import EarlyExitT5, T5Config, parameter_shapes
from tests.builders import build_arrays, build_checkpoint, build_config, build_prompts, build_rule, checkpoint_of
from tests.numpy_t5 import Decoded, NumpyT5
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("strict_promotion")

_CONFIG = build_config(exit_classifier=2)
_DEPTH = _CONFIG.num_decoder_layers
# As T5X's scalable_t5 trains them.
_SCALABLE = build_config(relative_bias_per_layer=True, activation="silu")
_STEPS = 10
_THRESHOLDS = (1.0, 0.93, 0.85, 0.7, 0.5, 0.3, 0.15, 0.0)
_RULE = ExitRule()
# Each confidence with two propagations or more, each schedule twice or more, several sets of exit layers.
_RULES = (
    _RULE,
    ExitRule(state_propagation="from_first_exit", schedule="decay", tau=4.0),
    ExitRule(confidence="softmax_max", schedule="decay_t5x", tau=2.0),
    ExitRule(confidence="softmax_max", state_propagation="from_first_exit", min_exit_layer=2),
    ExitRule(confidence="state"),
    ExitRule(confidence="state", state_propagation="from_first_exit", schedule="decay", tau=1.0, exit_interval=2),
    ExitRule(confidence="classifier", schedule="decay", tau=4.0, min_exit_layer=2, exit_interval=2),
    ExitRule(confidence="classifier", state_propagation="from_first_exit", schedule="decay_t5x", tau=4.0),
    ExitRule(state_propagation="projected"),
    ExitRule(state_propagation="full_cache", schedule="decay", tau=4.0),
    ExitRule(token_from="last_layer"),
    ExitRule(confidence="classifier", state_propagation="projected", min_exit_layer=2, exit_interval=2),
    ExitRule(confidence="oracle"),
    ExitRule(confidence="oracle", state_propagation="from_first_exit"),
    ExitRule(confidence="oracle", state_propagation="projected", min_exit_layer=2),
    ExitRule(confidence="oracle", state_propagation="full_cache", exit_interval=3),
    build_rule("entropy", state_propagation="from_first_exit"),
    build_rule("patience"),
    build_rule("patience", patience=3, state_propagation="projected", schedule="decay", tau=4.0),
    ExitRule(confidence="static"),
    ExitRule(confidence="static", state_propagation="projected"),
)


def _name(rule: ExitRule) -> str:
    fields = (rule.confidence, rule.state_propagation, rule.schedule, rule.min_exit_layer, rule.exit_interval)
    return "-".join(map(str, (*fields, *(["noisy"] if rule.token_from == "last_layer" else []))))


_PROMPTS = build_prompts(4, 9, 1, 30, 6, 2, 13)


def _sweep(
    checkpoint: Checkpoint,
    rule: ExitRule,
    prompts: Sequence[Sequence[int]],
    *,
    thresholds: Sequence[float] = _THRESHOLDS,
    batch_size: int = 2,
    max_input_length: int = 64,
) -> list[SweepResult]:
    """Returns the results in the order of the prompts; checks that there is exactly one for each."""
    decoder = SweepDecoder(
        checkpoint,
        rule,
        thresholds=thresholds,
        max_decode_length=_STEPS,
        max_input_length=max_input_length,
        batch_size=batch_size,
    )
    results = list(decoder.decode(prompts))
    assert sorted(index for index, _ in results) == list(range(len(prompts)))
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]


def _assert_same(one: SweepResult, other: SweepResult) -> None:
    for field in ("tokens", "exit_layers", "lengths"):
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
    np.testing.assert_allclose(one.confidences, other.confidences, rtol=0, atol=1e-5)
    assert one.is_finite == other.is_finite


def _assert_lane_equals(result: SweepResult, lane: int, expected: Decoded) -> None:
    length = len(expected.tokens)
    # Far enough from every tie that float32 must decide as float64 does.
    assert expected.min_gap > 1e-4
    assert expected.min_margin > 1e-5
    assert result.lengths[lane] == length
    assert result.tokens[lane].tolist() == expected.tokens + [0] * (_STEPS - length)
    assert result.exit_layers[lane].tolist() == expected.exit_layers + [0] * (_STEPS - length)
    np.testing.assert_allclose(result.confidences[lane, :length], expected.confidences, rtol=0, atol=1e-4)
    assert not result.confidences[lane, length:].any()


@functools.cache
def _default_sweep() -> tuple[SweepResult, ...]:
    return tuple(_sweep(build_checkpoint(_CONFIG), _RULE, _PROMPTS))


# Each confidence, propagation and schedule.
@pytest.mark.parametrize("rule", sampled(_RULES, keep=(0, 3, 5, 7, 8, 9, 10, 12, 16, 17, 19)), ids=_name)
def test_every_lane_equals_plain_numpy(rule: ExitRule) -> None:
    """Tokens, exit layers and confidences of every prompt and threshold, and of the full model, are numpy's."""
    _check_against_numpy(_CONFIG, rule)


@pytest.mark.parametrize("rule", [_RULE, ExitRule(confidence="oracle")], ids=_name)
def test_layers_with_a_bias_of_their_own_equal_plain_numpy(rule: ExitRule) -> None:
    """So are those of a gated SiLU model whose layers each have a table of relative positions, in both sweeps."""
    _check_against_numpy(_SCALABLE, rule)


def _check_against_numpy(config: T5Config, rule: ExitRule) -> None:
    seen_layers: set[int] = set()
    lengths: set[int] = set()
    for seed in (0, 1):
        checkpoint = build_checkpoint(config, seed=seed)
        plain = NumpyT5(config, checkpoint.arrays)
        prompts = build_prompts(5, 2, 11, seed=seed)
        for prompt, result in zip(prompts, _sweep(checkpoint, rule, prompts), strict=True):
            assert result.is_finite
            for lane, threshold in enumerate((None, *_THRESHOLDS)):
                _assert_lane_equals(result, lane, plain.decode(prompt, rule, threshold, max_decode_length=_STEPS))
            seen_layers |= set(result.exit_layers[result.exit_layers > 0].tolist())
            lengths |= set(result.lengths.tolist())
    # Otherwise the comparison would prove little.
    never_used = {1} if rule.confidence == "state" and rule.schedule == "decay" else set()
    assert seen_layers == set(rule.exit_layers(config.num_decoder_layers)) - never_used
    assert len(lengths) > 1


def test_the_variants_differ() -> None:
    """All state propagations, given the same model and thresholds, are told apart by the prompts used here."""
    checkpoint = build_checkpoint(_CONFIG)
    plain = NumpyT5(_CONFIG, checkpoint.arrays)
    rules = [dataclasses.replace(_RULE, state_propagation=name) for name in PROPAGATIONS]
    rules.append(dataclasses.replace(_RULE, token_from="last_layer"))
    outputs = [
        [plain.decode(prompt, rule, 0.5, max_decode_length=_STEPS).tokens for prompt in _PROMPTS] for rule in rules
    ]
    for one, other in itertools.combinations(outputs, 2):
        assert one != other


def test_the_paper_s_classifier_has_one_logit() -> None:
    """A classifier of d + 1 weights gives the exits of two logits whose difference it is."""
    two = build_checkpoint(_CONFIG)
    kernel, bias = (two.arrays[f"decoder/meta_cls/{part}"] for part in ("kernel", "bias"))
    difference = {
        "decoder/meta_cls/kernel": kernel[:, 1:] - kernel[:, :1],
        "decoder/meta_cls/bias": bias[1:] - bias[:1],
    }
    one = checkpoint_of(dataclasses.replace(_CONFIG, exit_classifier=1), {**two.arrays, **difference})
    rule = ExitRule(confidence="classifier")
    for left, right in zip(_sweep(one, rule, _PROMPTS), _sweep(two, rule, _PROMPTS), strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)
        np.testing.assert_array_equal(left.exit_layers, right.exit_layers)
        np.testing.assert_allclose(left.confidences, right.confidences, atol=1e-6)


@pytest.mark.parametrize("state_propagation", PROPAGATIONS)
def test_static_layers_are_those_of_a_shallower_model(state_propagation: str) -> None:
    """Threshold m / L uses m layers for every token, and gives what a decoder cut down to its first m layers gives."""
    checkpoint = build_checkpoint(_CONFIG)
    rule = ExitRule(confidence="static", state_propagation=state_propagation)
    thresholds = tuple(layer / _DEPTH for layer in range(_DEPTH, 0, -1))
    for prompt, result in zip(_PROMPTS, _sweep(checkpoint, rule, _PROMPTS, thresholds=thresholds), strict=True):
        for lane, layers in enumerate(range(_DEPTH, 0, -1), start=1):
            assert set(result.exit_layers[lane, : result.lengths[lane]].tolist()) == {layers}
            expected = _cut_output(layers, tuple(prompt))
            assert expected.min_gap > 1e-4
            assert result.tokens[lane, : result.lengths[lane]].tolist() == expected.tokens


@functools.cache
def _cut_output(layers: int, prompt: tuple[int, ...]) -> Decoded:
    """Returns the full output, by plain numpy, of a decoder that has only its first layers."""
    config = dataclasses.replace(_CONFIG, num_decoder_layers=layers)
    arrays = build_checkpoint(_CONFIG).arrays
    cut = NumpyT5(config, {name: arrays[name] for name in parameter_shapes(config)})
    return cut.decode(prompt, _RULE, None, max_decode_length=_STEPS)


@pytest.mark.parametrize("rule", [ExitRule(confidence="oracle"), ExitRule(token_from="last_layer")], ids=_name)
def test_with_the_full_cache_an_oracle_gives_the_full_output(rule: ExitRule) -> None:
    """Where only the right token is ever taken and nothing is missing from the cache, exits change no token."""
    full_cache = dataclasses.replace(rule, state_propagation="full_cache")
    exits: set[int] = set()
    for result in _sweep(build_checkpoint(_CONFIG), full_cache, _PROMPTS, thresholds=(0.9, 0.5)):
        np.testing.assert_array_equal(result.tokens[1:], np.broadcast_to(result.tokens[0], result.tokens[1:].shape))
        exits |= set(result.exit_layers[1:].ravel().tolist())
    assert exits > {1, _DEPTH}


def test_the_oracle_leaves_at_the_first_layer_that_agrees() -> None:
    """At the first step, where layers can be recomputed alone, no lower layer predicts the last layer's token."""
    checkpoint = build_checkpoint(_CONFIG)
    plain = NumpyT5(_CONFIG, checkpoint.arrays)
    for prompt, result in zip(_PROMPTS, _sweep(checkpoint, ExitRule(confidence="oracle"), _PROMPTS), strict=True):
        predicted = [int(np.argmax(plain.logits(state[0]))) for state in plain.teacher_forced(prompt, [0])]
        agreeing = 1 + predicted.index(predicted[-1])
        assert set(result.exit_layers[1:-1, 0].tolist()) == {agreeing}
        assert set(result.tokens[:-1, 0].tolist()) == {predicted[-1]}


@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_batch_does_not_matter(batch_size: int) -> None:
    """Any number of slots and any order of prompts gives every prompt the same result."""
    checkpoint = build_checkpoint(_CONFIG)
    for order in (range(7), [6, 2, 0, 5, 1, 4, 3]):
        results = _sweep(checkpoint, _RULE, [_PROMPTS[index] for index in order], batch_size=batch_size)
        for index, result in zip(order, results, strict=True):
            _assert_same(result, _default_sweep()[index])


def test_a_prompt_alone() -> None:
    """A prompt decoded by itself, or twice among others, has the result that it has among others."""
    checkpoint = build_checkpoint(_CONFIG)
    _assert_same(_sweep(checkpoint, _RULE, _PROMPTS[3:4])[0], _default_sweep()[3])
    twice = _sweep(checkpoint, _RULE, [_PROMPTS[1], _PROMPTS[4], _PROMPTS[1]])
    for result, index in zip(twice, (1, 4, 1), strict=True):
        _assert_same(result, _default_sweep()[index])


def test_a_threshold_alone() -> None:
    """A lane does not see the others: each threshold alone, with the full model, gives what the grid gives."""
    checkpoint = build_checkpoint(_CONFIG)
    for lane in (2, 5, 8):
        for prompt, result in enumerate(_sweep(checkpoint, _RULE, _PROMPTS, thresholds=_THRESHOLDS[lane - 1 : lane])):
            together = _default_sweep()[prompt]
            for name in ("tokens", "exit_layers", "lengths"):
                np.testing.assert_array_equal(getattr(result, name), getattr(together, name)[[0, lane]])


def test_lanes_follow_the_thresholds_as_given() -> None:
    """Thresholds in another order give the same lanes in that order."""
    results = _sweep(build_checkpoint(_CONFIG), _RULE, _PROMPTS, thresholds=_THRESHOLDS[::-1])
    for result, ordered in zip(results, _default_sweep(), strict=True):
        np.testing.assert_array_equal(result.tokens[1:], ordered.tokens[:0:-1])
        np.testing.assert_array_equal(result.exit_layers[1:], ordered.exit_layers[:0:-1])


def test_prompts_of_different_widths() -> None:
    """Short and long prompts are padded to different widths and each comes back under its own index."""
    checkpoint = build_checkpoint(_CONFIG)
    prompts = build_prompts(33, 4, 50, 9)
    plain = NumpyT5(_CONFIG, checkpoint.arrays)
    for prompt, result in zip(prompts, _sweep(checkpoint, _RULE, prompts), strict=True):
        for lane in (0, 4):
            threshold = _THRESHOLDS[lane - 1] if lane else None
            _assert_lane_equals(result, lane, plain.decode(prompt, _RULE, threshold, max_decode_length=_STEPS))


def test_a_width_depends_on_the_prompt_alone() -> None:
    """Widths are powers of two from 32 on, cut at the longest input, and never below the prompt's length."""
    assert [bucket_width(length, 200) for length in (1, 32, 33, 64, 65, 128, 129, 200)] == [
        32, 32, 64, 64, 128, 128, 200, 200,
    ]  # fmt: skip
    assert bucket_width(5, 8) == 8


def _with_broken_token() -> tuple[Checkpoint, Checkpoint]:
    """Returns two models that differ in token 63 only, which neither generates: NaN in the first, 0 in the second."""
    arrays = build_arrays(_CONFIG, 0)
    arrays["decoder/logits_dense/kernel"][:, 63] = 0
    whole, broken = arrays["token_embedder/embedding"].copy(), arrays["token_embedder/embedding"].copy()
    whole[63], broken[63] = 0, np.nan
    return (
        checkpoint_of(_CONFIG, {**arrays, "token_embedder/embedding": broken}),
        checkpoint_of(_CONFIG, {**arrays, "token_embedder/embedding": whole}),
    )


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_broken_prompt_disturbs_nobody(batch_size: int) -> None:
    """A prompt that gives NaN says so; the others, also the next in its slot, come out as without it."""
    broken, whole = _with_broken_token()
    prompts = [*_PROMPTS[:2], [8, 63, 1], *_PROMPTS[2:]]
    results = _sweep(broken, _RULE, prompts, batch_size=batch_size)
    expected = _sweep(whole, _RULE, _PROMPTS)
    assert [result.is_finite for result in results] == [True, True, False, True, True, True, True, True]
    for result, clean in zip([*results[:2], *results[3:]], expected, strict=True):
        assert not (clean.tokens == 63).any()
        _assert_same(result, clean)


def test_an_unknown_id_is_not_finite() -> None:
    """A prompt with an id that the embedding does not have is reported, and the others are not disturbed."""
    results = _sweep(build_checkpoint(_CONFIG), _RULE, [_PROMPTS[0], [8, 64, 1], _PROMPTS[1]])
    assert [result.is_finite for result in results] == [True, False, True]
    _assert_same(results[2], _default_sweep()[1])


def test_the_full_model_never_exits() -> None:
    """Where confidence is exactly 1.0, threshold 1 exits, and the full model still does not."""
    checkpoint = build_checkpoint(_CONFIG, logit_scale=400)
    results = _sweep(checkpoint, _RULE, _PROMPTS)
    saturated_exits = 0
    for result in results:
        full, one = (result.exit_layers[lane, : result.lengths[lane]] for lane in (0, 1))
        assert (full == _DEPTH).all()
        early = one < _DEPTH
        assert (result.confidences[1, : result.lengths[1]][early] == 1).all()
        saturated_exits += int(early.sum())
    assert saturated_exits > 10
    # The full model's own confidence gets to 1 too.
    assert any((result.confidences[0] == 1).any() for result in results)


def test_without_exits_a_lane_is_the_full_model() -> None:
    """At threshold 1, with no confidence that reaches it, tokens, layers and confidences are the full model's."""
    for result in _default_sweep():
        assert result.confidences.max() < 1
        assert result.lengths[1] == result.lengths[0]
        for name in ("tokens", "exit_layers"):
            np.testing.assert_array_equal(getattr(result, name)[1], getattr(result, name)[0])
        np.testing.assert_allclose(result.confidences[1], result.confidences[0], rtol=0, atol=1e-5)


def test_the_full_model_is_the_whole_decoder() -> None:
    """Every token of the full model is the last layer's best next token under teacher forcing."""
    checkpoint = build_checkpoint(_CONFIG)
    apply = jax.jit(EarlyExitT5(_CONFIG).apply)
    for prompt, result in zip(_PROMPTS, _default_sweep(), strict=True):
        source = np.array([prompt + [0] * (32 - len(prompt))], np.int32)
        inputs = np.concatenate([[0], result.tokens[0, :-1]])[None].astype(np.int32)
        logits = apply({"params": checkpoint.parameters()}, source, inputs)
        length = result.lengths[0]
        assert np.argmax(logits[-1, 0, :length], axis=-1).tolist() == result.tokens[0, :length].tolist()
        assert (result.exit_layers[0, :length] == _DEPTH).all()


def test_outputs_end_with_eos_or_at_the_limit() -> None:
    """Eos is the last token wherever it occurs; shorter outputs have it, and after it there is nothing."""
    shortened = 0
    for result in _default_sweep():
        for lane in range(len(_THRESHOLDS) + 1):
            length = result.lengths[lane]
            tokens = result.tokens[lane, :length].tolist()
            assert 1 not in tokens[:-1]
            assert length == _STEPS or tokens[-1] == 1
            assert not result.tokens[lane, length:].any()
            assert (result.exit_layers[lane, :length] > 0).all()
            shortened += length < _STEPS
    assert shortened


@pytest.mark.parametrize(
    "rule", [rule for rule in _RULES if rule.schedule != "decay" and rule.confidence != "state"], ids=_name
)
def test_threshold_zero_takes_the_first_exit(rule: ExitRule) -> None:
    """At threshold 0, where no schedule lifts it, every token leaves at the first layer that may exit."""
    for result in _sweep(build_checkpoint(_CONFIG), rule, _PROMPTS):
        length = result.lengths[len(_THRESHOLDS)]
        assert (result.exit_layers[len(_THRESHOLDS), :length] == rule.min_exit_layer).all()


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**16),
    thresholds=st.lists(st.floats(0, 1, width=32), min_size=8, max_size=8),
    prompt=st.lists(st.integers(2, 63), min_size=1, max_size=32),
)
def test_first_exits_fall_with_the_threshold(seed: int, thresholds: list[float], prompt: list[int]) -> None:
    """At the first step, where all lanes are in the same state, a lower threshold never exits later."""
    descending = sorted(thresholds, reverse=True)
    (result,) = _sweep(build_checkpoint(_CONFIG, seed=seed), _RULE, [prompt], thresholds=descending)
    first = result.exit_layers[:, 0]
    assert first[0] == _DEPTH
    assert (np.diff(first) <= 0).all()
    # Who exits at the same layer has the same token and confidence.
    for layer in set(first.tolist()):
        assert len(set(result.tokens[first == layer, 0].tolist())) == 1
        assert np.ptp(result.confidences[first == layer, 0]) <= 1e-5


@pytest.mark.parametrize("rule", _RULES, ids=_name)
def test_exits_fall_with_the_threshold_in_equal_states(rule: ExitRule) -> None:
    """Of two lanes with the same tokens and exits so far, the one of the lower threshold never exits later."""
    compared = 0
    for result in _sweep(build_checkpoint(_CONFIG, seed=5), rule, _PROMPTS):
        for upper, lower in itertools.combinations(range(len(_THRESHOLDS) + 1), 2):
            for step in range(min(result.lengths[[upper, lower]])):
                assert result.exit_layers[lower, step] <= result.exit_layers[upper, step]
                compared += 1
                if result.exit_layers[lower, step] != result.exit_layers[upper, step]:
                    break
                assert result.tokens[lower, step] == result.tokens[upper, step]
    assert compared > len(_PROMPTS) * 36


@pytest.mark.parametrize("sizes", [{"max_decode_length": 0}, {"max_input_length": 0}, {"batch_size": -1}], ids=str)
def test_sizes_below_one_are_refused(sizes: Mapping[str, Any]) -> None:
    """Lengths and batch size must be at least 1; the message names the one that is not."""
    ((name, value),) = sizes.items()
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        SweepDecoder(build_checkpoint(_CONFIG), _RULE, thresholds=(0.5,), **{"max_decode_length": 5, **sizes})


def test_a_rule_that_does_not_fit_the_model_is_refused() -> None:
    """A missing classifier and an exit layer above the decoder are refused before anything is decoded."""
    checkpoint = build_checkpoint(build_config())
    with pytest.raises(ValueError, match="confidence 'classifier' needs decoder/meta_cls in the checkpoint"):
        SweepDecoder(checkpoint, ExitRule(confidence="classifier"), thresholds=(0.5,), max_decode_length=5)
    with pytest.raises(ValueError, match="min_exit_layer must be at most 4, the decoder's depth; got 5"):
        SweepDecoder(checkpoint, ExitRule(min_exit_layer=5), thresholds=(0.5,), max_decode_length=5)


@pytest.mark.parametrize("length", [0, 7])
def test_empty_and_long_prompts_are_refused(length: int) -> None:
    """A prompt without tokens, or with too many, is refused by its index before anything is decoded."""
    decoder = SweepDecoder(build_checkpoint(_CONFIG), _RULE, thresholds=(0.5,), max_decode_length=5, max_input_length=6)
    with pytest.raises(ValueError, match=f"prompts must have 1 to 6 tokens, prompt 1 has {length}"):
        next(decoder.decode([[5, 1], [5] * length]))


def test_no_prompts_no_results() -> None:
    """Decoding nothing yields nothing."""
    assert _sweep(build_checkpoint(_CONFIG), _RULE, []) == []
