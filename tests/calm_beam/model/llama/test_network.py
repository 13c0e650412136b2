"""The network against plain numpy, under JAX's strictest settings."""

import functools
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.model import network_of, parameter_shapes
from calm_beam.model.llama import LlamaConfig, RopeScaling, network
from calm_beam.precision import FLOAT32, Precision
from tests.builders import checkpoint_of
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config
from tests.numpy_llama import NumpyLlama
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("strict_promotion")

_BFLOAT16 = Precision(dtype="bfloat16")
_TOKENS = ([9, 33, 4, 0, 12, 1, 0, 17], [0, 5])
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied, one head of keys": {"tied_head": True, "num_kv_heads": 1},
    "biases and norms": {"attention_bias": True, "query_key_norms": True, "num_kv_heads": 4},
    "windows": {"sliding_window": 3, "windowed_layers": (0, 2)},
    "gemma": {"scaled_embedding": True, "unit_offset_norms": True, "norm_epsilon": 1e-3},
    "relu": {"activation": "relu"},
    "exit norms": {"exit_norms": True, "unit_offset_norms": True, "tied_head": True},
    "exit heads": {"exit_heads": True, "exit_norms": True},
    "norms behind, of all heads": {
        "pre_norms": False,
        "post_norms": True,
        "query_key_norms": True,
        "whole_norms": True,
    },
    "norms on both sides": {"post_norms": True, "unit_offset_norms": True, "query_factor": 0.3},
    "caps": {"attention_cap": 1.5, "logits_cap": 2.0, "sliding_window": 3, "windowed_layers": (0, 2)},
    "factors": {
        "embedding_factor": 3.0,
        "residual_factor": 0.4,
        "query_factor": 0.2,
        "logits_divisor": 2.0,
        "tied_head": True,
    },
    "some values turned": {
        "turned_dim": 4,
        "rope_scaling": RopeScaling(
            kind="longrope", original_max_positions=64, pair_factors=(1.5, 3.0), attention_factor=1.2
        ),
    },
    "a layer that is not turned": {"unturned_layers": (1,)},
    "windows of another base": {
        "sliding_window": 3,
        "windowed_layers": (0, 2),
        "local_rope_theta": 50.0,
        "rope_scaling": RopeScaling(kind="linear", factor=2.0),
        "query_key_norms": True,
        "post_norms": True,
    },
    "linear": {"rope_scaling": RopeScaling(kind="linear", factor=2.5), "rope_theta": 50.0},
    "experts": {"num_experts": 4, "experts_per_token": 2, "normed_expert_weights": True, "mlp_dim": 24},
    "experts whose weights stay": {"num_experts": 5, "experts_per_token": 3, "mlp_dim": 15, "query_key_norms": True},
    "one expert for a token": {"num_experts": 3, "mlp_dim": 15},
}
_each_kind = pytest.mark.parametrize("changes", _KINDS.values(), ids=list(_KINDS))


def _apply(config: LlamaConfig, method: str, *arrays: Any, precision: Precision = FLOAT32) -> Any:
    parameters = {"params": checkpoint_of(config, build_llama_arrays(config, 3)).parameters(precision)}
    model = network_of(config, precision=precision)
    return jax.jit(functools.partial(model.apply, method=method))(parameters, *arrays)


def _head(config: LlamaConfig, state: jax.Array, layer: int) -> np.ndarray:
    parameters = {"params": checkpoint_of(config, build_llama_arrays(config, 3)).parameters(_BFLOAT16)}
    return np.asarray(network_of(config, precision=_BFLOAT16).apply(parameters, state, layer, method="head"))


def _padded() -> np.ndarray:
    return np.array([[*tokens, *[0] * (8 - len(tokens))] for tokens in _TOKENS], np.int32)


def _assert_close(found: jax.Array, expected: np.ndarray) -> None:
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@_each_kind
def test_states_logits_and_scores_are_numpys(changes: dict[str, Any]) -> None:
    """States, logits and scores of every layer and position of a padded batch are numpy's."""
    config = build_llama_config(exit_classifier=2, **changes)
    states = _apply(config, "decode_teacher_forced", _padded())
    logits, scores = _apply(config, "__call__", _padded()), _apply(config, "exit_score", states)
    plain = NumpyLlama(config, build_llama_arrays(config, 3))
    assert states.shape == (3, 2, 8, 12)
    for row, tokens in enumerate(_TOKENS):
        expected = plain.states(tokens)
        _assert_close(states[:, row, : len(tokens)], expected)
        _assert_close(logits[:, row, : len(tokens)], plain.logits_of_layers(expected))
        _assert_close(scores[:, row, : len(tokens)], plain.exit_score(expected))


