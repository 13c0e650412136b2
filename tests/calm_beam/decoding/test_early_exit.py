"""The served decoder against the sweep, and proof that it does not compute skipped layers."""

import collections
import concurrent.futures
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import Branch, BranchResult
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.exits.measures import MEASURES
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import scheduled_thresholds
from calm_beam.model import EarlyExitT5
from tests.builders import BY_LOGITS, build_checkpoint, build_config, build_prompts, build_rule, checkpoint_of
from tests.calm_beam.decoding.decoders import DECODERS, STEPS, assert_all_same, assert_same, serve
from tests.instruction_sets import needs_native

pytestmark = pytest.mark.usefixtures("strict_promotion")

# The smallest model with layers to skip, since every rule is compiled for every batch size.
_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=3, exit_classifier=2)
_DEPTH = _CONFIG.num_decoder_layers
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


def _assert_same(one: BranchResult, other: BranchResult) -> None:
    for name in ("tokens", "exit_layers", "length", "is_finite"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_allclose(one.confidences, other.confidences, rtol=0, atol=1e-5)


@needs_native
@pytest.mark.parametrize("confidence", BY_LOGITS)
def test_a_threshold_within_an_interval_is_left_to_the_exact_head(confidence: str) -> None:
    """A confidence that equals a threshold, or exceeds it by the least, decides as without a certified head."""
    rule = ExitRule(confidence=confidence)
    made = {
        form: EarlyExitDecoder(
            build_checkpoint(_CONFIG),
            Branch.at(rule, 0.0, max_decode_length=2),
            max_input_length=32,
            exit_head=form,
        )
        for form in ("exact", "int8")
    }
    # Confidences of the first tokens, which no threshold has changed yet.
    reached = [result.confidences[0] for _, result in sorted(made["exact"].decode(_PROMPTS))]
    for place, (prompt, value) in enumerate(zip(_PROMPTS, reached, strict=True)):
        for threshold, leaves in ((value, True), (np.nextafter(value, np.float32(2)), False)):
            if threshold > 1:
                continue
            layers = {}
            for form, decoder in made.items():
                ((_, result),) = decoder.at(Branch.at(rule, float(threshold), max_decode_length=2)).decode([prompt])
                layers[form] = int(result.exit_layers[0])
            assert (layers["exact"] == 1) is leaves, place
            assert layers["int8"] == layers["exact"], place


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", [*_all_rules()], ids=_name)
def test_every_output_of_every_rule_is_the_sweeps(rule: ExitRule) -> None:
    """Every measure with every propagation, schedule, set of exit layers and batch size gives the sweep's outputs."""
    checkpoint = build_checkpoint(_CONFIG)
    expected = DECODERS["sweep"].decode(checkpoint, rule, _PROMPTS, thresholds=_THRESHOLDS)
    # The served full model does not test the layers whose tokens `patience` compares.
    within = 1 if rule.patience else 1e-5
    for batch_size in (1, 3):
        served = DECODERS["served"].decode(checkpoint, rule, _PROMPTS, thresholds=_THRESHOLDS, batch_size=batch_size)
        for result, swept in zip(served, expected, strict=True):
            assert_same(result, swept, confidences_within=within)
    # Otherwise the comparison would prove little.
    never_used = {1} if rule.confidence == "state" and rule.schedule == "decay" else set()
    seen_layers = {layer for result in expected for layer in result.exit_layers.ravel().tolist()} - {0}
    assert seen_layers == set(rule.exit_layers(_DEPTH)) - never_used


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**16),
    threshold=st.floats(0, 1, width=32),
    prompts=st.lists(st.lists(st.integers(2, 63), min_size=1, max_size=32), min_size=1, max_size=5),
    batch_size=st.sampled_from([1, 3]),
)
def test_any_prompts_at_any_threshold(seed: int, threshold: float, prompts: list[list[int]], batch_size: int) -> None:
    """With any weights, prompts and threshold, the output is the sweep's."""
    checkpoint = build_checkpoint(_CONFIG, seed=seed)
    served = DECODERS["served"].decode(checkpoint, _RULE, prompts, thresholds=(threshold,), batch_size=batch_size)
    assert_all_same(served, DECODERS["sweep"].decode(checkpoint, _RULE, prompts, thresholds=(threshold,)))


