"""Decoder-only models that transformers saves: every family, every position scaling, every refusal."""

import json
import math
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from calm_beam.checkpoints import CheckpointError, load_checkpoint, write_native
from calm_beam.checkpoints.checkpoint import stored_architecture
from calm_beam.model.llama import RopeScaling
from tests.calm_beam.checkpoints.decoder_only_folders import SIZES, build_tensors, write_decoder_only

_FAMILIES = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    *("olmo2", "phi3", "granite", "smollm3"),
)
_MIXTURES = ("mixtral", "qwen3_moe")
_WITH_WINDOWS = ("mistral", "ministral", "gemma2", "gemma3_text")
_NORMED_ON_BOTH_SIDES = ("gemma2", "gemma3_text")
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", _FAMILIES)
def test_every_family_is_read(model_type: str, tied: bool, tmp_path: pathlib.Path) -> None:
    """Sizes come from the config, and each tensor has our name, with kernels [in, out]."""
    is_gemma = model_type.startswith("gemma")
    activation = "gelu_pytorch_tanh" if is_gemma else "silu"
    window: dict[str, Any] = {"sliding_window": None} if model_type in _WITH_WINDOWS else {}
    if model_type in ("smollm3", "gemma3_text"):
        window["rope_theta"] = 10000.0
    folder = write_decoder_only(tmp_path, model_type, tied=tied, hidden_act=activation, **window)
    checkpoint = load_checkpoint(folder)
    config = checkpoint.config
    assert (config.vocab_size, config.emb_dim, config.mlp_dim, config.num_decoder_layers) == (40, 12, 10, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 6)
    assert (config.norm_epsilon, config.rope_theta, config.max_positions) == (1e-5, 10000.0, 64)
    assert (config.tied_head, config.end_ids, config.sliding_window) == (tied, (2,), None)
    assert (config.attention_bias, config.query_key_norms) == (
        model_type == "qwen2",
        model_type in ("qwen3", "olmo2", "gemma3_text"),
    )
    assert (config.pre_norms, config.post_norms, config.whole_norms) == (
        model_type != "olmo2",
        model_type in ("olmo2", *_NORMED_ON_BOTH_SIDES),
        model_type == "olmo2",
    )
    assert (config.scaled_embedding, config.unit_offset_norms) == (is_gemma, is_gemma)
    assert config.activation == ("gelu" if is_gemma else "silu")
    assert (config.attention_cap, config.logits_cap) == ((50.0, 30.0) if model_type == "gemma2" else (None, None))
    assert config.rope_scaling == RopeScaling()
    assert checkpoint.layout == "hugging_face"
    assert "end with token 2" in checkpoint.stated[0]
    stored = build_tensors(model_type, SIZES, tied=tied)
    # Phi-3 stores 3 and 2 parts of a layer as one.
    assert len(checkpoint.arrays) == len(stored) + (6 if model_type == "phi3" else 0)
    tensors = build_tensors("llama", SIZES, tied=tied) if model_type == "phi3" else stored
    names: tuple[str, ...] = ("pre_self_attention_layer_norm/scale", "pre_mlp_layer_norm/scale")
    theirs: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    if model_type == "olmo2":
        names = ("post_self_attention_layer_norm/scale", "post_mlp_layer_norm/scale")
        theirs = ("post_attention_layernorm", "post_feedforward_layernorm")
    if model_type in _NORMED_ON_BOTH_SIDES:
        names = (*names, "post_self_attention_layer_norm/scale", "post_mlp_layer_norm/scale")
        theirs = (
            *("input_layernorm", "pre_feedforward_layernorm"),
            *("post_attention_layernorm", "post_feedforward_layernorm"),
        )
    expected = {
        **{
            f"decoder/layers_1/{name}": tensors[f"model.layers.1.{their}.weight"]
            for name, their in zip(names, theirs, strict=True)
        },
        "token_embedder/embedding": tensors["model.embed_tokens.weight"],
        "decoder/decoder_norm/scale": tensors["model.norm.weight"],
        "decoder/layers_0/self_attention/query/kernel": tensors["model.layers.0.self_attn.q_proj.weight"].T,
        "decoder/layers_0/self_attention/key/kernel": tensors["model.layers.0.self_attn.k_proj.weight"].T,
        "decoder/layers_0/self_attention/value/kernel": tensors["model.layers.0.self_attn.v_proj.weight"].T,
        "decoder/layers_1/self_attention/out/kernel": tensors["model.layers.1.self_attn.o_proj.weight"].T,
        "decoder/layers_0/mlp/wi_0/kernel": tensors["model.layers.0.mlp.gate_proj.weight"].T,
        "decoder/layers_0/mlp/wi_1/kernel": tensors["model.layers.0.mlp.up_proj.weight"].T,
        "decoder/layers_1/mlp/wo/kernel": tensors["model.layers.1.mlp.down_proj.weight"].T,
    }
    if not tied:
        expected["decoder/logits_dense/kernel"] = tensors["lm_head.weight"].T
    if model_type == "qwen2":
        expected["decoder/layers_1/self_attention/key/bias"] = tensors["model.layers.1.self_attn.k_proj.bias"]
    if model_type == "qwen3":
        expected["decoder/layers_0/self_attention/query_norm/scale"] = tensors["model.layers.0.self_attn.q_norm.weight"]
    for name, array in expected.items():
        np.testing.assert_array_equal(checkpoint.arrays[name], array)
        assert checkpoint.arrays[name].dtype == np.float32


