"""The contract of every decoder with decoder-only models: the outputs of plain numpy with complex rotary positions."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding import cpu
from calm_beam.decoding import decoder as group_decoder
from calm_beam.decoding.branches import PromptResult
from calm_beam.decoding.xla import steps as device_steps
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.exits.rule import ExitRule
from calm_beam.model import parameter_shapes
from calm_beam.model.llama import LlamaConfig, RopeScaling, network
from calm_beam.precision import FLOAT32, Precision
from tests.builders import build_rule, checkpoint_of
from tests.calm_beam.decoding.decoders import DECODERS, STEPS, assert_all_same, assert_same, count_as_numpys
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config
from tests.instruction_sets import needs_native
from tests.numpy_decoder import Decoded
from tests.numpy_llama import NumpyLlama
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("strict_promotion")

_BFLOAT16 = Precision(dtype="bfloat16")
_DEPTH = 3
_CONFIG = build_llama_config(
    vocab_size=64,
    emb_dim=16,
    head_dim=8,
    mlp_dim=32,
    num_decoder_layers=_DEPTH,
    max_positions=128,
    end_ids=(1, 7),
    exit_classifier=2,
)
# Seed of the weights, by kind; each has outputs whose decisions are far from ties.
_KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (1, {}),
    "qwen2": (1, {"attention_bias": True, "tied_head": True, "num_kv_heads": 1}),
    "qwen3": (2, {"query_key_norms": True, "num_kv_heads": 4}),
    "mistral": (3, {"sliding_window": 5, "windowed_layers": (0, 1, 2)}),
    "some windows": (4, {"sliding_window": 3, "windowed_layers": (1,), "exit_classifier": 1}),
    "gemma": (10, {"scaled_embedding": True, "unit_offset_norms": True, "tied_head": True}),
    "linear": (6, {"rope_scaling": RopeScaling(kind="linear", factor=4.0), "rope_theta": 500.0}),
    "olmo2": (1, {"pre_norms": False, "post_norms": True, "query_key_norms": True, "whole_norms": True}),
    "granite, some values turned": (
        1,
        {"embedding_factor": 3.0, "residual_factor": 0.7, "query_factor": 0.3, "logits_divisor": 2.0, "turned_dim": 4},
    ),
    "smollm3": (1, {"unturned_layers": (1,), "tied_head": True}),
    "gemma3": (
        1,
        {
            **{"post_norms": True, "query_key_norms": True, "unit_offset_norms": True, "scaled_embedding": True},
            **{"sliding_window": 4, "windowed_layers": (0, 2), "local_rope_theta": 50.0, "query_factor": 0.3},
        },
    ),
    "gemma2": (
        1,
        {
            **{"post_norms": True, "unit_offset_norms": True, "scaled_embedding": True},
            **{"sliding_window": 4, "windowed_layers": (0, 2), "attention_cap": 2.0, "logits_cap": 10.0},
        },
    ),
    "longrope": (
        1,
        {
            "rope_scaling": RopeScaling(
                kind="longrope", original_max_positions=64, pair_factors=(1.0, 1.5, 3.0, 4.5), attention_factor=1.3
            ),
        },
    ),
    "query factor": (1, {"query_factor": 0.9}),
    "embedding factor": (1, {"embedding_factor": 3.0}),
    "logits divisor": (1, {"logits_divisor": 1.7}),
    "logits divisor, tied head": (1, {"logits_divisor": 1.4, "tied_head": True}),
    "mixtral": (2, {"num_experts": 4, "experts_per_token": 2, "normed_expert_weights": True}),
    "qwen3_moe": (7, {"num_experts": 8, "experts_per_token": 3, "query_key_norms": True, "tied_head": True}),
}
# Features that native code computes, each distinguished from the others.
_NATIVE_KINDS = [kind for kind in _KINDS if kind.startswith(("longrope", "query", "embedding", "logits"))]
_THRESHOLDS = (1.0, 0.93, 0.7, 0.5, 0.3, 0.0)
_RULES = (
    ExitRule(),
    ExitRule(state_propagation="projected", schedule="decay", tau=4.0),
    ExitRule(confidence="state", state_propagation="from_first_exit", min_exit_layer=2),
    ExitRule(confidence="state"),
    ExitRule(confidence="classifier", exit_interval=2),
    build_rule("entropy", state_propagation="from_first_exit"),
    build_rule("patience", state_propagation="projected"),
    ExitRule(confidence="softmax_max", schedule="decay_t5x", tau=2.0),
    ExitRule(confidence="static", state_propagation="projected"),
)
# Rules that need every layer for every token, which only the sweep decodes.
_FULL_MODEL_RULES = (
    ExitRule(confidence="oracle"),
    ExitRule(state_propagation="full_cache"),
    ExitRule(token_from="last_layer", state_propagation="from_first_exit"),
)


def _prompts() -> list[list[int]]:
    """Returns prompts of mixed lengths, in which 0 is a token like others; one is that token alone."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(0, 64, size=length).tolist() for length in (4, 9, 1, 33, 6, 2)]
    prompts[1][3] = prompts[3][-1] = prompts[5][0] = 0
    return [*prompts, [0]]


