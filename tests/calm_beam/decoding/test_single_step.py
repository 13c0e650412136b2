"""Steps of one branch per prompt, in parts and as a whole: layers ahead of decisions are work, and change nothing."""

import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding import batch, step
from calm_beam.decoding.batch import engine_for
from calm_beam.decoding.branches import Branch, KnownOutput, PromptResult, Request
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.engine import Work
from calm_beam.exits.rule import ExitRule
from calm_beam.model import native_decoder
from calm_beam.model.native import library
from tests.builders import build_checkpoint, build_config, build_prompts, build_rule, checkpoint_of
from tests.calm_beam.decoding.decoders import STEPS, assert_same, in_order
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config

pytestmark = pytest.mark.usefixtures("strict_promotion")

_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=5, exit_classifier=2)
_DEPTH = _CONFIG.num_decoder_layers
_PROMPTS = build_prompts(4, 9, 1, 30, 6, 2, 13, 7, 8)
# Thresholds in turns, so that one batch holds several of them and the full model.
_THRESHOLDS = (0.9, 0.5, None, 0.2)
_RULES = (
    build_rule("softmax", state_propagation="from_exit"),
    build_rule("softmax_max", state_propagation="projected", exit_interval=2),
    build_rule("entropy", state_propagation="from_first_exit", min_exit_layer=2),
    build_rule("patience", state_propagation="from_first_exit"),
    build_rule("patience", patience=3, state_propagation="projected"),
    build_rule("state", state_propagation="from_first_exit"),
    build_rule("state", state_propagation="projected", min_exit_layer=2),
    build_rule("classifier", state_propagation="from_exit", exit_interval=2),
    build_rule("static", state_propagation="projected"),
)


@functools.cache
def _model() -> Checkpoint:
    return build_checkpoint(_CONFIG)


@functools.cache
def _model_with_heads() -> Checkpoint:
    return build_checkpoint(dataclasses.replace(_CONFIG, exit_norms=True, exit_heads=True))


@functools.cache
def _llama() -> Checkpoint:
    config = build_llama_config(vocab_size=64, num_decoder_layers=5, max_positions=64, end_ids=(1, 7))
    return checkpoint_of(config, build_llama_arrays(config, 1))


def _decoder(rule: ExitRule, threshold: float | None = None, checkpoint: Checkpoint | None = None) -> Decoder:
    return Decoder(
        checkpoint or _model(),
        [Branch.at(rule, threshold, max_decode_length=STEPS)],
        max_input_length=32,
        batch_size=6,
        max_cache_tokens=10_000,
    )


def _decoded(rule: ExitRule, **options: Any) -> tuple[list[PromptResult], Work]:
    """Returns the outputs of one batch with all these thresholds."""
    decoder = _decoder(rule, **options)
    branches = [Branch.at(rule, threshold, max_decode_length=STEPS) for threshold in _THRESHOLDS]
    requests = [
        Request(prompt, branches=[branch]) for prompt, branch in zip(_PROMPTS, itertools.cycle(branches), strict=False)
    ]
    return in_order(decoder.decode(requests), len(requests)), decoder.work


def _with_known(prompts: Sequence[Sequence[int]], known: Sequence[KnownOutput]) -> list[Request]:
    return [Request(prompt, known=each) for prompt, each in zip(prompts, known, strict=True)]


def _known(result: PromptResult) -> KnownOutput:
    length = result.lengths[0]
    assert result.max_rejected_confidence is not None
    return KnownOutput(
        tokens=result.tokens[0, :length],
        exit_layers=result.exit_layers[0, :length],
        confidences=result.confidences[0, :length],
        max_rejected_confidence=result.max_rejected_confidence[0, :length],
    )


def _assert_equal(one: PromptResult, other: PromptResult) -> None:
    for field in ("tokens", "exit_layers", "confidences", "max_rejected_confidence", "lengths", "is_finite"):
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