@pytest.mark.parametrize("model_type", [*_FAMILIES, *_MIXTURES])
def test_a_native_copy_is_the_same_model(model_type: str, tmp_path: pathlib.Path) -> None:
    """Config, arrays and fingerprint come back from the native layout."""
    checkpoint = load_checkpoint(
        write_decoder_only(tmp_path / "theirs", model_type, rope_scaling=_LLAMA3, eos_token_id=[2, 5])
    )
    write_native(tmp_path / "ours", checkpoint.config, arrays=checkpoint.arrays, vocabulary_path=None)
    written = load_checkpoint(tmp_path / "ours")
    assert written.config == checkpoint.config
    assert written.fingerprint() == checkpoint.fingerprint()
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architecture"] == "llama"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500000.0},
        {"rms_norm_eps": 1e-6},
        {"eos_token_id": [2, 3]},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"max_position_embeddings": 65},
        {"hidden_act": "gelu_new"},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12},
    ],
)
def test_what_no_array_shows_is_in_the_fingerprint(changes: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Two models with equal arrays and different computations have different fingerprints."""
    plain = load_checkpoint(write_decoder_only(tmp_path / "plain"))
    changed = load_checkpoint(write_decoder_only(tmp_path / "changed", **changes))
    assert changed.arrays.keys() == plain.arrays.keys()
    assert changed.fingerprint() != plain.fingerprint()


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 10000.0, RopeScaling()),
        ({"rope_theta": 500000}, 500000.0, RopeScaling()),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6, RopeScaling()),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, 2e4, RopeScaling()),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 10000.0, RopeScaling(kind="linear", factor=4.0)),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 1e4, RopeScaling(kind="dynamic", factor=2.0)),
        (
            {"rope_scaling": _LLAMA3, "rope_theta": 5e5},
            5e5,
            RopeScaling(kind="llama3", factor=8.0, original_max_positions=32),
        ),
        (
            {"rope_parameters": {**_LLAMA3, "rope_theta": 5e5, "type": "llama3"}},
            5e5,
            RopeScaling(kind="llama3", factor=8.0, original_max_positions=32),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
            1e4,
            RopeScaling(kind="yarn", factor=4.0, original_max_positions=32, attention_factor=1.1386294361119891),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 16}},
            1e4,
            RopeScaling(kind="yarn", factor=4.0, original_max_positions=64, attention_factor=1.25, beta_fast=16.0),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
            1e4,
            RopeScaling(
                kind="yarn",
                factor=4.0,
                original_max_positions=64,
                attention_factor=1.1386294361119891 / 1.0693147180559945,
            ),
        ),
    ],
)
def test_positions_are_read_as_both_versions_write_them(
    fields: dict[str, Any], theta: float, scaling: RopeScaling, tmp_path: pathlib.Path
) -> None:
    """Base and scaling are read from separate fields (version 4 of transformers) and from one object (version 5)."""
    config = load_checkpoint(write_decoder_only(tmp_path, **fields)).config
    assert config.rope_theta == theta
    assert config.rope_scaling == scaling


def test_longrope_has_the_positions_of_its_first_training(tmp_path: pathlib.Path) -> None:
    """Within the positions of the first training the short factors hold; a part of each head may be rotated alone."""
    scaling = {"type": "su", "short_factor": [1, 2.5], "long_factor": [3.0, 4.0]}
    config = load_checkpoint(
        write_decoder_only(
            tmp_path,
            "phi3",
            max_position_embeddings=128,
            original_max_position_embeddings=32,
            partial_rotary_factor=0.7,
            rope_scaling=scaling,
        )
    ).config
    assert (config.max_positions, config.turned_dim) == (32, 4)
    assert config.rope_scaling == RopeScaling(
        kind="longrope",
        original_max_positions=32,
        pair_factors=(1.0, 2.5),
        attention_factor=math.sqrt(1 + math.log(4) / math.log(32)),
    )


def test_granites_factors_are_read(tmp_path: pathlib.Path) -> None:
    """Each factor is read from its key; the query factor that all models have is not stored."""
    factors: dict[str, Any] = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 8.0}
    folder = write_decoder_only(tmp_path, "granite", **factors, attention_multiplier=0.015625)
    config = load_checkpoint(folder).config
    assert (config.embedding_factor, config.residual_factor, config.logits_divisor) == (12.0, 0.22, 8.0)
    assert config.query_factor == 0.015625
    folder = write_decoder_only(tmp_path, "granite", attention_multiplier=6**-0.5)
    assert load_checkpoint(folder).config.query_factor is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", _MIXTURES)
def test_experts_are_one_wide_layer(model_type: str, tied: bool, tmp_path: pathlib.Path) -> None:
    """The experts of a layer follow each other in its columns, and in the rows of what leads back to the width."""
    checkpoint = load_checkpoint(write_decoder_only(tmp_path, model_type, tied=tied))
    config, tensors = checkpoint.config, build_tensors(model_type, SIZES, tied=tied)
    assert (config.mlp_dim, config.num_experts, config.experts_per_token) == (30, 3, 2)
    assert "feed-forward 30 of 3 experts, 2 for a token, rotary" in stored_architecture(config).in_words(config)
    assert (config.normed_expert_weights, config.query_key_norms) == (
        model_type == "mixtral",
        model_type == "qwen3_moe",
    )
    home = "model.layers.1.block_sparse_moe" if model_type == "mixtral" else "model.layers.1.mlp"
    names = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    router = checkpoint.arrays["decoder/layers_1/mlp/router/kernel"]
    np.testing.assert_array_equal(router, tensors[f"{home}.gate.weight"].T)
    for ours, theirs, axis in zip(("wi_0", "wi_1", "wo"), names, (1, 1, 0), strict=True):
        expected = np.concatenate([tensors[f"{home}.experts.{index}.{theirs}.weight"].T for index in range(3)], axis)
        np.testing.assert_array_equal(checkpoint.arrays[f"decoder/layers_1/mlp/{ours}/kernel"], expected)


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("qwen3_moe", {"num_local_experts": ..., "num_experts": 3}, ("num_experts", 3)),
        ("qwen3_moe", {"num_experts": 3}, ("num_experts", 3)),
        ("qwen3_moe", {"norm_topk_prob": True}, ("normed_expert_weights", True)),
        ("qwen3_moe", {"num_experts_per_tok": 1}, ("experts_per_token", 1)),
        ("qwen3_moe", {"mlp_only_layers": None, "decoder_sparse_step": 1}, ("num_experts", 3)),
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": False}, ("sliding_window", None)),
        ("mixtral", {"num_experts_per_tok": ...}, ("experts_per_token", 2)),
        ("mixtral", {"sliding_window": 8}, ("sliding_window", 8)),
        ("mixtral", {}, ("rope_theta", 1e6)),
    ],
)
def test_what_a_config_says_of_experts(
    model_type: str, fields: dict[str, Any], expected: tuple[str, Any], tmp_path: pathlib.Path
) -> None:
    """Experts are counted and weighed as the config says, by the keys of both versions of transformers."""
    config = load_checkpoint(write_decoder_only(tmp_path, model_type, **fields)).config
    assert getattr(config, expected[0]) == expected[1]


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only 1 is supported"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]; only \[\] is supported"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is True; only False is supported"),
        ("qwen3_moe", {"num_experts": 4}, "num_experts and num_local_experts differ; expected one number of experts"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, got 'yes'"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias is True; that is not supported"),
        ("mixtral", {"num_local_experts": 1}, "num_local_experts must be a whole number from 2 to 32768, got 1"),
        (
            "mixtral",
            {"num_local_experts": 10**9},
            "num_local_experts must be a whole number from 2 to 32768, got 10000",
        ),
        ("mixtral", {"num_local_experts": [3]}, r"num_local_experts must be a whole number .*, got \[3\]"),
        ("mixtral", {"num_experts_per_tok": 4}, "num_experts_per_tok must be a whole number from 1 to 3, got 4"),
        ("mixtral", {"num_local_experts": 4}, "missing model.layers.0.block_sparse_moe.experts.3.w1.weight"),
        ("mixtral", {"num_local_experts": 2}, "unknown model.layers.0.block_sparse_moe.experts.2.w1.weight"),
        ("mixtral", {"intermediate_size": 11}, r"mlp/wi_0/kernel has shape \(12, 30\), expected \(12, 33\)"),
    ],
)
def test_experts_that_are_not_supported_are_refused(
    model_type: str, fields: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    """Layers without experts among others, and contradictions about experts, are refused by key."""
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write_decoder_only(tmp_path, model_type, **fields))


@pytest.mark.parametrize("shape", [(9, 12), (10,)])
def test_experts_of_different_shapes_are_refused(shape: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    """An expert of another shape than the first is refused by name."""
    name = "model.layers.1.block_sparse_moe.experts.1.w3.weight"
    tensors = {**build_tensors("mixtral", SIZES, tied=False), name: np.zeros(shape, np.float32)}
    with pytest.raises(CheckpointError, match=r"experts\.1\.w3\.weight has shape .* and .*experts\.0\.w3\.weight \(10"):
        load_checkpoint(write_decoder_only(tmp_path, "mixtral", tensors=tensors))


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"num_hidden_layers": 2}, ()),
        ({"no_rope_layer_interval": 2}, (1,)),
        ({"no_rope_layers": [0, 1]}, (0,)),
        ({"no_rope_layers": [1, 1], "no_rope_layer_interval": 1}, ()),
    ],
)
def test_layers_that_positions_do_not_turn(
    fields: dict[str, Any], layers: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    """SmolLM3 lists layers without rotation, or has one every so many layers, 4 by default; its base is 2 million."""
    config = load_checkpoint(write_decoder_only(tmp_path, "smollm3", **fields)).config
    assert (config.unturned_layers, config.rope_theta) == (layers, 2e6)


_BY_KIND = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}}


@pytest.mark.parametrize(
    ("fields", "windowed", "theta", "local"),
    [
        ({}, (0, 1), 1e6, 1e4),
        ({"sliding_window_pattern": 2}, (0,), 1e6, 1e4),
        ({"layer_types": ["full_attention", "sliding_attention"]}, (1,), 1e6, 1e4),
        ({"layer_types": ["full_attention"] * 2}, (), 1e6, None),
        ({"rope_theta": 5e5, "rope_local_base_freq": 500.0}, (0, 1), 5e5, 500.0),
        ({"rope_parameters": {**_BY_KIND, "sliding_attention": {"rope_theta": 500.0}}}, (0, 1), 5e5, 500.0),
    ],
)
def test_gemma_3s_windows_have_a_base_of_their_own(
    fields: dict[str, Any], windowed: tuple[int, ...], theta: float, local: float | None, tmp_path: pathlib.Path
) -> None:
    """Gemma 3's windows have a base of their own, as both versions write it; queries have their own divisor."""
    config = load_checkpoint(
        write_decoder_only(tmp_path, "gemma3_text", hidden_act="gelu_pytorch_tanh", sliding_window=8, **fields)
    ).config
    assert (config.windowed_layers, config.rope_theta, config.local_rope_theta) == (windowed, theta, local)
    assert config.rope_scaling.factor == (8.0 if "rope_parameters" in fields else 1.0)
    assert config.query_factor == 256**-0.5


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers is \[1\]; expected 0 or 1 for each of 2 layers"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window is True; that is not supported"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; that is not supported"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "logits_cap must be a number above 0 and below 1e30, got -1.0"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attention_cap must be a number above 0 and below 1e30, got '50'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; that is not supported"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types is \['full_attention', "),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a whole number of at least 1"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters of sliding_attention is .*; only a rope_theta is supported",
        ),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 2}, r"layer_types is \['chunked_attention'"),
    ],
)
def test_what_newer_families_say_otherwise_is_refused(
    model_type: str, fields: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    """Unsupported fields of newer families are refused by key."""
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write_decoder_only(tmp_path, model_type, **fields))