_PROMPTS = _prompts()
_every_decoder = pytest.mark.parametrize("decoder", DECODERS)


def _config(kind: str) -> LlamaConfig:
    return dataclasses.replace(_CONFIG, **_KINDS[kind][1])


@functools.cache
def _model(kind: str) -> Checkpoint:
    config = _config(kind)
    return checkpoint_of(config, build_llama_arrays(config, _KINDS[kind][0]))


@functools.cache
def _outputs(
    decoder: str, rule: ExitRule, kind: str, precision: Precision = FLOAT32, engine: str = "auto"
) -> tuple[PromptResult, ...]:
    return tuple(
        DECODERS[decoder].decode(
            _model(kind), rule, _PROMPTS, thresholds=_THRESHOLDS, precision=precision, engine=engine
        )
    )


@functools.cache
def _plain(kind: str, dtype: str) -> NumpyLlama:
    return NumpyLlama(_model(kind).config, _model(kind).arrays, dtype)


@functools.cache
def _by_numpy(
    rule: ExitRule, kind: str, prompt: tuple[int, ...], threshold: float | None, dtype: str = "float32"
) -> Decoded:
    decoded = _plain(kind, dtype).decode(prompt, rule, threshold, max_decode_length=STEPS)
    # So far from every tie that float32 must decide as float64 does.
    assert dtype != "float32" or (decoded.min_gap > 1e-4 and decoded.min_margin > 1e-5)
    return decoded


def _check(decoder: str, rule: ExitRule, kind: str, *, engine: str = "auto") -> None:
    results = _outputs(decoder, rule, kind, engine=engine)
    for prompt, result in zip(_PROMPTS, results, strict=True):
        assert result.is_finite
        for branch, threshold in enumerate((None, *_THRESHOLDS)):
            expected = _by_numpy(rule, kind, tuple(prompt), threshold)
            confidences = expected.confidences
            if decoder == "served" and threshold is None and rule.patience is not None:
                # The layers below the last one are not tested: it agrees with itself alone.
                confidences = [1 / rule.patience] * len(confidences)
            length = len(expected.tokens)
            assert result.tokens[branch].tolist() == expected.tokens + [0] * (STEPS - length)
            assert result.exit_layers[branch].tolist() == expected.exit_layers + [0] * (STEPS - length)
            np.testing.assert_allclose(result.confidences[branch, :length], confidences, rtol=0, atol=1e-4)
    # Otherwise the comparison would prove little: tokens exit everywhere, those of the first step too.
    seen = {layer for result in results for layer in result.exit_layers.ravel().tolist()} - {0}
    assert seen == set(rule.exit_layers(_DEPTH))
    assert {int(layer) for result in results for layer in result.exit_layers[:, 0]} >= {min(seen), _DEPTH}


@pytest.mark.parametrize(
    ("decoder", "rule"),
    [
        *(("sweep", rule) for rule in _FULL_MODEL_RULES),
        *sampled([("sweep", rule) for rule in _RULES], keep=(1, 2, 4)),
        *sampled([("served", rule) for rule in _RULES], keep=(0, 1, 6)),
        *sampled([("batched", rule) for rule in _RULES], keep=(5,)),
    ],
    ids=str,
)
def test_every_output_is_plain_numpys(decoder: str, rule: ExitRule) -> None:
    """Tokens, exit layers and confidences of every prompt and threshold, and of the full model, are plain numpy's."""
    _check(decoder, rule, "llama")


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        *sampled([("sweep", kind) for kind in list(_KINDS)[1:]], keep=(3, 6, 8, 9)),
        *sampled([("served", kind) for kind in list(_KINDS)[1:]], keep=(1, 10, 16)),
    ],
)
def test_every_kind_of_model_is_plain_numpys(decoder: str, kind: str) -> None:
    """Grouped and single key heads, biases, norms, windows, tied heads, scaled positions and experts match numpy."""
    _check(decoder, _RULES[0], kind)


@needs_native
@pytest.mark.parametrize("engine", ["native", "xla"])
@pytest.mark.parametrize("kind", _NATIVE_KINDS)
def test_each_engine_has_plain_numpys_outputs(engine: str, kind: str) -> None:
    """Each engine matches numpy for every feature of native code and every other kind of model."""
    assert _config(kind) != _CONFIG
    _check("sweep", _RULES[0], kind, engine=engine)


