"""The served decoder against the sweep, and proof that it leaves out what it skips."""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.early_exit import EarlyExitDecoder, EarlyExitResult
from calm_beam.decoding.sweep import SweepDecoder, SweepResult
from calm_beam.exits.measures import MEASURES
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.schedule import scheduled_thresholds
from calm_beam.model import EarlyExitT5, T5Config, parameter_shapes
from tests.builders import build_arrays, build_checkpoint, build_config, build_prompts, build_rule, checkpoint_of
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("strict_promotion")

# As small as it can be with layers to skip, since every rule is compiled for every batch size.
_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=3, exit_classifier=2)
_DEPTH = _CONFIG.num_decoder_layers
# As T5X's scalable_t5 trains them.
_SCALABLE = build_config(num_encoder_layers=1, num_decoder_layers=3, relative_bias_per_layer=True, activation="silu")
_STEPS = 10
_THRESHOLDS = (1.0, 0.93, 0.7, 0.5, 0.3, 0.0)
_RULE = ExitRule()
_SERVED = tuple(name for name in MEASURES if name != "oracle")
_PROPAGATIONS = ("from_exit", "from_first_exit", "projected")
_SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "constant"},
    {"schedule": "decay", "tau": 4.0},
    {"schedule": "decay_t5x", "tau": 2.0},
)
# Lowest exit and interval: all layers, from the second on, and all but the second.
_LAYERS = ((1, 1), (2, 1), (1, 2))

# Each measure and batch size, and what differs most in code; all rules together take minutes.
_RULES = (
    (ExitRule(), 1),
    (ExitRule(confidence="softmax_max", state_propagation="from_first_exit", schedule="decay", tau=4.0), 3),
    (ExitRule(confidence="state", state_propagation="projected", schedule="decay_t5x", tau=2.0), 3),
    (ExitRule(confidence="state", state_propagation="from_first_exit", min_exit_layer=2), 1),
    (ExitRule(confidence="classifier", exit_interval=2), 3),
    (ExitRule(confidence="classifier", state_propagation="projected", schedule="decay", tau=4.0), 1),
    (build_rule("entropy"), 3),
    (build_rule("patience", state_propagation="from_first_exit"), 3),
    (build_rule("patience", patience=3, schedule="decay", tau=4.0), 1),
)


def _all_rules() -> Iterator[ExitRule]:
    """Yields every measure with every propagation, schedule and set of exit layers."""
    for confidence, propagation, schedule, (lowest, interval) in itertools.product(
        _SERVED, _PROPAGATIONS, _SCHEDULES, _LAYERS
    ):
        if confidence != "static" or schedule["schedule"] == "constant":
            yield build_rule(
                confidence,
                state_propagation=propagation,
                min_exit_layer=lowest,
                exit_interval=interval,
                **schedule,
            )


def _name(rule: ExitRule) -> str:
    fields = (rule.confidence, rule.state_propagation, rule.schedule, rule.min_exit_layer, rule.exit_interval)
    return "-".join(map(str, fields))


_PROMPTS = build_prompts(4, 9, 1, 30, 6, 2, 13)


def _decode(
    checkpoint: Checkpoint,
    rule: ExitRule,
    prompts: Sequence[Sequence[int]],
    threshold: float | None,
    *,
    batch_size: int = 1,
    max_decode_length: int = _STEPS,
    exit_head: str = "exact",
) -> list[EarlyExitResult]:
    """Returns the results in the order of the prompts; checks that there is exactly one for each."""
    decoder = EarlyExitDecoder(
        checkpoint,
        rule,
        threshold=threshold,
        max_decode_length=max_decode_length,
        max_input_length=64,
        batch_size=batch_size,
        exit_head=exit_head,
    )
    results = list(decoder.decode(prompts))
    assert sorted(index for index, _ in results) == list(range(len(prompts)))
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]


def _sweep(
    checkpoint: Checkpoint, rule: ExitRule, prompts: Sequence[Sequence[int]], thresholds: Sequence[float]
) -> list[SweepResult]:
    decoder = SweepDecoder(
        checkpoint, rule, thresholds=thresholds, max_decode_length=_STEPS, max_input_length=64, batch_size=3
    )
    return [result for _, result in sorted(decoder.decode(prompts), key=lambda pair: pair[0])]