def _with_broken_layers(checkpoint: Checkpoint, layers: Sequence[int], *, keep: Sequence[str] = ()) -> Checkpoint:
    """Returns a model with NaN in the given decoder layers, except arrays whose name contains one of `keep`."""
    arrays = dict(checkpoint.arrays)
    for name in arrays:
        is_broken = any(f"decoder/layers_{layer - 1}/" in name for layer in layers)
        if is_broken and not any(part in name for part in keep):
            arrays[name] = np.full_like(arrays[name], np.nan)
    return checkpoint_of(checkpoint.config, arrays)


# The arrays that compute a skipped layer's keys and values.
_FILLING = ("self_attention/key", "self_attention/value", "pre_self_attention_layer_norm")


@pytest.mark.parametrize(("confidence", "batch_size"), [("softmax", 1), ("classifier", 3), ("static", 1)])
def test_skipped_layers_leave_no_trace(confidence: str, batch_size: int) -> None:
    """If all tokens exit below them, layers of NaN with valid weights for keys and values change nothing."""
    checkpoint, rule = build_checkpoint(_CONFIG), ExitRule(confidence=confidence, min_exit_layer=2)
    threshold = 2 / _DEPTH if confidence == "static" else 0.0
    expected = serve(checkpoint, rule, _PROMPTS, threshold, batch_size=batch_size)
    broken = _with_broken_layers(checkpoint, [3], keep=_FILLING)
    for result, sound in zip(serve(broken, rule, _PROMPTS, threshold, batch_size=batch_size), expected, strict=True):
        assert set(sound.exit_layers[: sound.length].tolist()) <= {2}
        assert result.is_finite
        _assert_same(result, sound)
    # The full model gives NaN, so these layers are not ignored everywhere.
    assert not any(result.is_finite for result in serve(broken, rule, _PROMPTS, None, batch_size=batch_size))


def test_shorter_widths_come_first() -> None:
    """Prompts of several widths come back under their own index, shorter widths first, in the given order."""
    decoder = EarlyExitDecoder(
        build_checkpoint(_CONFIG), Branch.at(_RULE, 0.5, max_decode_length=STEPS), max_input_length=64, batch_size=2
    )
    assert [index for index, _ in decoder.decode(build_prompts(33, 4, 50, 9, 12))] == [1, 3, 4, 0, 2]


def test_threads_share_a_decoder() -> None:
    """Several threads with one decoder get the outputs of one thread."""
    decoder = EarlyExitDecoder(build_checkpoint(_CONFIG), Branch.at(_RULE, 0.5, max_decode_length=STEPS))
    expected = [dict(decoder.decode([prompt]))[0] for prompt in _PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda prompt: dict(decoder.decode([prompt]))[0], _PROMPTS * 4))
    for result, alone in zip(results, expected * 4, strict=True):
        _assert_same(result, alone)