def test_gradients_go_through_the_router() -> None:
    """The derivative of a weighted sum of all logits along a change of all arrays is numpy's difference quotient."""
    config = build_llama_config(**_KINDS["experts"])
    arrays, generator = build_llama_arrays(config, 3), np.random.default_rng(0)
    (tokens, *_), kernels = _TOKENS, sorted(name for name in arrays if name.endswith("router/kernel"))
    weights = generator.standard_normal((3, len(tokens), 50)).astype(np.float32)
    direction = {name: generator.standard_normal(arrays[name].shape) for name in kernels}

    def weighted(parameters: Any) -> jax.Array:
        return jnp.sum(network_of(config).apply({"params": parameters}, np.array([tokens]))[:, 0] * weights)

    gradients = flax.traverse_util.flatten_dict(jax.grad(weighted)(checkpoint_of(config, arrays).parameters()), sep="/")
    found = sum(np.sum(np.asarray(gradients[name], np.float64) * direction[name]) for name in kernels)
    step, sums = 1e-4, []
    for sign in (1, -1):
        plain = NumpyLlama(
            config, {**arrays, **{name: arrays[name] + sign * step * direction[name] for name in kernels}}
        )
        sums.append(np.sum(plain.logits_of_layers(plain.states(tokens)) * weights))
    np.testing.assert_allclose(found, (sums[0] - sums[1]) / (2 * step), rtol=1e-3)
    assert abs(found) > 1


def test_a_deeper_model_has_no_longer_gradient() -> None:
    """Layers are a loop where targets are given, so neither program nor gradient grows with their number."""

    def products(layers: int) -> int:
        config = build_llama_config(num_decoder_layers=layers)
        model, tree = network_of(config), checkpoint_of(config, build_llama_arrays(config, 3)).parameters()

        def total(parameters: Any) -> jax.Array:
            states = model.apply({"params": parameters}, np.array([_TOKENS[0]]), method="decode_teacher_forced")
            return jnp.sum(states)

        return jax.jit(jax.grad(total)).lower(tree).as_text().count("dot_general")

    assert products(2) == products(6) > 0


def _assert_rounded_alike(found: jax.Array, expected: np.ndarray) -> None:
    """Asserts that nearly all values are the same bfloat16 numbers, and the others near, as a sum may be near a tie."""
    assert found.dtype == jnp.bfloat16
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert np.median(error) == 0
    assert error.max() < np.abs(expected).max() * 2**-7


@_each_kind
def test_in_bfloat16_everything_is_rounded_where_numpy_rounds(changes: dict[str, Any]) -> None:
    """In bfloat16, states, keys and values are float64's with factors and states rounded; logits are float32 sums.

    Keys are rounded once, after rotation.
    """
    config = build_llama_config(exit_classifier=2, **changes)
    apply = functools.partial(_apply, config, precision=_BFLOAT16)
    states, (kept, _) = apply("decode_teacher_forced", _padded()), apply("prefill", _padded(), np.array([8, 2]))
    scores = apply("exit_score", states)
    logits = np.stack([_head(config, state, layer) for layer, state in enumerate(states, start=1)])
    plain = NumpyLlama(config, build_llama_arrays(config, 3), "bfloat16")
    for row, tokens in enumerate(_TOKENS):
        _assert_rounded_alike(states[:, row, : len(tokens)], plain.states(tokens))
        for pair, of_layer in zip(kept, plain.begin([*tokens, 0]).kept, strict=True):
            for values, wanted in zip(pair, zip(*of_layer, strict=True), strict=True):
                _assert_rounded_alike(jnp.swapaxes(values[row, :, : len(tokens)], 0, 1), np.stack(wanted))
        exact = np.asarray(states[:, row], np.float64)
        _assert_close(scores[:, row], plain.exit_score(exact))
        # Norms are rounded, and float32's may be near a tie.
        np.testing.assert_allclose(
            logits[:, row], plain.logits_of_layers(exact), rtol=0, atol=2**-7 * np.abs(logits).max()
        )
        assert np.median(np.abs(logits[:, row] - plain.logits_of_layers(exact))) < 1e-5


@_each_kind
def test_prompts_leave_their_keys_and_values(changes: dict[str, Any]) -> None:
    """Every token leaves keys and values in each layer; the mask follows the length, since 0 is a token like others."""
    config = build_llama_config(**changes)
    kept, mask = _apply(config, "prefill", _padded(), np.array([8, 2], np.int32))
    assert mask.tolist() == [[True] * 8, [True] * 2 + [False] * 6]
    plain = NumpyLlama(config, build_llama_arrays(config, 3))
    for row, tokens in enumerate(_TOKENS):
        expected = plain.begin([*tokens, 0]).kept
        for pair, of_layer in zip(kept, expected, strict=True):
            for values, wanted in zip(pair, zip(*of_layer, strict=True), strict=True):
                _assert_close(jnp.swapaxes(values[row, :, : len(tokens)], 0, 1), np.stack(wanted))


_CHUNKED = {
    **{kind: (changes, "float32") for kind, changes in _KINDS.items()},
    "dynamic": ({"rope_scaling": RopeScaling(kind="dynamic", factor=4.0)}, "float32"),
    "yarn": (
        {
            "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_positions=16, attention_factor=1.2),
            "query_key_norms": True,
        },
        "float32",
    ),
    "bfloat16": (_KINDS["llama"], "bfloat16"),
    "windows in bfloat16": (_KINDS["windows"], "bfloat16"),
}
_IN_CHUNKS = [(kind, chunk) for kind in _CHUNKED for chunk in (1, 3, 8, 19)]