@pytest.mark.parametrize(
    ("fields", "caps"),
    [
        ({"attn_logit_softcapping": 20, "final_logit_softcapping": 10.5}, (20.0, 10.5)),
        ({"attn_logit_softcapping": None, "final_logit_softcapping": None}, (None, None)),
    ],
)
def test_gemma_2_caps_logits(
    fields: dict[str, Any], caps: tuple[float | None, float | None], tmp_path: pathlib.Path
) -> None:
    """Gemma 2's logits are capped as its config says, and not at all for null; queries have their own divisor."""
    config = load_checkpoint(
        write_decoder_only(tmp_path, "gemma2", query_pre_attn_scalar=144, hidden_act="gelu_pytorch_tanh", **fields)
    ).config
    assert (config.attention_cap, config.logits_cap) == caps
    assert config.query_factor == 1 / 12


def test_fused_parts_of_other_sizes_are_refused(tmp_path: pathlib.Path) -> None:
    """Fused parts of other sizes are refused with the expected ones."""
    tensors = build_tensors("phi3", SIZES, tied=False)
    tensors["model.layers.1.self_attn.qkv_proj.weight"] = np.zeros((47, 12), np.float32)
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.qkv_proj.weight has shape \(47, 12\), expected 48"):
        load_checkpoint(write_decoder_only(tmp_path, "phi3", tensors=tensors))