@needs_native
@pytest.mark.parametrize("kind", [kind for kind in _NATIVE_KINDS if kind.startswith("logits")])
def test_a_certified_head_divides_logits(kind: str) -> None:
    """With divided logits, a certified head gives the exact head's tokens and exit layers."""
    certified = DECODERS["sweep"].decode(
        _model(kind), _RULES[0], _PROMPTS, thresholds=_THRESHOLDS, exit_head="int8", engine="native"
    )
    for one, other in zip(certified, _outputs("sweep", _RULES[0], kind), strict=True):
        assert_same(one, other, confidences_within=0.2)


@pytest.mark.parametrize(
    ("decoder", "rule", "kind"),
    sampled(
        [
            *((decoder, rule, "llama") for rule in (_RULES[0], _RULES[1], _RULES[3]) for decoder in DECODERS),
            *(("sweep", _RULES[0], kind) for kind in list(_KINDS)[1:]),
        ],
        keep=(1, 13),
    ),
    ids=str,
)
def test_in_bfloat16_outputs_are_those_of_numpy_that_rounds_likewise(decoder: str, rule: ExitRule, kind: str) -> None:
    """But for the branches with a decision nearer a tie than two roundings are apart; those are counted."""
    compared = sum(
        count_as_numpys(
            result, [_by_numpy(rule, kind, tuple(prompt), threshold, "bfloat16") for threshold in (None, *_THRESHOLDS)]
        )
        for prompt, result in zip(_PROMPTS, _outputs(decoder, rule, kind, _BFLOAT16), strict=True)
    )
    assert compared > len(_PROMPTS) * len(_THRESHOLDS) / 3


@needs_native
@pytest.mark.parametrize("precision", [FLOAT32, _BFLOAT16], ids=str)
def test_a_certified_head_changes_nothing(precision: Precision) -> None:
    """With a certified head, tokens and exit layers are the exact head's, and confidences are near."""
    certified = DECODERS["sweep"].decode(
        _model("llama"), _RULES[0], _PROMPTS, thresholds=_THRESHOLDS, exit_head="int8", precision=precision
    )
    for one, other in zip(certified, _outputs("sweep", _RULES[0], "llama", precision), strict=True):
        assert_same(one, other, confidences_within=0.2)


def test_bfloat16_is_another_promise() -> None:
    """Rounding to bfloat16 changes confidences, and so outputs, which differ from float32's."""
    pairs = zip(*(_outputs("sweep", _RULES[0], "llama", precision) for precision in (FLOAT32, _BFLOAT16)), strict=True)
    changes = [np.abs(one.confidences[:, 0] - other.confidences[:, 0]).max() for one, other in pairs]
    assert 1e-4 < max(changes) < 0.1


def test_the_variants_differ() -> None:
    """The model, prompts and thresholds used here distinguish all state propagations."""
    rules = [ExitRule(state_propagation=name) for name in PROPAGATIONS]
    outputs = [
        [
            _by_numpy(rule, "llama", tuple(prompt), threshold).confidences
            for prompt in _PROMPTS
            for threshold in _THRESHOLDS
        ]
        for rule in rules
    ]
    for one, other in itertools.combinations(outputs, 2):
        assert one != other


@pytest.mark.parametrize("decoder", ["sweep", "served"])
def test_static_layers_are_those_of_a_shallower_model(decoder: str) -> None:
    """Threshold m / L gives the outputs of a model of the first m layers, prompt included."""
    rule = ExitRule(confidence="static")
    thresholds = [layers / _DEPTH for layers in range(1, _DEPTH + 1)]
    checkpoint = _model("llama")
    results = DECODERS[decoder].decode(checkpoint, rule, _PROMPTS, thresholds=thresholds)
    for layers in range(1, _DEPTH + 1):
        config = dataclasses.replace(_CONFIG, num_decoder_layers=layers)
        cut = NumpyLlama(config, {name: checkpoint.arrays[name] for name in parameter_shapes(config)})
        for prompt, result in zip(_PROMPTS, results, strict=True):
            decoded = cut.decode(prompt, ExitRule(), None, max_decode_length=STEPS)
            assert decoded.min_gap > 1e-4
            length = result.lengths[layers]
            assert result.tokens[layers, :length].tolist() == decoded.tokens
            assert set(result.exit_layers[layers, :length].tolist()) == {layers}