@pytest.mark.parametrize(
    ("kind", "chunk"),
    sampled(
        _IN_CHUNKS,
        keep=[
            place
            for place, (kind, chunk) in enumerate(_IN_CHUNKS)
            if chunk == 3 or kind in ("llama", "windows in bfloat16")
        ],
    ),
    ids=[f"{kind}-{chunk}" for kind, chunk in _IN_CHUNKS],
)
def test_chunks_leave_what_whole_prompts_leave(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in chunks of any size leaves the keys and values of whole prompts of 20 positions."""
    changes, dtype = _CHUNKED[kind]
    config, precision = build_llama_config(**changes), Precision(dtype=dtype)
    tokens = np.random.default_rng(2).integers(0, 50, size=(3, 20)).astype(np.int32)
    lengths = np.array([20, 13, 0], np.int32)
    whole, whole_mask = _apply(config, "prefill", tokens, lengths, precision=precision)
    asked = []

    def chunk_positions(config: Any, **sizes: int) -> int:
        asked.append(sizes)
        return chunk

    monkeypatch.setattr(network, "chunk_positions", chunk_positions)
    kept, mask = _apply(config, "prefill", tokens, lengths, precision=precision)
    assert asked == [{"rows": 3, "source": 20}]
    np.testing.assert_array_equal(mask, whole_mask)
    assert len(kept) == config.num_decoder_layers
    for pair, of_whole in zip(kept, whole, strict=True):
        for values, expected in zip(pair, of_whole, strict=True):
            assert values.shape == (3, config.num_kv_heads, 20, config.head_dim)
            if dtype == "float32":
                _assert_close(values, np.asarray(expected))
            else:
                _assert_rounded_alike(values, np.asarray(expected, np.float64))


def test_chunks_take_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA plans less memory for chunks of a prompt of 512 positions, beyond arguments and results."""
    config = build_llama_config(max_positions=512)
    parameters = {"params": checkpoint_of(config, build_llama_arrays(config, 3)).parameters()}
    tokens, lengths = np.ones((1, 512), np.int32), np.array([512], np.int32)

    def held(chunk: int) -> int:
        monkeypatch.setattr(network, "chunk_positions", lambda config, **sizes: chunk)
        prefill = jax.jit(functools.partial(network_of(config).apply, method="prefill"))
        planned = prefill.lower(parameters, tokens, lengths).compile().memory_analysis()
        assert planned is not None
        return int(planned.temp_size_in_bytes)

    whole = held(512)
    # Two arrays of heads x positions x positions.
    assert whole > 2 * 4 * 512**2 * 4
    assert held(64) < whole / 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "windows"])
@pytest.mark.parametrize("chunk", [3, 20])
def test_what_prompts_share_need_not_be_gone_through_again(
    kind: str, dtype: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values with a prefix of eight positions prefilled once are those of whole prompts."""
    config, precision = build_llama_config(**_KINDS[kind]), Precision(dtype=dtype)
    tokens = np.random.default_rng(2).integers(0, 50, size=(3, 20)).astype(np.int32)
    tokens[:, :8] = tokens[0, :8]
    lengths = np.array([20, 13, 9], np.int32)
    expected, mask = _apply(config, "prefill", tokens, lengths, precision=precision)
    prefix, _ = _apply(config, "prefill", tokens[:1, :8], lengths[:1], precision=precision)
    monkeypatch.setattr(network, "chunk_positions", lambda config, **sizes: chunk)
    # Tokens of the prefix are not read. A copy, since JAX may still be reading the original.
    others = np.where(np.arange(20) < 8, 0, tokens)
    kept, of_kept = _apply(config, "prefill", others, lengths, prefix, precision=precision)
    np.testing.assert_array_equal(mask, of_kept)
    for pair, of_whole in zip(kept, expected, strict=True):
        for values, wanted in zip(pair, of_whole, strict=True):
            if dtype == "float32":
                _assert_close(values, np.asarray(wanted))
            else:
                _assert_rounded_alike(values, np.asarray(wanted, np.float64))


_TREES = [(kind, exit_classifier) for kind in _KINDS for exit_classifier in (0, 1, 2)]


@pytest.mark.parametrize(
    ("kind", "exit_classifier"),
    sampled(
        _TREES, keep=[place for place, (kind, size) in enumerate(_TREES) if size == 2 or kind in ("llama", "experts")]
    ),
)
def test_the_tree_is_that_of_the_network(kind: str, exit_classifier: int) -> None:
    """The named shapes are exactly the parameters that Flax declares."""
    config = build_llama_config(exit_classifier=exit_classifier, **_KINDS[kind])
    model: Any = network_of(config)
    tree = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3), jnp.int32))["params"]
    declared = {name: leaf.shape for name, leaf in flax.traverse_util.flatten_dict(tree, sep="/").items()}
    assert declared == parameter_shapes(config)