def test_one_compilation_serves_every_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders that differ only in their threshold compile once."""
    traced: list[object] = []
    encode = EarlyExitT5.encode

    def counted(model: EarlyExitT5, source_tokens: jax.Array) -> jax.Array:
        traced.append(source_tokens)
        return encode(model, source_tokens)

    monkeypatch.setattr(EarlyExitT5, "encode", counted)
    for threshold in (0.9, 0.1, 0.0):
        # A length of its own, for which nothing has been compiled.
        serve(build_checkpoint(_CONFIG), _RULE, _PROMPTS[:1], threshold, max_decode_length=6)
    assert len(traced) == 1


def test_a_decoder_by_another_branch_is_as_one_made_for_it() -> None:
    """A decoder for another branch shares weights and head with the first, and has that threshold's outputs.

    The first decoder does not change.
    """
    checkpoint = build_checkpoint(_CONFIG)
    first = EarlyExitDecoder(checkpoint, Branch.at(_RULE, 0.5, max_decode_length=STEPS))
    before = dict(first.decode(_PROMPTS))
    for threshold in (0.0, 0.9, None):
        expected = serve(checkpoint, _RULE, _PROMPTS, threshold)
        for index, result in first.at(Branch.at(_RULE, threshold, max_decode_length=STEPS)).decode(_PROMPTS):
            _assert_same(result, expected[index])
    for index, result in first.decode(_PROMPTS):
        _assert_same(result, before[index])


@pytest.mark.parametrize("threshold", [-0.1, 1.1, 5.0, float("nan")])
def test_thresholds_outside_of_0_to_1_are_refused(threshold: float) -> None:
    """The message has the threshold, and says how to never exit."""
    with pytest.raises(ValueError, match=rf"threshold must be in \[0, 1\], or None to never exit; got {threshold}"):
        EarlyExitDecoder(build_checkpoint(_CONFIG), Branch.at(_RULE, threshold, max_decode_length=5))


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
    """A rule that runs every layer anyway is refused; the message names the setting that needs them."""
    with pytest.raises(
        ValueError, match=f"nothing can be skipped with {named}: it needs every layer.*Decode it with the sweep"
    ):
        EarlyExitDecoder(build_checkpoint(_CONFIG), Branch.at(rule, threshold, max_decode_length=5))


def test_thresholds_by_position_take_the_place_of_the_schedule() -> None:
    """A decoder of the constant schedule with Eq. 5's thresholds by position generates as one of that schedule."""
    checkpoint, decay = build_checkpoint(_CONFIG), ExitRule(schedule="decay", tau=4.0)
    positions = scheduled_thresholds(decay, (0.6,), max_decode_length=STEPS)[:, 0].tolist()
    decoder = EarlyExitDecoder(checkpoint, Branch.at(ExitRule(), 0.6, positions, max_decode_length=STEPS))
    expected = serve(checkpoint, decay, _PROMPTS, 0.6)
    constant = serve(checkpoint, ExitRule(), _PROMPTS, 0.6)
    assert any((one.exit_layers != other.exit_layers).any() for one, other in zip(expected, constant, strict=True))
    for index, result in decoder.decode(_PROMPTS):
        _assert_same(result, expected[index])


@pytest.mark.parametrize(
    ("threshold", "positions", "message"),
    [
        (0.5, [0.5] * 4, "must be 5 numbers next to a threshold, got 4 numbers next to 0.5"),
        (None, [0.5] * 5, "must be 5 numbers next to a threshold, got 5 numbers next to None"),
        (0.5, [0.5] * 4 + [1.5], r"must be numbers in \[0, 1\], got "),
        (0.5, [0.5] * 4 + [float("nan")], r"must be numbers in \[0, 1\], got "),
    ],
)
def test_thresholds_by_position_that_do_not_fit_are_refused(
    threshold: float | None, positions: list[float], message: str
) -> None:
    """There must be one threshold for each token, and none for the full model."""
    with pytest.raises(ValueError, match=message):
        EarlyExitDecoder(build_checkpoint(_CONFIG), Branch.at(_RULE, threshold, positions, max_decode_length=5))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[tuple[str, int]]]:
    """Counts the calls that are executed, by (method, layer), with layer 0 for the output head."""
    counter: collections.Counter[tuple[str, int]] = collections.Counter()

    def count(name: str) -> None:
        method = getattr(EarlyExitT5, name)

        def counted(model: EarlyExitT5, states: jax.Array, layer: int, **arguments: Any) -> Any:
            place = 0 if name == "head_inputs" else layer
            jax.debug.callback(functools.partial(counter.update, [(name, place)]))
            return method(model, states, layer, **arguments)

        monkeypatch.setattr(EarlyExitT5, name, counted)

    # Earlier compilations do not count, and code compiled here must not be used later.
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
    """A layer runs once a step if some row reaches it, else never, and the head at most once per layer."""
    prompts = _PROMPTS[:3]
    results = serve(build_checkpoint(_CONFIG), rule, prompts, threshold, batch_size=batch_size)
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
    assert calls["head_inputs", 0] == (len(asked) if rule.confidence in BY_LOGITS else len(deepest))


def test_static_exits_have_nothing_above_them(calls: collections.Counter[tuple[str, int]]) -> None:
    """With static exits no layer computes states, keys or values above them, since nothing reads these."""
    results = serve(build_checkpoint(_CONFIG), ExitRule(confidence="static"), _PROMPTS[:3], 2 / _DEPTH)
    jax.effects_barrier()
    tokens = sum(result.length for result in results)
    methods = ("decoder_layer", "self_keys_values")
    expected = {**{(method, layer): tokens for method in methods for layer in (1, 2)}, ("head_inputs", 0): tokens}
    assert dict(calls) == expected