def _assert_is_lane(result: EarlyExitResult, swept: SweepResult, lane: int) -> None:
    np.testing.assert_array_equal(result.tokens, swept.tokens[lane])
    np.testing.assert_array_equal(result.exit_layers, swept.exit_layers[lane])
    np.testing.assert_allclose(result.confidences, swept.confidences[lane], rtol=0, atol=1e-5)
    assert result.length == swept.lengths[lane]
    assert result.is_finite == swept.is_finite
    for name in ("tokens", "exit_layers", "confidences"):
        assert getattr(result, name).dtype == getattr(swept, name).dtype


def _assert_same(one: EarlyExitResult, other: EarlyExitResult) -> None:
    for name in ("tokens", "exit_layers", "length", "is_finite"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_allclose(one.confidences, other.confidences, rtol=0, atol=1e-5)


def _assert_all_is_swept(rule: ExitRule, batch_size: int, config: T5Config = _CONFIG) -> None:
    checkpoint = build_checkpoint(config)
    swept = _sweep(checkpoint, rule, _PROMPTS, _THRESHOLDS)
    seen_layers: set[int] = set()
    for lane, threshold in enumerate(_THRESHOLDS, start=1):
        results = _decode(checkpoint, rule, _PROMPTS, threshold, batch_size=batch_size)
        for result, expected in zip(results, swept, strict=True):
            _assert_is_lane(result, expected, lane)
            seen_layers |= set(result.exit_layers[: result.length].tolist())
    # Otherwise the comparison would prove little.
    never_used = {1} if rule.confidence == "state" and rule.schedule == "decay" else set()
    assert seen_layers == set(rule.exit_layers(_DEPTH)) - never_used


@pytest.mark.parametrize(("rule", "batch_size"), sampled(_RULES, keep=(0, 2, 4, 6, 7)), ids=str)
def test_every_output_is_the_sweeps(rule: ExitRule, batch_size: int) -> None:
    """Tokens, exit layers and confidences are the sweep's lane, for one prompt at a time and for three together."""
    _assert_all_is_swept(rule, batch_size)


def test_every_output_of_layers_with_a_bias_of_their_own_is_the_sweeps() -> None:
    """The same for a gated SiLU model whose layers each have a table of relative positions."""
    _assert_all_is_swept(_RULE, 1, _SCALABLE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", [*_all_rules()], ids=_name)
def test_every_output_of_every_rule_is_the_sweeps(rule: ExitRule) -> None:
    """The same for every measure with every propagation, schedule and set of exit layers, and both batch sizes."""
    for batch_size in (1, 3):
        _assert_all_is_swept(rule, batch_size)


@pytest.mark.parametrize("exit_head", ["int8", "bfloat16"])
@pytest.mark.parametrize(("rule", "batch_size"), [_RULES[at] for at in (0, 1, 2, 5, 6, 7)], ids=str)
def test_a_certified_head_changes_nothing(rule: ExitRule, batch_size: int, exit_head: str) -> None:
    """Tokens and exit layers are the exact head's at every threshold and without one; confidences are near."""
    checkpoint = build_checkpoint(_CONFIG)
    seen: set[int] = set()
    for threshold in (None, *_THRESHOLDS):
        decode = functools.partial(_decode, checkpoint, rule, _PROMPTS, threshold, batch_size=batch_size)
        for one, other in zip(decode(exit_head=exit_head), decode(), strict=True):
            for name in ("tokens", "exit_layers", "length", "is_finite"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            np.testing.assert_allclose(one.confidences, other.confidences, rtol=0, atol=0.2)
            seen |= set(other.exit_layers[: other.length].tolist())
    assert len(seen) > 1


@pytest.mark.parametrize(("confidence", "batch_size"), [("softmax", 1), ("state", 3), ("static", 1)])
def test_without_a_threshold_it_is_the_full_model(confidence: str, batch_size: int) -> None:
    """Threshold None gives the sweep's full-model lane, also where confidences of exactly 1 meet any threshold."""
    rule = ExitRule(confidence=confidence)
    for scale in (4.0, 400.0):
        checkpoint = build_checkpoint(_CONFIG, logit_scale=scale)
        swept = _sweep(checkpoint, rule, _PROMPTS, (0.5,))
        for result, expected in zip(
            _decode(checkpoint, rule, _PROMPTS, None, batch_size=batch_size), swept, strict=True
        ):
            _assert_is_lane(result, expected, 0)


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**16),
    threshold=st.floats(0, 1, width=32),
    prompts=st.lists(st.lists(st.integers(2, 63), min_size=1, max_size=32), min_size=1, max_size=5),
    batch_size=st.sampled_from([1, 3]),
)
def test_any_prompts_at_any_threshold(seed: int, threshold: float, prompts: list[list[int]], batch_size: int) -> None:
    """Whatever the weights, prompts and threshold, the output is the sweep's."""
    checkpoint = build_checkpoint(_CONFIG, seed=seed)
    swept = _sweep(checkpoint, _RULE, prompts, (threshold,))
    results = _decode(checkpoint, _RULE, prompts, threshold, batch_size=batch_size)
    for result, expected in zip(results, swept, strict=True):
        _assert_is_lane(result, expected, 1)


def test_rows_do_not_see_each_other() -> None:
    """A batch of any size, in any order, gives each prompt what it has alone, though rows leave at other layers."""
    checkpoint = build_checkpoint(_CONFIG)
    alone = _decode(checkpoint, _RULE, _PROMPTS, 0.5)
    first_exits = [result.exit_layers[0] for result in alone]
    assert len(set(first_exits)) > 1
    for batch_size in (3, 8):
        for order in (range(7), [6, 2, 0, 5, 1, 4, 3]):
            prompts = [_PROMPTS[index] for index in order]
            results = _decode(checkpoint, _RULE, prompts, 0.5, batch_size=batch_size)
            for index, result in zip(order, results, strict=True):
                _assert_same(result, alone[index])


def _cut(checkpoint: Checkpoint, layers: int) -> Checkpoint:
    config = dataclasses.replace(checkpoint.config, num_decoder_layers=layers)
    return checkpoint_of(config, {name: checkpoint.arrays[name] for name in parameter_shapes(config)})


@pytest.mark.parametrize("layers", range(1, _DEPTH + 1))
def test_static_layers_are_those_of_a_shallower_model(layers: int) -> None:
    """Threshold m / L gives the tokens of the full model of a decoder cut down to its first m layers."""
    checkpoint = build_checkpoint(_CONFIG)
    results = _decode(checkpoint, ExitRule(confidence="static"), _PROMPTS, layers / _DEPTH)
    for result, expected in zip(results, _decode(_cut(checkpoint, layers), _RULE, _PROMPTS, None), strict=True):
        np.testing.assert_array_equal(result.tokens, expected.tokens)
        assert set(result.exit_layers[: result.length].tolist()) == {layers}
        assert (result.confidences[: result.length] == np.float32(layers / _DEPTH)).all()


def _with_broken_layers(checkpoint: Checkpoint, layers: Sequence[int], *, keep: Sequence[str] = ()) -> Checkpoint:
    """Returns a model with NaN in the given decoder layers, but for arrays whose name has one of `keep` in it."""
    arrays = dict(checkpoint.arrays)
    for name in arrays:
        is_broken = any(f"decoder/layers_{layer - 1}/" in name for layer in layers)
        if is_broken and not any(part in name for part in keep):
            arrays[name] = np.full_like(arrays[name], np.nan)
    return checkpoint_of(checkpoint.config, arrays)


# What makes a skipped layer's keys and values.
_FILLING = ("self_attention/key", "self_attention/value", "pre_self_attention_layer_norm")


@pytest.mark.parametrize(("confidence", "batch_size"), [("softmax", 1), ("classifier", 3), ("static", 1)])
def test_skipped_layers_leave_no_trace(confidence: str, batch_size: int) -> None:
    """Where all tokens leave below them, layers of NaN, of which only keys and values are sound, change nothing."""
    checkpoint, rule = build_checkpoint(_CONFIG), ExitRule(confidence=confidence, min_exit_layer=2)
    threshold = 2 / _DEPTH if confidence == "static" else 0.0
    expected = _decode(checkpoint, rule, _PROMPTS, threshold, batch_size=batch_size)
    broken = _with_broken_layers(checkpoint, [3], keep=_FILLING)
    for result, sound in zip(_decode(broken, rule, _PROMPTS, threshold, batch_size=batch_size), expected, strict=True):
        assert set(sound.exit_layers[: sound.length].tolist()) <= {2}
        assert result.is_finite
        _assert_same(result, sound)
    # They are not simply ignored: the full model falls over them.
    assert not any(result.is_finite for result in _decode(broken, rule, _PROMPTS, None, batch_size=batch_size))


def test_an_output_may_end_at_once() -> None:
    """A first token that is eos is a whole output, of one token, while the other rows go on."""
    checkpoint = build_checkpoint(_CONFIG, seed=8)
    results = _decode(checkpoint, _RULE, _PROMPTS, 0.5)
    lengths = [result.length for result in results]
    assert 1 in lengths
    at_once, other = lengths.index(1), int(np.argmax(lengths))
    assert results[at_once].tokens.tolist() == [1] + [0] * (_STEPS - 1)
    assert (results[at_once].exit_layers[1:] == 0).all()
    together = _decode(checkpoint, _RULE, [_PROMPTS[at_once], _PROMPTS[other], _PROMPTS[at_once]], 0.5, batch_size=3)
    for result, index in zip(together, (at_once, other, at_once), strict=True):
        _assert_same(result, results[index])


def test_outputs_end_at_the_limit() -> None:
    """An output that does not end by itself has as many tokens as allowed, a prefix of the longer output."""
    checkpoint = build_checkpoint(_CONFIG)
    longer = _decode(checkpoint, _RULE, _PROMPTS, 0.5)
    for limit in (1, 4):
        cut = 0
        for result, whole in zip(
            _decode(checkpoint, _RULE, _PROMPTS, 0.5, max_decode_length=limit), longer, strict=True
        ):
            assert result.length == min(limit, whole.length)
            assert result.tokens.shape == (limit,)
            np.testing.assert_array_equal(result.tokens, whole.tokens[:limit])
            cut += whole.length > limit
        assert cut


@pytest.mark.parametrize(("batch_size", "threshold"), [(1, 0.5), (3, 0.5), (3, None)])
def test_a_broken_prompt_disturbs_nobody(batch_size: int, threshold: float | None) -> None:
    """A prompt that gives NaN says so, with ids that exist; the others come out as the sweep has them."""
    arrays = build_arrays(_CONFIG, 0)
    arrays["decoder/logits_dense/kernel"][:, 63] = 0
    arrays["token_embedder/embedding"][63] = np.nan
    checkpoint = checkpoint_of(_CONFIG, arrays)
    prompts = [*_PROMPTS[:2], [8, 63, 1], *_PROMPTS[2:4]]
    results = _decode(checkpoint, _RULE, prompts, threshold, batch_size=batch_size)
    assert [result.is_finite for result in results] == [True, True, False, True, True]
    for index, (result, swept) in enumerate(zip(results, _sweep(checkpoint, _RULE, prompts, (0.5,)), strict=True)):
        assert swept.is_finite == result.is_finite
        if index != 2:
            _assert_is_lane(result, swept, 0 if threshold is None else 1)
    assert 0 <= results[2].tokens.min() <= results[2].tokens.max() < _CONFIG.vocab_size


def test_widths_and_order() -> None:
    """Prompts of several widths come back under their own index, shorter widths first, in the order given."""
    checkpoint = build_checkpoint(_CONFIG)
    prompts = build_prompts(33, 4, 50, 9, 12)
    decoder = EarlyExitDecoder(
        checkpoint, _RULE, threshold=0.5, max_decode_length=_STEPS, max_input_length=64, batch_size=2
    )
    decoded = list(decoder.decode(prompts))
    assert [index for index, _ in decoded] == [1, 3, 4, 0, 2]
    swept = _sweep(checkpoint, _RULE, prompts, (0.5,))
    for index, result in decoded:
        _assert_is_lane(result, swept[index], 1)


def test_threads_share_a_decoder() -> None:
    """Several threads that decode with one decoder at a time get what one alone gets."""
    decoder = EarlyExitDecoder(build_checkpoint(_CONFIG), _RULE, threshold=0.5, max_decode_length=_STEPS)
    expected = [dict(decoder.decode([prompt]))[0] for prompt in _PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda prompt: dict(decoder.decode([prompt]))[0], _PROMPTS * 4))
    for result, alone in zip(results, expected * 4, strict=True):
        _assert_same(result, alone)