@_every_decoder
def test_every_end_id_ends_an_output(decoder: str) -> None:
    """Outputs end with any of the end ids, and nowhere else before the limit."""
    ends = set()
    for result in _outputs(decoder, _RULES[0], "llama"):
        for branch, length in enumerate(result.lengths.tolist()):
            tokens = result.tokens[branch, :length].tolist()
            assert not {1, 7} & set(tokens[:-1])
            if length < STEPS:
                ends.add(tokens[-1])
    assert ends == {1, 7}


@pytest.mark.parametrize(
    ("decoder", "precision"),
    sampled([(decoder, precision) for precision in (FLOAT32, _BFLOAT16) for decoder in DECODERS], keep=(1, 3)),
    ids=str,
)
def test_the_batch_does_not_matter(decoder: str, precision: Precision) -> None:
    """With any number of slots, any order, a prompt alone or twice, every prompt has the same outputs.

    In bfloat16 there is no such promise, since a sum may round to either side of a tie, which depends on the processor:
    at most one prompt in five may differ.
    """
    compared = differing = 0
    alone = _outputs(decoder, _RULES[0], "llama", precision)
    for batch_size, order in ((1, range(7)), (3, [6, 2, 0, 5, 1, 4, 3]), (8, [1, 4, 1])):
        results = DECODERS[decoder].decode(
            _model("llama"),
            _RULES[0],
            [_PROMPTS[index] for index in order],
            thresholds=_THRESHOLDS,
            batch_size=batch_size,
            precision=precision,
        )
        expected = [alone[index] for index in order]
        if precision == FLOAT32:
            assert_all_same(results, expected)
        for found, wanted in zip(results, expected, strict=True):
            compared += 1
            differing += any(
                (getattr(found, name) != getattr(wanted, name)).any() for name in ("tokens", "exit_layers")
            )
    assert differing <= compared / 5


@pytest.mark.parametrize(("decoder", "kind"), [("sweep", "some windows"), ("served", "llama")])
def test_long_prompts_in_chunks_have_the_outputs_of_whole_ones(
    decoder: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts padded to 32 and 64 positions, or 16 and 48, and prefilled in chunks of seven give the same outputs."""
    # Another model for the compiler, which would use the programs of whole prompts for these.
    config = dataclasses.replace(_config(kind), max_positions=129)
    checkpoint = checkpoint_of(config, _model(kind).arrays)
    seen = []

    def seven(config: LlamaConfig, *, rows: int, source: int) -> int:
        seen.append(source)
        return 7

    monkeypatch.setattr(network, "chunk_positions", seven)
    results = DECODERS[decoder].decode(checkpoint, _RULES[0], _PROMPTS, thresholds=_THRESHOLDS, engine="xla")
    assert set(seen) == ({32, 64} if decoder == "served" else {16, 48})
    assert_all_same(results, _outputs(decoder, _RULES[0], kind))


@pytest.mark.parametrize(("decoder", "kind"), [("sweep", "some windows"), ("batched", "llama")])
@pytest.mark.parametrize("engine", ["xla", pytest.param("native", marks=needs_native)])
def test_prompts_that_begin_alike_have_the_outputs_of_others(
    decoder: str, kind: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A common prefix of all prompts of a width is prefilled once; outputs are as without sharing.

    By native code they have the same bits.
    """
    generator = np.random.default_rng(3)
    begun = generator.integers(0, 64, size=36).tolist()
    prompts = [[*begun, *generator.integers(0, 64, size=1 + index % 9).tolist()] for index in range(10)]
    decode = functools.partial(
        DECODERS[decoder].decode,
        _model(kind),
        _RULES[0],
        prompts,
        thresholds=_THRESHOLDS,
        batch_size=8,
        engine=engine,
    )
    seen = []
    prefill_prefix, make = device_steps.prefill_prefix, cpu.SourcesOfWidth

    def by_xla(model: Any, parameters: Any, tokens: np.ndarray) -> Any:
        seen.append(tokens.tolist())
        return prefill_prefix(model, parameters, tokens)

    def by_native_code(*arguments: Any, prefix: Sequence[int] = (), **options: Any) -> Any:
        seen.extend([list(prefix)] if prefix else [])
        return make(*arguments, prefix=prefix, **options)

    monkeypatch.setattr(device_steps, "prefill_prefix", by_xla)
    monkeypatch.setattr(cpu, "SourcesOfWidth", by_native_code)
    shared = decode()
    assert seen == [begun[:32]]
    monkeypatch.setattr(group_decoder, "common_prefix", lambda prompts, *, width: ())
    apart = decode()
    assert_all_same(shared, apart)
    if engine == "native":
        for one, other in zip(shared, apart, strict=True):
            np.testing.assert_array_equal(one.confidences, other.confidences)
    assert len(seen) == 1
