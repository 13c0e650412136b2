"""Decoder-only models: sizes, facts that arrays do not show, and parameters."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from calm_beam.model.llama import (
    LlamaConfig,
    RopeScaling,
    check_parameters,
    config_of,
    parameter_shapes,
    stored_fields,
    unseen,
)
from tests.calm_beam.model.llama.builders import build_llama_config

_YARN = RopeScaling(kind="yarn", factor=4, original_max_positions=32, attention_factor=1.1)
_LONGROPE = RopeScaling(kind="longrope", original_max_positions=32, pair_factors=(1.0, 2.0))


def test_the_tree_names_each_parameter_once() -> None:
    """A plain model has the nine arrays of each layer, embedding, last norm and head; kernels are [in, out]."""
    shapes = parameter_shapes(build_llama_config(num_decoder_layers=1))
    assert shapes == {
        "token_embedder/embedding": (50, 12),
        "decoder/layers_0/pre_self_attention_layer_norm/scale": (12,),
        "decoder/layers_0/self_attention/query/kernel": (12, 24),
        "decoder/layers_0/self_attention/key/kernel": (12, 12),
        "decoder/layers_0/self_attention/value/kernel": (12, 12),
        "decoder/layers_0/self_attention/out/kernel": (24, 12),
        "decoder/layers_0/pre_mlp_layer_norm/scale": (12,),
        "decoder/layers_0/mlp/wi_0/kernel": (12, 7),
        "decoder/layers_0/mlp/wi_1/kernel": (12, 7),
        "decoder/layers_0/mlp/wo/kernel": (7, 12),
        "decoder/decoder_norm/scale": (12,),
        "decoder/logits_dense/kernel": (12, 50),
    }


@pytest.mark.parametrize(
    ("changes", "added", "removed"),
    [
        ({"tied_head": True}, {}, {"decoder/logits_dense/kernel"}),
        (
            {"attention_bias": True},
            {
                "decoder/layers_0/self_attention/query/bias": (24,),
                "decoder/layers_0/self_attention/key/bias": (12,),
                "decoder/layers_0/self_attention/value/bias": (12,),
            },
            set(),
        ),
        (
            {"query_key_norms": True},
            {
                "decoder/layers_0/self_attention/query_norm/scale": (6,),
                "decoder/layers_0/self_attention/key_norm/scale": (6,),
            },
            set(),
        ),
        (
            {"query_key_norms": True, "whole_norms": True},
            {
                "decoder/layers_0/self_attention/query_norm/scale": (24,),
                "decoder/layers_0/self_attention/key_norm/scale": (12,),
            },
            set(),
        ),
        (
            {"pre_norms": False, "post_norms": True},
            {
                "decoder/layers_0/post_self_attention_layer_norm/scale": (12,),
                "decoder/layers_0/post_mlp_layer_norm/scale": (12,),
            },
            {
                "decoder/layers_0/pre_self_attention_layer_norm/scale",
                "decoder/layers_0/pre_mlp_layer_norm/scale",
            },
        ),
        ({"exit_classifier": 2}, {"decoder/meta_cls/kernel": (12, 2), "decoder/meta_cls/bias": (2,)}, set()),
        ({"num_experts": 7, "experts_per_token": 2}, {"decoder/layers_0/mlp/router/kernel": (12, 7)}, set()),
    ],
)
def test_what_families_differ_in_adds_arrays(
    changes: dict[str, Any], added: dict[str, tuple[int, ...]], removed: set[str]
) -> None:
    """Biases, query and key norms, the head, the classifier and the router each have arrays of their own."""
    plain = parameter_shapes(build_llama_config(num_decoder_layers=1))
    changed = parameter_shapes(build_llama_config(num_decoder_layers=1, **changes))
    assert {name: shape for name, shape in changed.items() if name not in plain} == added
    assert plain.keys() - changed.keys() == removed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"emb_dim": 0}, "emb_dim must be at least 1 and below 2.*got 0"),
        ({"emb_dim": 12.0}, "emb_dim must be a whole number, got 12.0"),
        ({"vocab_size": 2**31}, "vocab_size must be .* below 2.*got 2147483648"),
        ({"num_decoder_layers": 1001}, "at most 1000, got 1001"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got 3 and 4"),
        ({"head_dim": 5}, "head_dim must be even, got 5"),
        ({"turned_dim": 3}, "turned_dim must be even and below head_dim, 6, got 3"),
        ({"turned_dim": 6}, "turned_dim must be even and below head_dim, 6, got 6"),
        ({"query_factor": 0}, "query_factor must be a number above 0.*got 0"),
        ({"residual_factor": -1.0}, "residual_factor must be a number above 0.*got -1.0"),
        ({"unturned_layers": (3,)}, r"unturned_layers must be .*from 0 to 2.*got \(3,\)"),
        ({"local_rope_theta": 5.0}, "local_rope_theta is for windowed_layers, and there are none"),
        ({"whole_norms": True}, "whole_norms is true, but without query_key_norms there are none"),
        (
            {
                "rope_scaling": RopeScaling(kind="longrope", original_max_positions=64, pair_factors=(1.0, 2.0)),
            },
            "pair_factors must have a number for each of 3 pairs, got 2",
        ),
        ({"norm_epsilon": 0}, "norm_epsilon must be a number above 0.*got 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number above 0.*got nan"),
        ({"rope_theta": 10**400}, "rope_theta must be a number above 0.*got 1000"),
        ({"rope_theta": True}, "rope_theta must be a number above 0.*got True"),
        ({"rope_scaling": {"kind": "linear"}}, "rope_scaling must be a RopeScaling, got .'kind'"),
        ({"activation": "tanh"}, "activation must be one of silu, gelu, relu; got 'tanh'"),
        ({"tied_head": 1}, "tied_head must be true or false, got 1"),
        ({"exit_classifier": 3}, "exit_classifier must be 0, 1 or 2 logits, got 3"),
        ({"end_ids": ()}, "end_ids must name at least one id"),
        ({"end_ids": (50,)}, r"end_ids must be different whole numbers from 0 to 49, ascending; got \(50,\)"),
        ({"end_ids": (3, 2)}, r"ascending; got \(3, 2\)"),
        ({"end_ids": 2}, "end_ids must be different whole numbers.*got 2"),
        ({"sliding_window": 8}, r"sliding_window and windowed_layers go together, got 8 and \(\)"),
        ({"windowed_layers": (0,)}, r"go together, got None and \(0,\)"),
        ({"sliding_window": 8, "windowed_layers": (3,)}, r"windowed_layers must be .*from 0 to 2.*got \(3,\)"),
        ({"sliding_window": 0, "windowed_layers": (0,)}, "sliding_window must be at least 1.*got 0"),
        ({"num_experts": 0}, "num_experts must be at least 1 .*got 0"),
        ({"num_experts": 2}, "num_experts must divide mlp_dim, got 2 and 7"),
        ({"num_experts": 7, "experts_per_token": 8}, "experts_per_token must be at most num_experts, got 8 and 7"),
        ({"normed_expert_weights": True}, "normed_expert_weights is true, but with a single expert there are no"),
    ],
)
def test_configs_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    """Each field is checked, and the message has the value."""
    with pytest.raises(ValueError, match=message):
        build_llama_config(**changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "ntk"}, "kind must be one of default, linear, dynamic, llama3, yarn, longrope; got 'ntk'"),
        (
            {"kind": "longrope", "original_max_positions": 8, "pair_factors": (1,)},
            r"pair_factors must be numbers above 0 .* got \(1,\)",
        ),
        ({"kind": "default", "factor": 2.0}, "factor is 2.0, but kind default has no such number"),
        ({"kind": "linear", "factor": 0.5}, "factor must be at least 1, got 0.5"),
        ({"kind": "linear", "factor": "2"}, "factor must be a number above 0.*got '2'"),
        ({"kind": "llama3", "factor": 8.0}, "original_max_positions must be at least 1.*got 0"),
        (
            {"kind": "llama3", "factor": 8.0, "original_max_positions": 32, "low_freq_factor": 4.0},
            "low_freq_factor must be below high_freq_factor, got 4.0 and 4.0",
        ),
        (
            {"kind": "yarn", "factor": 8.0, "original_max_positions": 32, "beta_slow": 40.0},
            "beta_slow must be below beta_fast, got 40.0 and 32.0",
        ),
    ],
)
def test_rope_scalings_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    """Each number is checked, and one that the kind does not use is refused."""
    with pytest.raises(ValueError, match=message):
        RopeScaling(**fields)


@pytest.mark.parametrize(
    "config",
    [
        build_llama_config(),
        build_llama_config(rope_scaling=_YARN, end_ids=(2, 5), sliding_window=8, windowed_layers=(1, 2)),
        build_llama_config(post_norms=True, turned_dim=4, query_factor=0.5, rope_scaling=_LONGROPE),
        build_llama_config(sliding_window=8, windowed_layers=(1,), local_rope_theta=5.0, unturned_layers=(0, 2)),
        build_llama_config(num_experts=7, experts_per_token=2, normed_expert_weights=True),
    ],
)
def test_a_config_comes_back_from_json(config: LlamaConfig) -> None:
    """A config written as JSON comes back equal."""
    assert config_of(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert config_of(json.loads(json.dumps(stored_fields(config)))) == config


def test_what_came_later_is_left_out_where_it_changes_nothing() -> None:
    """Later fields are omitted at their defaults, so that older readers and fingerprints stay valid."""
    assert stored_fields(build_llama_config()).keys() == {
        *("vocab_size", "emb_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "num_decoder_layers"),
        *("norm_epsilon", "rope_theta", "rope_scaling", "max_positions", "end_ids", "attention_bias"),
        *("query_key_norms", "tied_head", "sliding_window", "windowed_layers", "activation", "scaled_embedding"),
        *("unit_offset_norms", "exit_classifier", "exit_norms", "exit_heads"),
    }
    assert "pair_factors" not in stored_fields(build_llama_config())["rope_scaling"]
    assert stored_fields(build_llama_config(residual_factor=0.5))["residual_factor"] == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_expert": 8}, r"unknown keys \['num_expert'\], missing keys \[\]"),
        ({"rope_scaling": {"kind": "linear", "betas": 1}}, r"rope_scaling: unknown keys \['betas'\]"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
    ],
)
def test_unknown_fields_are_refused(changes: dict[str, Any], message: str) -> None:
    """A misspelled key is refused, and does not fall back to a default."""
    with pytest.raises(ValueError, match=message):
        config_of(dataclasses.asdict(build_llama_config()) | changes)


def test_missing_fields_are_refused() -> None:
    """A missing field without a default is refused."""
    fields = dataclasses.asdict(build_llama_config())
    del fields["rope_theta"]
    with pytest.raises(ValueError, match=r"missing keys \['rope_theta'\]"):
        config_of(fields)


def test_whole_numbers_and_fractions_are_one_model() -> None:
    """A base of 10000 equals 10000.0, also in the fingerprint."""
    whole, fraction = build_llama_config(rope_theta=10000), build_llama_config(rope_theta=10000.0)
    assert whole == fraction
    assert unseen(whole) == unseen(fraction)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LlamaConfig)])
def test_whatever_no_array_shows_is_told_apart(field: str) -> None:
    """Two configs that differ in one field differ in their arrays, or in the facts that arrays do not show."""
    changes: dict[str, Any] = {
        "num_heads": 8,
        "num_kv_heads": 4,
        "rope_scaling": _YARN,
        "end_ids": (3,),
        "sliding_window": 9,
        "windowed_layers": (0, 1),
        "activation": "gelu",
        "exit_classifier": 1,
        "norm_epsilon": 1e-6,
        "rope_theta": 5e5,
        "turned_dim": 4,
        "query_factor": 0.5,
        "unturned_layers": (2,),
        "local_rope_theta": 100.0,
        "attention_cap": 50.0,
        "logits_cap": 30.0,
        "mlp_dim": 14,
        "num_experts": 1,
    }
    plain = build_llama_config(sliding_window=8, windowed_layers=(0,), query_key_norms=True, num_experts=7)
    value = getattr(plain, field)
    if field not in changes:
        changes[field] = not value if isinstance(value, bool) else value + 2
    changed = dataclasses.replace(plain, **{field: changes[field]})
    assert (parameter_shapes(changed), unseen(changed)) != (parameter_shapes(plain), unseen(plain))


def test_arrays_of_another_model_are_refused() -> None:
    """Missing, unknown and misshapen arrays are named."""
    config = build_llama_config()
    shapes = dict(parameter_shapes(config))
    check_parameters(config, shapes)
    shapes["decoder/decoder_norm/scale"] = (13,)
    with pytest.raises(ValueError, match=r"decoder/decoder_norm/scale has shape \(13,\), expected \(12,\)"):
        check_parameters(config, shapes)
    shapes["decoder/final_norm/scale"] = shapes.pop("decoder/decoder_norm/scale")
    with pytest.raises(ValueError, match="missing decoder/decoder_norm/scale; unknown decoder/final_norm/scale"):
        check_parameters(config, shapes)


def test_some_exits_alone_are_refused() -> None:
    """All layers below the last have a norm, or a head, of their own, or none has; errors are named."""
    for field, kind in (("exit_norms", "scale"), ("exit_heads", "kernel")):
        config = build_llama_config(**{field: True})
        shapes = dict(parameter_shapes(config))
        check_parameters(config, shapes)
        with pytest.raises(ValueError, match=f"unknown decoder/{field}_0/{kind}, decoder/{field}_1/{kind}"):
            check_parameters(build_llama_config(), shapes)
        shapes[f"decoder/{field}_2/{kind}"] = shapes.pop(f"decoder/{field}_1/{kind}")
        with pytest.raises(ValueError, match=f"decoder/{field}_1/{kind} is missing: of 3 decoder layers"):
            check_parameters(config, shapes)
    with pytest.raises(ValueError, match="exit_heads is true, but needs at least 2 decoder layers"):
        build_llama_config(num_decoder_layers=1, exit_heads=True)


def test_configs_need_no_jax() -> None:
    """A model's sizes are known without JAX."""
    code = "import sys, calm_beam.model.llama; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