def test_one_compilation_serves_every_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders that differ in their threshold alone trace, and so compile, once."""
    traced: list[object] = []
    encode = EarlyExitT5.encode

    def counted(model: EarlyExitT5, source_tokens: jax.Array) -> jax.Array:
        traced.append(source_tokens)
        return encode(model, source_tokens)

    monkeypatch.setattr(EarlyExitT5, "encode", counted)
    for threshold in (0.9, 0.1, 0.0):
        # A length of its own, which nothing has been compiled for.
        _decode(build_checkpoint(_CONFIG), _RULE, _PROMPTS[:1], threshold, max_decode_length=6)
    assert len(traced) == 1


@pytest.mark.parametrize("threshold", [-0.1, 1.1, 5.0, float("nan")])
def test_thresholds_outside_of_0_to_1_are_refused(threshold: float) -> None:
    """The message has the value, and says how to never exit."""
    with pytest.raises(ValueError, match=rf"threshold must be in \[0, 1\], or None to never exit; got {threshold}"):
        EarlyExitDecoder(build_checkpoint(_CONFIG), _RULE, threshold=threshold, max_decode_length=5)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (ExitRule(confidence="oracle"), "confidence 'oracle'"),
        (ExitRule(state_propagation="full_cache"), "state_propagation 'full_cache'"),
        (ExitRule(token_from="last_layer"), "token_from 'last_layer'"),
    ],
)
@pytest.mark.parametrize("threshold", [0.5, None])
def test_rules_that_need_the_full_model_are_refused(rule: ExitRule, named: str, threshold: float | None) -> None:
    """Where every layer has to run anyway there is nothing to serve; the message names what asks for it."""
    with pytest.raises(
        ValueError, match=f"nothing can be skipped with {named}: it needs every layer.*Decode it with the sweep"
    ):
        EarlyExitDecoder(build_checkpoint(_CONFIG), rule, threshold=threshold, max_decode_length=5)


@pytest.mark.parametrize("sizes", [{"max_decode_length": 0}, {"max_input_length": 0}, {"batch_size": -1}], ids=str)
def test_sizes_below_one_are_refused(sizes: Mapping[str, Any]) -> None:
    """Lengths and batch size must be at least 1; the message names the one that is not."""
    ((name, value),) = sizes.items()
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        EarlyExitDecoder(build_checkpoint(_CONFIG), _RULE, threshold=0.5, **{"max_decode_length": 5, **sizes})


def test_thresholds_by_position_take_the_place_of_the_schedule() -> None:
    """Given what Eq. 5 makes of a threshold, a decoder of the constant schedule generates as one of that schedule."""
    checkpoint, decay = build_checkpoint(_CONFIG), ExitRule(schedule="decay", tau=4.0)
    positions = scheduled_thresholds(decay, (0.6,), max_decode_length=_STEPS)[:, 0].tolist()
    decoder = EarlyExitDecoder(
        checkpoint, ExitRule(), threshold=0.6, max_decode_length=_STEPS, threshold_by_position=positions
    )
    expected = _decode(checkpoint, decay, _PROMPTS, 0.6)
    constant = _decode(checkpoint, ExitRule(), _PROMPTS, 0.6)
    assert any((one.exit_layers != other.exit_layers).any() for one, other in zip(expected, constant, strict=True))
    for index, result in decoder.decode(_PROMPTS):
        _assert_same(result, expected[index])


@pytest.mark.parametrize(
    ("threshold", "positions", "message"),
    [
        (0.5, [0.5] * 4, "must be 5 numbers beside a threshold, got 4 numbers beside 0.5"),
        (None, [0.5] * 5, "must be 5 numbers beside a threshold, got 5 numbers beside None"),
        (0.5, [0.5] * 4 + [1.5], r"must be numbers in \[0, 1\], got "),
        (0.5, [0.5] * 4 + [float("nan")], r"must be numbers in \[0, 1\], got "),
    ],
)
def test_thresholds_by_position_that_do_not_fit_are_refused(
    threshold: float | None, positions: list[float], message: str
) -> None:
    """There is one for each token, and none for the full model."""
    with pytest.raises(ValueError, match=message):
        EarlyExitDecoder(
            build_checkpoint(_CONFIG),
            _RULE,
            threshold=threshold,
            max_decode_length=5,
            threshold_by_position=positions,
        )


def test_a_rule_that_does_not_fit_the_model_is_refused() -> None:
    """A missing classifier and an exit layer above the decoder are refused before anything is decoded."""
    checkpoint = build_checkpoint(build_config())
    with pytest.raises(ValueError, match="confidence 'classifier' needs decoder/meta_cls in the checkpoint"):
        EarlyExitDecoder(checkpoint, ExitRule(confidence="classifier"), threshold=0.5, max_decode_length=5)
    with pytest.raises(ValueError, match="min_exit_layer must be at most 4, the decoder's depth; got 5"):
        EarlyExitDecoder(checkpoint, ExitRule(min_exit_layer=5), threshold=0.5, max_decode_length=5)


@pytest.mark.parametrize("length", [0, 7])
def test_empty_and_long_prompts_are_refused(length: int) -> None:
    """A prompt without tokens, or with too many, is refused by its index before anything is decoded."""
    decoder = EarlyExitDecoder(build_checkpoint(_CONFIG), _RULE, threshold=0.5, max_decode_length=5, max_input_length=6)
    with pytest.raises(ValueError, match=f"prompts must have 1 to 6 tokens, prompt 1 has {length}"):
        next(decoder.decode([[5, 1], [5] * length]))


def test_no_prompts_no_results() -> None:
    """Decoding nothing yields nothing."""
    assert _decode(build_checkpoint(_CONFIG), _RULE, [], 0.5) == []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[tuple[str, int]]]:
    """Counts what is really executed: calls of (method, layer), with layer 0 for the output head."""
    counter: collections.Counter[tuple[str, int]] = collections.Counter()

    def count(name: str) -> None:
        method = getattr(EarlyExitT5, name)

        def counted(model: EarlyExitT5, states: jax.Array, layer: int = 0, **arguments: Any) -> Any:
            jax.debug.callback(functools.partial(counter.update, [(name, layer)]))
            return method(model, states, *([layer] if layer else []), **arguments)

        monkeypatch.setattr(EarlyExitT5, name, counted)

    # What was compiled before does not count, and what is compiled here must not be used later.
    jax.clear_caches()
    for name in ("decoder_layer", "self_keys_values", "head_inputs"):
        count(name)
    yield counter
    jax.clear_caches()


@pytest.mark.parametrize(
    ("rule", "threshold", "batch_size"),
    [
        (ExitRule(), 0.4, 1),
        (ExitRule(confidence="softmax_max", state_propagation="from_first_exit", min_exit_layer=2), 0.4, 3),
        (ExitRule(confidence="classifier", state_propagation="projected"), 0.4, 1),
        (ExitRule(confidence="state"), 0.7, 3),
    ],
    ids=str,
)
def test_only_the_work_that_is_needed_is_done(
    calls: collections.Counter[tuple[str, int]], rule: ExitRule, threshold: float, batch_size: int
) -> None:
    """A layer runs once a step if some row goes that far, and never else; the vocabulary is not projected to twice."""
    prompts = _PROMPTS[:3]
    results = _decode(build_checkpoint(_CONFIG), rule, prompts, threshold, batch_size=batch_size)
    jax.effects_barrier()
    if batch_size == 1:
        deepest = np.concatenate([result.exit_layers[: result.length] for result in results])
    else:
        together = np.max([result.exit_layers for result in results], axis=0)
        deepest = together[together > 0]
    assert len(set(deepest.tolist())) > 1
    for layer in range(1, _DEPTH + 1):
        reached = int((deepest >= layer).sum())
        assert calls["decoder_layer", layer] == reached
        is_copied = rule.state_propagation == "projected"
        assert calls["self_keys_values", layer] == (reached if is_copied else len(deepest))
    asked = [layer for layer in rule.exit_layers(_DEPTH) for deep in deepest if deep >= layer]
    assert calls["head_inputs", 0] == (len(asked) if rule.confidence in ("softmax", "softmax_max") else len(deepest))


def test_static_exits_have_nothing_above_them(calls: collections.Counter[tuple[str, int]]) -> None:
    """With static exits nobody reads what higher layers would keep: they make neither states nor keys and values."""
    results = _decode(build_checkpoint(_CONFIG), ExitRule(confidence="static"), _PROMPTS[:3], 2 / _DEPTH)
    jax.effects_barrier()
    tokens = sum(result.length for result in results)
    methods = ("decoder_layer", "self_keys_values")
    expected = {**{(method, layer): tokens for method in methods for layer in (1, 2)}, ("head_inputs", 0): tokens}
    assert dict(calls) == expected
