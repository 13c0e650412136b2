"""The sweep against one prompt and threshold at a time, its memory, and its work."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from calm_beam.decoding import batch, compilation
from calm_beam.decoding.branches import Branch, PromptResult, Request, sweep_branches
from calm_beam.decoding.compilation import CompileTime
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.engine import Work
from calm_beam.decoding.kv_cache import BranchTree
from calm_beam.decoding.xla import engine, tiles
from calm_beam.decoding.xla import steps as device_steps
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.schedules import SCHEDULES
from calm_beam.model import T5Config
from calm_beam.model.native import library
from tests.builders import (
    BY_LOGITS,
    SERVABLE,
    build_arrays,
    build_checkpoint,
    build_config,
    build_prompts,
    build_rule,
    checkpoint_of,
)
from tests.calm_beam.decoding.decoders import DECODERS, LAYER_ENDS, STEPS, assert_all_same, assert_same, in_order
from tests.instruction_sets import needs_native
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("strict_promotion")

_CONFIG = build_config(exit_classifier=2)
# Everything that the first is not.
_OTHER = build_config(exit_classifier=1, tied_head=True, gated_mlp=False, num_decoder_layers=3, vocab_size=128)
_BRANCHES = 8
_SERVABLE = tuple(
    build_rule(confidence, state_propagation=propagation, min_exit_layer=lowest, exit_interval=interval)
    for confidence in SERVABLE
    for propagation in ("from_exit", "from_first_exit", "projected")
    for lowest, interval in ((1, 1), (1, 2), (2, 1))
)
# Every measure, every set of exits, and every propagation twice: the single decoder compiles each again.
_FEW = tuple(
    build_rule(confidence, state_propagation=propagation, min_exit_layer=lowest, exit_interval=interval)
    for confidence, propagation, lowest, interval in (
        ("softmax", "from_exit", 1, 1),
        ("softmax_max", "projected", 2, 1),
        ("state", "from_first_exit", 1, 2),
        ("classifier", "from_first_exit", 2, 1),
        ("classifier", "projected", 1, 1),
        ("static", "from_exit", 1, 2),
        ("entropy", "from_exit", 1, 1),
        ("patience", "from_exit", 1, 1),
    )
)


def _name(rule: ExitRule) -> str:
    return f"{rule.confidence}-{rule.state_propagation}-{rule.min_exit_layer}-{rule.exit_interval}"


_PROMPTS = build_prompts(4, 9, 1, 30, 6, 2, 13)


def _grid(seed: int, *, branches: int = _BRANCHES) -> tuple[float, ...]:
    """Returns random thresholds, with 1 and 0, some close together, some equal."""
    generator = np.random.default_rng(seed)
    inner = generator.random(branches - 3).round(2)
    inner[1] = inner[0]
    return (1.0, *sorted([*inner.tolist(), float(inner[-1]) / 2], reverse=True)[: branches - 3], 0.0)


def _shared(
    rule: ExitRule,
    prompts: Sequence[Sequence[int]] = _PROMPTS,
    *,
    config: T5Config = _CONFIG,
    arrays: dict[str, np.ndarray] | None = None,
    seed: int = 0,
    thresholds: Sequence[float] | None = None,
    slots: int = 7,
    tokens: int = 100_000,
    exit_head: str = "exact",
) -> tuple[list[PromptResult], Work]:
    checkpoint = checkpoint_of(config, arrays) if arrays else build_checkpoint(config, seed=seed)
    sweep = Decoder(
        checkpoint,
        sweep_branches(rule, _grid(seed) if thresholds is None else thresholds, max_decode_length=STEPS),
        max_input_length=64,
        batch_size=slots,
        max_cache_tokens=tokens,
        exit_head=exit_head,
    )
    return in_order(sweep.decode(prompts), len(prompts)), sweep.work


@functools.cache
def _default() -> tuple[list[PromptResult], Work]:
    return _shared(ExitRule())


def _check_against_served(rule: ExitRule, config: T5Config, seeds: Sequence[int]) -> None:
    schedules = tuple(SCHEDULES) if rule.confidence != "static" else ("constant",)
    seen: list[PromptResult] = []
    for (place, schedule), seed in itertools.product(enumerate(schedules), seeds):
        scheduled = dataclasses.replace(rule, schedule=schedule, tau=None if schedule == "constant" else 1.0 + place)
        results, _ = _shared(scheduled, config=config, seed=seed)
        checkpoint = build_checkpoint(config, seed=seed)
        thresholds = _grid(seed)
        served = DECODERS["served"].decode(checkpoint, scheduled, _PROMPTS, thresholds=thresholds)
        if rule.patience is not None:
            # The full model by itself tests the last layer alone, which agrees with no other.
            confidences = [
                np.vstack([one.confidences[:1], other.confidences[1:]])
                for one, other in zip(results, served, strict=True)
            ]
            served = [dataclasses.replace(one, confidences=made) for one, made in zip(served, confidences, strict=True)]
        assert_all_same(results, served)
        seen += results
    # Otherwise there would be nothing to compare. Static exits differ between branches only, and so do others where two
    # layers may exit, as in the other model with every second layer.
    least = 2 if rule.confidence == "static" or config == _OTHER else 4
    assert len({tuple(row) for result in seen for row in result.exit_layers.tolist()}) >= least
    if config == _CONFIG:
        # The other model never ends an output itself, nor does this one with every seed.
        assert len({length for result in seen for length in result.lengths.tolist()}) > 1


@pytest.mark.parametrize("rule", sampled(_FEW, keep=(0, 2, 4, 7)), ids=_name)
def test_shared_work_changes_nothing(rule: ExitRule) -> None:
    """Under every schedule, tokens, exit layers, lengths and confidences are those of one prompt at a time."""
    _check_against_served(rule, _CONFIG, (0, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", [rule for rule in _SERVABLE if rule not in _FEW], ids=_name)
def test_shared_work_changes_nothing_under_any_rule(rule: ExitRule) -> None:
    """They are so for every other measure, propagation and set of exits."""
    _check_against_served(rule, _CONFIG, (0, 1, 2, 3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", _FEW, ids=_name)
def test_shared_work_changes_nothing_in_another_kind_of_model_under_any_rule(rule: ExitRule) -> None:
    """They are so for the other model."""
    _check_against_served(rule, _OTHER, (0, 1, 2, 3))


def _check_certified(rule: ExitRule, seed: int, config: T5Config = _CONFIG) -> Work:
    """Checks that tokens, exits and lengths are the exact head's; returns the counted work."""
    certified, work = _shared(rule, config=config, seed=seed, exit_head="int8")
    exact, exact_work = _shared(rule, config=config, seed=seed)
    for one, other in zip(certified, exact, strict=True):
        for field in ("tokens", "exit_layers", "lengths", "is_finite"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        assert one.max_rejected_confidence is not None
        assert other.max_rejected_confidence is not None
        # An upper bound: no lower threshold shares a step that it would not.
        assert (one.max_rejected_confidence >= other.max_rejected_confidence - 1e-6).all()
        np.testing.assert_allclose(one.confidences, other.confidences, rtol=0, atol=0.2)
    assert work.certified_rows == exact_work.projection_rows
    assert work.layer_rows == exact_work.layer_rows
    return work


@needs_native
@pytest.mark.parametrize("rule", sampled(_FEW, keep=(0, 3)), ids=_name)
def test_a_certified_head_asks_the_exact_one_about_few_rows(rule: ExitRule) -> None:
    """A certified head calls the exact one for few rows, and its upper bounds give the lazy sweep no less."""
    work = _check_certified(rule, 0)
    if rule.confidence in BY_LOGITS:
        # A confidence cannot be separated from all eight thresholds, some of which are close together.
        assert work.projection_rows < 0.6 * work.certified_rows
    else:
        assert work.projection_rows < 0.1 * work.certified_rows


@needs_native
@pytest.mark.parametrize("confidence", ["softmax", "entropy"])
def test_what_is_open_is_asked_again(confidence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code tests open rows again, eight at a time: fewer go to the exact head, and outputs are unchanged."""
    config = build_config(vocab_size=2048)
    sizes: list[tuple[bool, int]] = []
    certify_rows = device_steps.certify_rows

    def watched(*arguments: Any, is_thorough: bool, rows: np.ndarray, **others: Any) -> Any:
        sizes.append((is_thorough, len(rows)))
        return certify_rows(*arguments, is_thorough=is_thorough, rows=rows, **others)

    monkeypatch.setattr(device_steps, "certify_rows", watched)
    rule = build_rule(confidence)
    again, work = _shared(rule, config=config, exit_head="int8")
    assert {size for is_thorough, size in sizes if is_thorough} == {8}
    monkeypatch.setattr(engine, "_CERTIFYING", (False,))
    once, work_of_once = _shared(rule, config=config, exit_head="int8")
    for one, other in zip(again, once, strict=True):
        assert_same(one, other, confidences_within=0.2)
    assert 0 < work_of_once.projection_rows < work_of_once.certified_rows
    assert work.projection_rows < 0.7 * work_of_once.projection_rows
    assert work.certified_rows == work_of_once.certified_rows


@pytest.mark.parametrize("exit_head", ["exact", pytest.param("int8", marks=needs_native)])
def test_the_warm_up_leaves_nothing_to_compile(exit_head: str) -> None:
    """After the warm-up, with any head, prompts of any width and number need no compilation."""
    decoder = Decoder(
        build_checkpoint(_CONFIG),
        [Branch.at(ExitRule(), 0.5, max_decode_length=STEPS)],
        max_input_length=64,
        # A size for which no other test has compiled anything.
        batch_size=21,
        max_cache_tokens=100_000,
        exit_head=exit_head,
    )
    opened = decoder.open_batch()
    opened.warm_up()
    with CompileTime() as compiled:
        opened.warm_up()
        for count in (1, 6, 21):
            queues = opened.queues()
            for prompt in build_prompts(*range(1, 64, 3))[:count]:
                request = Request(prompt)
                queues[opened.width_for(request)].append(request)
            while any(queues.values()) or opened.is_busy():
                opened.admit(queues)
                assert all(result.is_finite for _, result in opened.step())
    assert compiled.seconds() == 0


@needs_native
@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", _SERVABLE, ids=_name)
def test_a_certified_head_changes_nothing_under_any_rule(rule: ExitRule) -> None:
    """They are so for every measure, propagation and set of exits, in both kinds of model, with a certified head."""
    for config, seed in itertools.product((_CONFIG, _OTHER), (0, 1)):
        _check_certified(rule, seed, config)


def test_thresholds_in_any_order_give_the_same() -> None:
    """Unsorted thresholds give the same outputs by the same work."""
    order = np.random.default_rng(3).permutation(len(_grid(0)))
    results, work = _shared(ExitRule(), thresholds=[_grid(0)[place] for place in order])
    for result, expected in zip(results, _default()[0], strict=True):
        np.testing.assert_array_equal(result.tokens[1:], expected.tokens[1 + order])
        np.testing.assert_array_equal(result.exit_layers[1:], expected.exit_layers[1 + order])
    assert work.layer_rows == _default()[1].layer_rows


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (tiles, {"_HOST_ROWS": 8}),
        (tiles, {"_HOST_STEPS": 2, "_HOST_SOURCE": 8, "_HOST_RANKS": 1, "_HOST_GROUPS": 1}),
    ],
)
def test_xlas_tiles_and_blocks_may_have_any_size(
    module: Any, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With XLA, rows of several tiles, and paths and sources of many blocks, give the same results."""
    expected = _default()[0]
    monkeypatch.setenv(library.VARIABLE, "none")
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    jax.clear_caches()
    assert_all_same(_shared(ExitRule())[0], expected)
    jax.clear_caches()


def test_stores_that_grow_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that begin too small grow without losing a key or value."""
    assert _default()
    sizes = []

    def small(*, capacity: int, **options: Any) -> Any:
        sizes.append(capacity)
        return BranchTree(capacity=70, **options)

    monkeypatch.setattr(batch, "BranchTree", small)
    assert_all_same(_shared(ExitRule())[0], _default()[0])
    assert sizes[0] > 70


def test_a_small_budget_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted prompts begin again later, and nothing is lost, doubled or changed."""
    left = []
    make_room = batch.Batch.make_room

    def counted(crowded: Any) -> Iterator[Request]:
        for leaving in make_room(crowded):
            left.append(leaving)
            yield leaving

    monkeypatch.setattr(batch.Batch, "make_room", counted)
    # Short prompts with many branches: there is room for more sources at a time than for what their branches may need.
    prompts, thresholds = build_prompts(*[4, 3, 1, 5, 6, 2, 7] * 3), tuple(np.linspace(1, 0, 40).tolist())
    expected, least = _shared(ExitRule(), prompts, seed=2, thresholds=thresholds, slots=14)
    assert not left
    results, work = _shared(ExitRule(), prompts, seed=2, thresholds=thresholds, slots=14, tokens=650)
    assert_all_same(results, expected)
    assert left
    assert work.layer_rows > least.layer_rows
    assert (work.prompts, work.tokens) == (least.prompts, least.tokens)


@pytest.mark.parametrize("message", ["RESOURCE_EXHAUSTED: Out of memory", "INTERNAL: something else"])
def test_other_errors_are_not_swallowed(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not a lack of memory, or one that halving cannot avoid, fails the sweep."""

    def broken(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError(message)

    for module, name in LAYER_ENDS:
        monkeypatch.setattr(module, name, broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        _shared(ExitRule(), slots=1, tokens=500)


@pytest.mark.parametrize("confidence", ["softmax", "state"])
def test_a_broken_prompt_leaves_nothing_behind(confidence: str) -> None:
    """NaN does not change rows in the same batch, or later prompts in its slot, nodes and source."""
    arrays = build_arrays(_CONFIG, 0)
    # No output has the token 63, so it breaks prompts only.
    arrays["decoder/logits_dense/kernel"][:, 63] = 0
    whole = {**arrays, "token_embedder/embedding": arrays["token_embedder/embedding"].copy()}
    arrays["token_embedder/embedding"][63] = np.nan
    rule = ExitRule(confidence=confidence, state_propagation="from_first_exit")
    expected, _ = _shared(rule, arrays=whole)
    assert not any((result.tokens == 63).any() for result in expected)
    for slots in (1, 3):
        # The broken prompts are the longest of their width, hence the first.
        broken = [[63] * 31, [8, 63] * 15]
        results, _ = _shared(rule, [broken[0], *_PROMPTS[:4], broken[1], *_PROMPTS[4:]], arrays=arrays, slots=slots)
        assert [result.is_finite for result in results] == [index not in (0, 5) for index in range(9)]
        assert_all_same([results[index] for index in (1, 2, 3, 4, 6, 7, 8)], expected)


def test_the_full_model_alone_does_no_more_than_one_pass() -> None:
    """Without thresholds, every token runs each layer and the head once."""
    for rule in (ExitRule(), ExitRule(confidence="state")):
        results, work = _shared(rule, thresholds=())
        tokens = sum(int(result.lengths[0]) for result in results)
        depth = _CONFIG.num_decoder_layers
        assert dataclasses.replace(work, padded_rows=0, steps=0) == Work(
            prompts=7, tokens=tokens, layer_rows=tokens * depth, projection_rows=tokens
        )
        for result, expected in zip(results, _default()[0], strict=True):
            np.testing.assert_array_equal(result.tokens[0], expected.tokens[0])


def test_equal_thresholds_cost_as_much_as_one() -> None:
    """Five branches of one threshold are one branch's work, whatever it is."""
    one, work = _shared(ExitRule(), thresholds=(0.4,))
    five, same_work = _shared(ExitRule(), thresholds=(0.4,) * 5)
    assert same_work == work
    for single, several in zip(one, five, strict=True):
        np.testing.assert_array_equal(several.tokens[1:], np.broadcast_to(single.tokens[1], (5, STEPS)))


def _expected_work(results: Sequence[PromptResult], depth: int) -> tuple[int, int, int]:
    """Counts rows of layers, head and fills from the outputs alone, under `from_exit` and `state`.

    Branches share a row of layer i if they go through it in one state.
    """
    layer_rows = head_rows = fill_rows = 0
    for result in results:
        for step in range(STEPS):
            branches = np.flatnonzero(result.lengths > step).tolist()

            def key(branch: int, layer: int, step: int = step, result: PromptResult = result) -> tuple[int, ...]:
                exits = np.minimum(result.exit_layers[branch, :step], layer - 1)
                return (*result.tokens[branch, :step].tolist(), *exits.tolist())

            rows: dict[tuple[int, int], int] = {}
            for layer in range(1, depth + 1):
                first: dict[tuple[int, ...], int] = {}
                for branch in (branch for branch in branches if result.exit_layers[branch, step] >= layer):
                    rows[layer, branch] = first.setdefault(key(branch, layer), branch)
                layer_rows += len({row for (at, _), row in rows.items() if at == layer})
            exits = {branch: int(result.exit_layers[branch, step]) for branch in branches}
            states = {branch: (layer, rows[layer, branch]) for branch, layer in exits.items()}
            head_rows += len(set(states.values()))
            on = [branch for branch in branches if result.lengths[branch] > step + 1]
            fill_rows += sum(depth - layer for layer, _ in {states[branch] for branch in on})
    return layer_rows, head_rows, fill_rows


@pytest.mark.parametrize("seed", [0, 4])
def test_work_is_what_the_outputs_need(seed: int) -> None:
    """Rows of layers, head and fills are those counted by brute force from tokens and exit layers."""
    results, work = _shared(ExitRule(confidence="state"), seed=seed)
    counted = _expected_work(results, _CONFIG.num_decoder_layers)
    assert (work.layer_rows, work.projection_rows, work.fill_rows) == counted
    assert work.prompts == len(_PROMPTS)
    assert work.tokens == sum(int(result.lengths[0]) for result in results)
    # Each branch by itself would run the sum of its exit layers.
    alone = sum(int(result.exit_layers.sum()) for result in results)
    assert work.layer_rows < 0.8 * alone


def test_work_does_not_depend_on_the_batch() -> None:
    """With any number of slots the same rows are run; only padding and the number of steps differ."""
    work = _shared(ExitRule(), slots=3)[1]
    assert dataclasses.replace(work, padded_rows=0, steps=0) == dataclasses.replace(
        _default()[1], padded_rows=0, steps=0
    )


def test_few_prompts_have_room_for_eight() -> None:
    """At least eight prompts are held per width, unless slots or memory allow fewer, as each number compiles again."""
    held = compilation.places_by_width({32: 100, 64: 3}, tokens=10**6, slots=256)
    assert held == {32: 128, 64: 8}
    assert compilation.places_by_width({32: 100, 64: 3}, tokens=10**6, slots=4) == {32: 4, 64: 4}
    assert compilation.places_by_width({32: 100, 64: 3}, tokens=96, slots=256) == {32: 1, 64: 1}