def _both_ways(
    rule: ExitRule, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[tuple[list[PromptResult], Work]]:
    """Returns the outputs with an exit test after every layer, and with as many layers run ahead as possible."""
    monkeypatch.setattr(native_decoder, "CACHED_WEIGHTS", 0)
    found = []
    for most_ahead in (-1.0, float("inf")):
        monkeypatch.setattr(step, "_MOST_AHEAD", most_ahead)
        found.append(_decoded(rule, **options))
    return found


@pytest.mark.skipif(not library.is_available(), reason="this machine has no native code")
@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: f"{rule.confidence}-{rule.state_propagation}")
def test_what_is_run_ahead_changes_nothing(rule: ExitRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """With native code, running ahead changes no bit; work that outputs need is counted apart from wasted work."""
    (asked, work), (ahead, more_work) = _both_ways(rule, monkeypatch)
    for one, other in zip(asked, ahead, strict=True):
        _assert_equal(one, other)
    needed = sum(int(result.exit_layers.sum()) for result in asked)
    if rule.confidence != "static":
        assert len({layer for result in asked for layer in result.exit_layers.ravel().tolist()} - {0}) >= 2
    assert work.ahead_rows == 0
    assert more_work.ahead_rows > 0
    assert work.layer_rows == more_work.layer_rows - more_work.ahead_rows == needed
    assert work.projection_rows == more_work.projection_rows - more_work.ahead_decisions
    assert work.fill_rows == more_work.fill_rows


@pytest.mark.skipif(not library.is_available(), reason="this machine has no native code")
@pytest.mark.parametrize(
    ("rule", "family"),
    [
        *((rule, "t5") for rule in _RULES if rule.confidence != "patience"),
        *itertools.product([_RULES[0], _RULES[2], _RULES[5]], ["t5 with heads", "llama"]),
    ],
    ids=lambda each: f"{each.confidence}-{each.state_propagation}" if isinstance(each, ExitRule) else each,
)
def test_whole_steps_are_their_parts(rule: ExitRule, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps give the bits of their parts, with as many rows run, for any model, also with a known prefix."""
    model = {"t5": _model, "t5 with heads": _model_with_heads, "llama": _llama}[family]()
    taken = []
    run_step = library.Stack.run_step

    def watched(*arguments: Any, **options: Any) -> int:
        taken.append(options["known_exits"] is not None)
        return run_step(*arguments, **options)

    monkeypatch.setattr(library.Stack, "run_step", watched)
    monkeypatch.setattr(step, "_MOST_AHEAD", -1.0)
    again, known_before, counts = [], [], []
    for cached in (1 << 18, 0):
        monkeypatch.setattr(native_decoder, "CACHED_WEIGHTS", cached)
        again.append(_decoded(rule, checkpoint=model))
        known = [_known(result) for result in in_order(_decoder(rule, 0.9, model).decode(_PROMPTS), len(_PROMPTS))]
        decoder = _decoder(rule, 0.85, model)
        known_before.append((in_order(decoder.decode(_with_known(_PROMPTS, known)), len(_PROMPTS)), decoder.work))
        # The second time, no new rows are added. Of a static output, all of it is known.
        assert set(taken) == ({False} if rule.confidence == "static" else {False, True})
        counts.append(len(taken))
    assert counts[0] == counts[1]
    for (whole, work), (parts, same_work) in (again, known_before):
        for one, other in zip(whole, parts, strict=True):
            _assert_equal(one, other)
        assert work == same_work
    if rule.confidence != "static":
        assert len({layer for result in again[0][0] for layer in result.exit_layers.ravel().tolist()} - {0}) >= 2


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("rule", [_RULES[0], _RULES[5]], ids=lambda rule: rule.confidence)
def test_what_was_decoded_in_is_given_back_at_once(
    rule: ExitRule, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's megabytes or gigabytes are freed at once, without the garbage collector."""
    if not is_native:
        monkeypatch.setenv(library.VARIABLE, "none")
    engines: list[weakref.ref[Any]] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        engine = engine_for(*arguments, **options)
        engines.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(batch, "engine_for", watched)
    gc.collect()
    gc.disable()
    try:
        _decoded(rule)
        assert [engine() for engine in engines] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("rule", [_RULES[0], _RULES[4], _RULES[5]], ids=lambda rule: rule.confidence)
def test_nor_does_it_for_xla(rule: ExitRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA, whose rows have the same numbers in every batch, gives the bits of running ahead too."""
    monkeypatch.setenv(library.VARIABLE, "none")
    (asked, work), (ahead, more_work) = _both_ways(rule, monkeypatch)
    for one, other in zip(asked, ahead, strict=True):
        assert_same(one, other)
    assert work.layer_rows == more_work.layer_rows - more_work.ahead_rows
    assert more_work.ahead_rows > 0


def test_nor_where_the_first_step_is_not_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for a decoder-only model, whose first step reads a prompt's last token again."""
    (asked, _), (ahead, work) = _both_ways(build_rule("softmax"), monkeypatch, checkpoint=_llama())
    for one, other in zip(asked, ahead, strict=True):
        assert_same(one, other)
    assert work.ahead_rows > 0


@pytest.mark.parametrize("rule", [_RULES[0], _RULES[7]], ids=lambda rule: rule.confidence)
def test_known_steps_are_not_decided_again(rule: ExitRule) -> None:
    """Steps shared with the known output at a higher threshold are taken from it, and the rest is decoded."""
    before = in_order(_decoder(rule, 0.9).decode(_PROMPTS), len(_PROMPTS))
    known = [_known(result) for result in before]
    again, going_on = _decoder(rule, 0.5), _decoder(rule, 0.5)
    expected = in_order(again.decode(_PROMPTS), len(_PROMPTS))
    found = in_order(going_on.decode(_with_known(_PROMPTS, known)), len(_PROMPTS))
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)
    assert sum(int(each.steps_shared(np.full((STEPS, 1), 0.5, np.float32))[0]) for each in known) > 0
    decisions = [decoder.work.projection_rows for decoder in (again, going_on)]
    assert decisions[1] < decisions[0]


def test_prompts_that_end_without_a_step_leave_nothing_behind() -> None:
    """Outputs that are known whole free their places before their sources are read."""
    prompts = build_prompts(*range(1, 25))
    rule = build_rule("softmax")
    before = in_order(_decoder(rule, 0.9).decode(prompts), len(prompts))
    nothing_left = [index % 3 > 0 for index in range(len(prompts))]
    known = [
        dataclasses.replace(
            each, max_rejected_confidence=np.full_like(each.max_rejected_confidence, -1.0 if is_whole else 1.0)
        )
        for each, is_whole in zip(map(_known, before), nothing_left, strict=True)
    ]
    expected = in_order(_decoder(rule, 0.5).decode(prompts), len(prompts))
    found = in_order(_decoder(rule, 0.5).decode(_with_known(prompts, known)), len(prompts))
    for index, is_whole in enumerate(nothing_left):
        assert_same(found[index], before[index] if is_whole else expected[index])


def test_layers_are_learned_to_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first every layer is tested; once almost no row exits, none is tested."""
    monkeypatch.setattr(step, "_MOST_AHEAD", 3.0)
    monkeypatch.setattr(native_decoder, "CACHED_WEIGHTS", 0)
    decoder = _decoder(build_rule("static"), 1.0)
    asked = []
    run = step.SingleStep._run

    def watched(step: Any, layers: range, *others: Any) -> Any:
        asked.append(layers)
        return run(step, layers, *others)

    monkeypatch.setattr(step.SingleStep, "_run", watched)
    assert len(dict(decoder.decode(_PROMPTS[:6]))) == 6
    assert asked[0] == range(1, 2)
    assert asked[-1] == range(1, _DEPTH + 1)
