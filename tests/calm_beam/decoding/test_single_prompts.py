"""Single prompts by native code, which are those of a batch to the bit."""

import concurrent.futures
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import Branch, BranchResult, EndsOutput
from calm_beam.decoding.decoder import BranchDecoder, Decoder
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.decoding.single_prompts import NativeLoop, single_prompt_decoder
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import EngineRecord
from calm_beam.model import native_decoder
from tests.builders import build_checkpoint, build_config, build_prompts, build_rule, checkpoint_of
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config
from tests.instruction_sets import TUNED

from .decoders import LONGEST_PROMPT, STEPS, in_order

_CONFIG = build_config(num_encoder_layers=2, num_decoder_layers=3, exit_classifier=2)
_LLAMA = build_llama_config(vocab_size=64, num_decoder_layers=3, max_positions=128)
_MODELS = {
    "t5": build_checkpoint(_CONFIG),
    "t5 with heads": build_checkpoint(
        build_config(num_decoder_layers=3, tied_head=False, exit_heads=True, exit_norms=True, gated_mlp=False)
    ),
    "llama": checkpoint_of(_LLAMA, build_llama_arrays(_LLAMA, 1)),
}
_RULES = (
    ExitRule(),
    ExitRule(confidence="softmax_max", state_propagation="from_first_exit", min_exit_layer=2),
    ExitRule(confidence="state", state_propagation="from_first_exit", schedule="decay", tau=4.0),
    ExitRule(confidence="classifier", schedule="decay_t5x", tau=4.0, exit_interval=2),
    build_rule("entropy"),
    ExitRule(confidence="static"),
)
_PROMPTS = build_prompts(4, 9, 1, 30, 64, 6, 2, 13)
_NATIVE = EngineRecord(name="native", instructions=None, head="exact", prefill="native")
_FIELDS = ("tokens", "exit_layers", "confidences", "max_rejected_confidence", "length", "is_finite")


def _loop(checkpoint: Checkpoint, branch: Branch, **options: Any) -> NativeLoop:
    decoder = single_prompt_decoder(checkpoint, branch, engine="native", max_input_length=LONGEST_PROMPT, **options)
    assert isinstance(decoder, NativeLoop)
    return decoder


def _in_batch(checkpoint: Checkpoint, branch: Branch, ends_output: EndsOutput | None = None) -> list[BranchResult]:
    decoder = Decoder(
        checkpoint,
        [branch],
        engine="native",
        max_input_length=LONGEST_PROMPT,
        batch_size=3,
        ends_output=ends_output,
    )
    return [result.branch(0) for result in in_order(decoder.decode(_PROMPTS), len(_PROMPTS))]


def _assert_same(one: BranchResult, other: BranchResult) -> None:
    for field in _FIELDS:
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    ("family", "rule"),
    [*(("t5", rule) for rule in _RULES), *itertools.product(["t5 with heads", "llama"], [_RULES[0], _RULES[2]])],
    ids=lambda each: f"{each.confidence}-{each.state_propagation}" if isinstance(each, ExitRule) else each,
)
def test_they_have_the_bits_of_a_batch(family: str, rule: ExitRule) -> None:
    """At several thresholds and for the full model, the loop gives every number of a batch."""
    checkpoint = _MODELS[family]
    first = _loop(checkpoint, Branch.at(rule, None, max_decode_length=STEPS))
    exits = set()
    for threshold in (None, 0.9, 0.5, 0.0):
        branch = Branch.at(rule, threshold, max_decode_length=STEPS)
        found = in_order(first.at(branch).decode(_PROMPTS), len(_PROMPTS))
        for one, other in zip(found, _in_batch(checkpoint, branch), strict=True):
            _assert_same(one, other)
            exits.update(one.exit_layers[: one.length].tolist())
    assert len(exits) >= 2


@pytest.mark.skipif(not TUNED, reason="this machine has no native code that is taken by default")
def test_an_output_that_ends_otherwise_is_cut() -> None:
    """A stop string ends an output where it ends that of a batch."""
    checkpoint = _MODELS["t5"]

    def ends(tokens: Sequence[int]) -> bool:
        return len(tokens) >= 4 and tokens[-1] % 2 == 0

    branch = Branch.at(ExitRule(), 0.5, max_decode_length=STEPS)
    found = in_order(_loop(checkpoint, branch, ends_output=ends).decode(_PROMPTS), len(_PROMPTS))
    expected = _in_batch(checkpoint, branch, ends)
    assert {result.length for result in found} - {STEPS}
    for one, other in zip(found, expected, strict=True):
        _assert_same(one, other)


@pytest.mark.skipif(not TUNED, reason="this machine has no native code that is taken by default")
def test_threads_share_a_decoder() -> None:
    """Several threads with one decoder get the outputs of one thread."""
    decoder = _loop(_MODELS["t5"], Branch.at(ExitRule(), 0.5, max_decode_length=STEPS))
    expected = in_order(decoder.decode(_PROMPTS), len(_PROMPTS))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda prompt: dict(decoder.decode([prompt]))[0], _PROMPTS * 4))
    for result, alone in zip(results, expected * 4, strict=True):
        _assert_same(result, alone)