def test_positions_reach_as_far_as_yarn_stretches_them(tmp_path: pathlib.Path) -> None:
    """With the original number of positions in the config, all positions that the factor allows are accepted."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert load_checkpoint(write_decoder_only(tmp_path / "a", rope_scaling=yarn)).config.max_positions == 256
    linear = {"rope_type": "linear", "factor": 4.0}
    assert load_checkpoint(write_decoder_only(tmp_path / "b", rope_scaling=linear)).config.max_positions == 64


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "ntk", "factor": 2.0},
            "rope_type is 'ntk'; only default, linear, dynamic, llama3, yarn, longrope",
        ),
        ({"rope_type": "longrope", "factor": 2.0}, "has factor that is unknown; short_factor, long_factor is missing"),
        ({"type": "su"}, "of type longrope has nothing that is unknown; short_factor, long_factor is missing"),
        ({"type": "su", "short_factor": 1, "long_factor": [1, 2, 3]}, "short_factor is 1; expected numbers"),
        (
            {"type": "longrope", "short_factor": [1, 2], "long_factor": [1, 2]},
            "pair_factors must have a number for each of 3 pairs, got 2",
        ),
        ({"rope_type": ["yarn"]}, r"rope_type is \['yarn'\]; only"),
        ({"rope_type": "linear"}, "of type linear has nothing that is unknown; factor is missing"),
        (
            {"rope_type": "linear", "factor": 2.0, "mscale": 1.0},
            "of type linear has mscale that is unknown; nothing is",
        ),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number above 0.*got '2'"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be at least 1, got 0.5"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor, high_freq_factor is missing"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "has mrope_section that is unknown"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0 is supported"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": False}, "truncate is False; only True is supported"),
        (
            {"rope_type": "yarn", "factor": 2.0, "mscale": -1.0},
            "a number of rope_scaling is -1.0; expected one above 0",
        ),
        ({"rope_type": "yarn", "factor": "2"}, "a number of rope_scaling is '2'; expected one above 0"),
        ("linear", "rope_scaling is 'linear' and rope_parameters None; expected one object"),
    ],
)
def test_positions_that_are_not_supported_are_refused(scaling: Any, message: str, tmp_path: pathlib.Path) -> None:
    """An unsupported scaling is refused by name, with the supported ones."""
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write_decoder_only(tmp_path, rope_scaling=scaling))


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("value", [[], False, "", 0], ids=repr)
def test_positions_that_are_no_object_are_refused(key: str, value: Any, tmp_path: pathlib.Path) -> None:
    """An empty value that is no object is refused; null and an empty object mean no scaling."""
    with pytest.raises(CheckpointError, match="expected one object, or two equal ones"):
        load_checkpoint(write_decoder_only(tmp_path / "wrong", **{key: value}))
    nothings: tuple[Any, ...] = ({}, None)
    for index, nothing in enumerate(nothings):
        folder = write_decoder_only(tmp_path / str(index), **{key: nothing})
        assert load_checkpoint(folder).config.rope_scaling == RopeScaling()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling is .*linear.* and rope_parameters .*default.*; expected one object, or two equal ones",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
            "rope_theta is 20000.0 in one place and 10000.0 in another",
        ),
        (
            {"rope_scaling": _LLAMA3, "original_max_position_embeddings": 48},
            "original_max_position_embeddings is 32 in one place and 48 in another",
        ),
    ],
)
def test_contradictions_about_positions_are_refused(
    fields: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    """If two fields contradict each other, the config is refused."""
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write_decoder_only(tmp_path, **fields))


@pytest.mark.parametrize(
    ("model_type", "fields", "window", "layers"),
    [
        ("mistral", {"sliding_window": 8}, 8, (0, 1)),
        # The default of transformers.
        ("mistral", {}, 4096, (0, 1)),
        ("mistral", {"sliding_window": None}, None, ()),
        ("ministral", {"sliding_window": 8}, 8, (0, 1)),
        ("ministral", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, 8, (1,)),
        ("gemma2", {"sliding_window": 8}, 8, (0,)),
        ("gemma2", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, 8, (1,)),
        ("llama", {"sliding_window": 8}, None, ()),
        ("qwen2", {"sliding_window": 8}, None, ()),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, None, ()),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, 8, (1,)),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8, (0, 1)),
        (
            "qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            8,
            (0,),
        ),
        ("qwen2", {"layer_types": ["full_attention", "full_attention"]}, None, ()),
    ],
)
def test_windows_are_in_the_layers_that_have_them(
    model_type: str, fields: dict[str, Any], window: int | None, layers: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    """Mistral has a window in all layers, Qwen in those of its config, Llama in none."""
    config = load_checkpoint(write_decoder_only(tmp_path, model_type, **fields)).config
    assert (config.sliding_window, config.windowed_layers) == (window, layers)


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {"num_key_value_heads": ...}, ("num_kv_heads", 4)),
        ("llama", {"head_dim": ..., "hidden_size": 24}, ("head_dim", 6)),
        ("llama", {"max_position_embeddings": ...}, ("max_positions", 2048)),
        ("llama", {"rms_norm_eps": ...}, ("norm_epsilon", 1e-6)),
        ("llama", {"eos_token_id": ...}, ("end_ids", (2,))),
        ("llama", {"tie_word_embeddings": ...}, ("tied_head", False)),
        ("gemma", {"tie_word_embeddings": ..., "hidden_act": "gelu"}, ("activation", "gelu")),
        ("gemma", {"tie_word_embeddings": ..., "hidden_activation": "gelu_pytorch_tanh"}, ("activation", "gelu")),
    ],
)
def test_what_is_left_out_is_what_transformers_takes(
    model_type: str, fields: dict[str, Any], expected: tuple[str, Any], tmp_path: pathlib.Path
) -> None:
    """Missing fields of older files have the defaults of transformers."""
    sizes = {**SIZES, **{key: value for key, value in fields.items() if value is not ...}}
    if fields.get("num_key_value_heads") is ...:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    tensors = build_tensors(model_type, sizes, tied=model_type == "gemma")
    config = load_checkpoint(write_decoder_only(tmp_path, model_type, tensors=tensors, **fields)).config
    assert getattr(config, expected[0]) == expected[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "phimoe", "num_local_experts": 8},
            "model_type is 'phimoe', a mixture of experts; expected one",
        ),
        ({"model_type": "qwen2_moe", "num_experts": 8}, "model_type is 'qwen2_moe', a mixture of experts"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "'deepseek_v3', multi-head latent attention"),
        ({"model_type": "mllama", "vision_config": {"a": 1}}, "model_type is 'mllama', a model that sees images"),
        ({"model_type": "ministral3"}, "model_type is 'ministral3'; expected one of 't5', 'mt5'"),
        ({"model_type": None}, "model_type is None; expected one of"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"has a quantization_config \(gptq\): quantised"),
        ({"quantization_config": True}, r"has a quantization_config \(no quant_method\)"),
        ({"auto_map": {"AutoModelForCausalLM": "mine.Model"}}, r"auto_map names code .*\['mine.Model'\], which is not"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"architectures is \['LlamaForSequenceCl.*only"),
        ({"attention_bias": True}, "attention_bias is True; that is not supported"),
        ({"mlp_bias": True}, "mlp_bias is True; that is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu, swish, gelu_new"),
        ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]; only"),
        ({"hidden_size": "12"}, "hidden_size must be a whole number of at least 1, got '12'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 to 1000, got 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 1000, got 1000000000"),
        ({"num_hidden_layers": 1001}, "num_hidden_layers must be a whole number from 1 to 1000, got 1001"),
        ({"num_attention_heads": 10**12}, "num_heads must be at least 1 and below 2"),
        ({"max_position_embeddings": 10**30}, "max_positions must be at least 1 and below 2"),
        ({"vocab_size": ...}, "vocab_size must be a whole number of at least 1, got None"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"rms_norm_eps": "small"}, "config.json: norm_epsilon must be a number above 0.*got 'small'"),
        ({"num_key_value_heads": 3}, "num_kv_heads must divide num_heads, got 3 and 4"),
        ({"eos_token_id": None}, "eos_token_id is None; expected the id of the token that ends an output"),
        ({"eos_token_id": []}, r"eos_token_id is \[\]; expected"),
        ({"eos_token_id": 40}, r"end_ids must be different whole numbers from 0 to 39.*got \(40,\)"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, r"layer_types is \['sliding.*expected \['full"),
        ({"vocab_size": 41}, r"token_embedder/embedding has shape \(40, 12\), expected \(41, 12\)"),
        ({"num_hidden_layers": 3}, "not those of the LlamaForCausalLM in config.json; missing model.layers.2"),
        ({"num_hidden_layers": 1}, r"unknown model.layers.1.*\(9\)"),
    ],
)
def test_other_models_are_refused(fields: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    """A model that would need another computation is refused by name."""
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write_decoder_only(tmp_path, **fields))


def test_windows_in_unknown_layers_are_refused(tmp_path: pathlib.Path) -> None:
    """A list of layer kinds with another length, or an unknown kind, is refused."""
    window: dict[str, Any] = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    for named in (["sliding_attention"], ["chunked_attention", "full_attention"], "full_attention"):
        folder = write_decoder_only(tmp_path, "qwen2", layer_types=named, **window)
        with pytest.raises(CheckpointError, match=r"layer_types is .*; expected"):
            load_checkpoint(folder)


@pytest.mark.parametrize(
    ("generation", "expected", "source"),
    [
        ({"eos_token_id": [7, 2, 7]}, (2, 7), "generation_config.json"),
        ({"eos_token_id": 9}, (9,), "generation_config.json"),
        ({"temperature": 0.6}, (2,), "config.json"),
        (None, (2,), "config.json"),
    ],
)
def test_outputs_end_as_they_do_in_transformers(
    generation: dict[str, Any] | None, expected: tuple[int, ...], source: str, tmp_path: pathlib.Path
) -> None:
    """Chat models end at several tokens of the generation config, which precedes the config."""
    checkpoint = load_checkpoint(write_decoder_only(tmp_path, generation=generation))
    assert checkpoint.config.end_ids == expected
    assert checkpoint.stated == (
        f"Outputs end with token {' or '.join(map(str, expected))}: {tmp_path / source} says so.",
    )


def test_parts_in_bfloat16_are_read(tmp_path: pathlib.Path) -> None:
    """A bfloat16 model in several files is read as one in float32."""
    tensors = {
        name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in build_tensors("llama", SIZES, tied=False).items()
    }
    write_decoder_only(tmp_path, tensors=tensors)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for part, held in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in held}, tmp_path / part)
    weight_map = {name: part for part, held in parts.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    arrays = load_checkpoint(tmp_path).arrays
    np.testing.assert_array_equal(arrays["decoder/logits_dense/kernel"], tensors["lm_head.weight"].astype(np.float32).T)


def test_frequencies_in_older_files_are_left_out(tmp_path: pathlib.Path) -> None:
    """Frequencies that transformers recomputes are not read; any other unknown tensor is refused."""
    tensors = build_tensors("llama", SIZES, tied=False)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    assert len(load_checkpoint(write_decoder_only(tmp_path, tensors={**tensors, **frequencies})).arrays) == len(tensors)
    write_decoder_only(tmp_path, tensors={**tensors, "model.layers.0.self_attn.q_proj.bias": np.ones(24, np.float32)})
    with pytest.raises(CheckpointError, match=r"unknown model\.layers\.0\.self_attn\.q_proj\.bias \(1\)"):
        load_checkpoint(tmp_path)


def test_a_copy_of_the_embedding_is_a_tied_head(tmp_path: pathlib.Path) -> None:
    """A tied model may store its head too; a head that differs is refused, since the computation is unknown."""
    tensors = build_tensors("llama", SIZES, tied=True)
    copied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    checkpoint = load_checkpoint(write_decoder_only(tmp_path, tensors=copied, tied=True))
    assert "decoder/logits_dense/kernel" not in checkpoint.arrays
    changed = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_checkpoint(write_decoder_only(tmp_path, tensors=changed, tied=True))


def test_a_head_that_is_missing_is_not_made_up(tmp_path: pathlib.Path) -> None:
    """A model without a head and without a tie is refused."""
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight \(1\)"):
        load_checkpoint(write_decoder_only(tmp_path, tensors=build_tensors("llama", SIZES, tied=True)))


def test_native_models_of_unknown_architecture_are_refused(tmp_path: pathlib.Path) -> None:
    """An unknown architecture is refused with its name and the known ones."""
    (tmp_path / "config.json").write_text('{"format": "calm-beam/model/v1", "architecture": "mamba"}')
    with pytest.raises(CheckpointError, match="architecture is 'mamba', this version knows t5, llama"):
        load_checkpoint(tmp_path)