@pytest.mark.skipif(not TUNED, reason="this machine has no native code that is taken by default")
def test_a_broken_prompt_is_not_finite_and_leaves_no_trace() -> None:
    """A prompt with a token whose embedding is NaN is not finite, and the next one is as before."""
    checkpoint = _MODELS["t5"]
    arrays = {name: np.array(array) for name, array in checkpoint.arrays.items()}
    branch = Branch.at(ExitRule(), 0.5, max_decode_length=STEPS)
    sound = _loop(checkpoint, branch)
    unused = max({*range(2, _CONFIG.vocab_size)} - {token for prompt in _PROMPTS for token in prompt})
    arrays["token_embedder/embedding"][unused] = np.nan
    decoder = _loop(checkpoint_of(_CONFIG, arrays), branch)
    ((_, broken),) = decoder.decode([(unused, 5, 1)])
    assert not broken.is_finite
    ((_, after),) = decoder.decode([_PROMPTS[1]])
    ((_, expected),) = sound.decode([_PROMPTS[1]])
    _assert_same(after, expected)


@pytest.mark.skipif(not TUNED, reason="this machine has no native code that is taken by default")
def test_an_unknown_id_is_not_finite() -> None:
    """A prompt that ends with an unknown id, which a decoder-only model reads first, is reported."""
    branch = Branch.at(ExitRule(), 0.5, max_decode_length=STEPS)
    decoder = _loop(_MODELS["llama"], branch)
    ((_, expected),) = decoder.decode([_PROMPTS[1]])
    for unknown in (64, 10**9):
        ((_, broken),) = decoder.decode([(5, 9, unknown)])
        assert not broken.is_finite
    ((_, after),) = decoder.decode([_PROMPTS[1]])
    _assert_same(after, expected)


@pytest.mark.parametrize(("changes", "message"), [({"max_input_length": 0}, "must be at least 1, got 0")])
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    """Sizes below 1 are refused."""
    with pytest.raises(ValueError, match=message):
        NativeLoop(_MODELS["t5"], Branch.at(ExitRule(), 0.5, max_decode_length=STEPS), engine=_NATIVE, **changes)


def test_rules_that_need_the_full_model_are_refused() -> None:
    """A rule that runs every layer anyway is refused."""
    branch = Branch.at(ExitRule(confidence="oracle"), 0.5, max_decode_length=STEPS)
    with pytest.raises(ValueError, match="nothing can be skipped with confidence 'oracle'"):
        NativeLoop(_MODELS["t5"], branch, engine=_NATIVE)


def test_xla_has_its_own_loop() -> None:
    """If XLA decodes, so does its loop on the device."""
    branch = Branch.at(ExitRule(), 0.5, max_decode_length=STEPS)
    assert isinstance(single_prompt_decoder(_MODELS["t5"], branch, engine="xla"), EarlyExitDecoder)


_ONLY_IN_BATCHES = [build_rule("patience"), ExitRule(state_propagation="projected"), build_rule("oracle")]


def _of_batches(model: str, branch: Branch, **options: Any) -> BranchDecoder:
    decoder = single_prompt_decoder(_MODELS[model], branch, engine="native", max_input_length=LONGEST_PROMPT, **options)
    assert isinstance(decoder, BranchDecoder)
    return decoder


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("rule", _ONLY_IN_BATCHES[:2], ids=["patience", "projected"])
def test_rules_without_whole_steps_are_decoded_in_batches_of_one(rule: ExitRule) -> None:
    """Measures that compare layers, and keys and values that are copied: a prompt has the bits of a batch."""
    branch = Branch.at(rule, 0.5, max_decode_length=STEPS)
    decoder = _of_batches("t5", branch)
    assert decoder.engine.name == "native"
    found = in_order(decoder.decode(_PROMPTS), len(_PROMPTS))
    for one, other in zip(found, _in_batch(_MODELS["t5"], branch), strict=True):
        _assert_same(one, other)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("model", ["t5", "llama"])
def test_large_models_are_decoded_in_batches_of_one(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a layer's weights fit in no cache: at several thresholds, by threads that share the decoder."""
    monkeypatch.setattr(native_decoder, "CACHED_WEIGHTS", 0)
    branches = [Branch.at(ExitRule(), threshold, max_decode_length=STEPS) for threshold in (0.5, 0.02)]
    first = _of_batches(model, branches[0])
    decoders = [first, first.at(branches[1])]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [(place, ids) for ids in _PROMPTS for place in range(2)]
        found = list(pool.map(lambda each: next(iter(decoders[each[0]].decode([each[1]])))[1], asked))
    for place, branch in enumerate(branches):
        for one, other in zip(found[place::2], _in_batch(_MODELS[model], branch), strict=True):
            _assert_same(one, other)


def test_in_batches_of_one_the_same_is_refused() -> None:
    """Rules that skip nothing, and prompts that are too long."""
    skips_nothing = Branch.at(_ONLY_IN_BATCHES[2], 0.5, max_decode_length=STEPS)
    with pytest.raises(ValueError, match="nothing can be skipped with confidence 'oracle'"):
        single_prompt_decoder(_MODELS["t5"], skips_nothing, max_input_length=LONGEST_PROMPT)
    if TUNED:
        decoder = _of_batches("t5", Branch.at(_ONLY_IN_BATCHES[0], 0.5, max_decode_length=STEPS))
        with pytest.raises(ValueError, match=f"must have 1 to {LONGEST_PROMPT} tokens"):
            list(decoder.decode([(5,) * (LONGEST_PROMPT + 1)]))
