"""Decoder-only models of Llama's family that transformers saves: Llama, Mistral, Mixtral, Qwen, Gemma and others.

Code Llama, TinyLlama, SmolLM, Qwen2.5, Phi-4 and many others have these types, too. A config value whose computation is
not supported here is refused. Tensors are stored [out, in].
Source: transformers `configuration_<type>.py` and `modeling_<type>.py`, versions 4 and 5.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from calm_beam.checkpoints.checkpoint import StoredModel
from calm_beam.checkpoints.metadata import CheckpointError, shortened
from calm_beam.checkpoints.stored_array import Array, are_equal, rows_of
from calm_beam.model.llama import MOST_LAYERS, LlamaConfig, RopeScaling, layer_shapes, parameter_shapes

from .files import EMBEDDING, Described, check_names, in_our_form, read_generation, read_tensors, written_ends
from .rope import read_rope, written_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """How the config of a mixture of experts describes them, with transformers' defaults for missing keys.

    Attributes:
      count_key: Key of the number of experts, as both versions read it.
      count: Its default.
      per_token: Default of `num_experts_per_tok`.
      width_key: Key of the width of one expert.
      weights_may_be_normed: Whether `norm_topk_prob` tells if the weights of a token's experts sum to 1.
      fixed: Keys with the only supported value of each.
    """

    count_key: str
    count: int
    per_token: int
    width_key: str = "intermediate_size"
    weights_may_be_normed: bool = False
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The properties of one `model_type`, with transformers' defaults for missing keys.

    Attributes:
      architecture: Its class that predicts tokens.
      max_positions: Default of `max_position_embeddings`.
      num_kv_heads: Default of `num_key_value_heads`; None for the number of heads.
      head_dim: Default of `head_dim`; None for the width divided by the number of heads.
      has_window: Whether `sliding_window` is used: a window in all layers, unless it is null.
      sliding_window: Default of `sliding_window`.
      window_pattern: Default of `sliding_window_pattern` if `layer_types` is missing too: every n-th layer has no
        window; None if that key is not used.
      names_layers: Whether `layer_types` names the layers with the window.
      windows_are_chosen: Whether `use_sliding_window` and `max_window_layers` select the layers with the window.
      settled: Fields of `LlamaConfig` with fixed values.
      factors: Keys of further factors, by fields of `LlamaConfig`; their default is 1.
      caps: Keys of limits on logits, by fields of `LlamaConfig`, each with its default; null is none.
      sublayers: Its names for parts of layers that differ from other families' or are missing there, by our names. A
        part that every expert has separately has braces in place of the expert's number.
      experts: How its config describes experts; None if layers have none.
      fused: Parts that it stores as one tensor, in their order, by that tensor's name.
      turns_some: Whether `partial_rotary_factor` is used.
      skips_turns: Whether `no_rope_layers` selects layers without rotary positions.
      theta: Default of `rope_theta`.
      local_theta: Default of `rope_local_base_freq`, for layers with the window; None if that key is not used.
      query_scalar: Default of `query_pre_attn_scalar`, by whose root queries are divided; None if that key is not used.
      norm_epsilon: Default of `rms_norm_eps`.
      is_tied: Default of `tie_word_embeddings`.
      end_id: Default of `eos_token_id`.
      activation: Default activation.
      activations: Names of activations that mean another one in this family.
    """

    architecture: str
    max_positions: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    has_window: bool = False
    sliding_window: int | None = None
    window_pattern: int | None = None
    names_layers: bool = False
    windows_are_chosen: bool = False
    settled: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    factors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    caps: Mapping[str, tuple[str, float]] = dataclasses.field(default_factory=dict)
    sublayers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    experts: Experts | None = None
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    turns_some: bool = False
    skips_turns: bool = False
    theta: float = 10_000.0
    local_theta: float | None = None
    query_scalar: int | None = None
    norm_epsilon: float = 1e-6
    is_tied: bool = False
    end_id: int | None = None
    activation: str = "silu"
    activations: Mapping[str, str] = dataclasses.field(default_factory=dict)


_MISTRAL = Family(
    architecture="MistralForCausalLM",
    max_positions=131072,
    num_kv_heads=8,
    has_window=True,
    sliding_window=4096,
    end_id=2,
)
_QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    max_positions=32768,
    num_kv_heads=32,
    has_window=True,
    sliding_window=4096,
    names_layers=True,
    windows_are_chosen=True,
    settled={"attention_bias": True},
)
_NORMS_ON_BOTH_SIDES = {
    "post_self_attention_layer_norm": "post_attention_layernorm",
    "pre_mlp_layer_norm": "pre_feedforward_layernorm",
    "post_mlp_layer_norm": "post_feedforward_layernorm",
}
FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", max_positions=2048, end_id=2),
    "mistral": _MISTRAL,
    "ministral": dataclasses.replace(_MISTRAL, architecture="MinistralForCausalLM", names_layers=True),
    "qwen2": _QWEN2,
    "qwen3": dataclasses.replace(
        _QWEN2, architecture="Qwen3ForCausalLM", head_dim=128, settled={"query_key_norms": True}
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        max_positions=131072,
        num_kv_heads=8,
        has_window=True,
        settled={"normed_expert_weights": True},
        sublayers={
            "mlp/router": "block_sparse_moe.gate",
            "mlp/wi_0": "block_sparse_moe.experts.{}.w1",
            "mlp/wi_1": "block_sparse_moe.experts.{}.w3",
            "mlp/wo": "block_sparse_moe.experts.{}.w2",
        },
        experts=Experts(count_key="num_local_experts", count=8, per_token=2),
        theta=1_000_000.0,
        norm_epsilon=1e-5,
        end_id=2,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        max_positions=32768,
        num_kv_heads=4,
        settled={"query_key_norms": True},
        sublayers={
            "mlp/router": "mlp.gate",
            "mlp/wi_0": "mlp.experts.{}.gate_proj",
            "mlp/wi_1": "mlp.experts.{}.up_proj",
            "mlp/wo": "mlp.experts.{}.down_proj",
        },
        experts=Experts(
            count_key="num_experts",
            count=128,
            per_token=8,
            width_key="moe_intermediate_size",
            weights_may_be_normed=True,
            # Otherwise some layers have no experts; and it ignores max_window_layers, unlike Qwen3.
            fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
        ),
    ),
    "gemma": Family(
        architecture="GemmaForCausalLM",
        max_positions=8192,
        num_kv_heads=16,
        head_dim=256,
        settled={"scaled_embedding": True, "unit_offset_norms": True},
        is_tied=True,
        end_id=1,
        activation="gelu",
        # The first files have this name and mean the tanh form.
        activations={"gelu": "gelu"},
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        max_positions=2048,
        settled={"pre_norms": False, "post_norms": True, "query_key_norms": True, "whole_norms": True},
        sublayers={
            "post_self_attention_layer_norm": "post_attention_layernorm",
            "post_mlp_layer_norm": "post_feedforward_layernorm",
        },
        norm_epsilon=1e-5,
        end_id=50279,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        max_positions=32768,
        num_kv_heads=4,
        skips_turns=True,
        theta=2_000_000.0,
        is_tied=True,
        end_id=128001,
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        max_positions=8192,
        num_kv_heads=4,
        head_dim=256,
        has_window=True,
        sliding_window=4096,
        window_pattern=2,
        names_layers=True,
        settled={"scaled_embedding": True, "unit_offset_norms": True, "post_norms": True},
        caps={"attention_cap": ("attn_logit_softcapping", 50.0), "logits_cap": ("final_logit_softcapping", 30.0)},
        sublayers=_NORMS_ON_BOTH_SIDES,
        query_scalar=256,
        is_tied=True,
        end_id=1,
        activation="gelu_pytorch_tanh",
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        max_positions=131072,
        num_kv_heads=4,
        head_dim=256,
        has_window=True,
        sliding_window=4096,
        window_pattern=6,
        names_layers=True,
        settled={"scaled_embedding": True, "unit_offset_norms": True, "query_key_norms": True, "post_norms": True},
        sublayers=_NORMS_ON_BOTH_SIDES,
        theta=1_000_000.0,
        local_theta=10_000.0,
        query_scalar=256,
        is_tied=True,
        end_id=1,
        activation="gelu_pytorch_tanh",
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        max_positions=4096,
        has_window=True,
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
        turns_some=True,
        norm_epsilon=1e-5,
        end_id=32000,
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        max_positions=2048,
        factors={
            "embedding_factor": "embedding_multiplier",
            "residual_factor": "residual_multiplier",
            "query_factor": "attention_multiplier",
            "logits_divisor": "logits_scaling",
        },
        end_id=2,
    ),
}

# Keys of the number of experts; version 5 of transformers writes the second for all families.
_COUNTS = ("num_experts", "num_local_experts")
# Experts of all layers: far more than any model has, and few enough to write out the names of all tensors.
_MOST_EXPERTS = 1 << 16

# Options whose computation is not supported if they are on.
_OFF = (
    *("attention_bias", "mlp_bias", "use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
# transformers' names of activations; its "gelu" is not the tanh form.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
# The names to write.
_WRITTEN = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "relu": "relu"}

# The names of kinds of layers, by whether they have the window.
_KINDS = {False: "full_attention", True: "sliding_attention"}

_OUTSIDE_OF_LAYERS = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder/decoder_norm/scale": "model.norm.weight",
    "decoder/logits_dense/kernel": "lm_head.weight",
}
_IN_LAYER = re.compile(r"decoder/layers_(\d+)/(.+?)(?:/(?:kernel|scale|(bias)))")
_SUBLAYERS = {
    "pre_self_attention_layer_norm": "input_layernorm",
    "self_attention/query": "self_attn.q_proj",
    "self_attention/key": "self_attn.k_proj",
    "self_attention/value": "self_attn.v_proj",
    "self_attention/out": "self_attn.o_proj",
    "self_attention/query_norm": "self_attn.q_norm",
    "self_attention/key_norm": "self_attn.k_norm",
    "pre_mlp_layer_norm": "post_attention_layernorm",
    "mlp/wi_0": "mlp.gate_proj",
    "mlp/wi_1": "mlp.up_proj",
    "mlp/wo": "mlp.down_proj",
}
_KERNEL_IN_LAYER = re.compile(r"(model\.layers\.\d+)\.(.+)\.weight")
# Frequencies in older files, which transformers recomputes.
_UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def read_decoder_only(
    directory: pathlib.Path, fields: Mapping[str, Any], *, keeps: Callable[[str], bool]
) -> StoredModel:
    """Returns a decoder-only model that transformers saved.

    Args:
      directory: Folder with `config.json` and `model.safetensors`, or the parts in its index. End-of-sequence ids are
        those of `generation_config.json`, if it has some.
      fields: Content of `config.json`; its `model_type` is one of `FAMILIES`.
      keeps: Which tensors to read, by name.

    Raises:
      CheckpointError: If the model's computation is not supported; if a file is missing or damaged, or a tensor is
        missing, unknown or of another type than a float of 16 or 32 bits.
    """
    path = directory / "config.json"
    family = FAMILIES[fields["model_type"]]
    generation = read_generation(directory, fields)
    end_ids, source = generation.end_ids(family.end_id)
    try:
        config = _config(path, fields, family=family, end_ids=end_ids)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    stored = read_tensors(directory, keeps)
    tensors = {name: tensor for name, tensor in stored.items() if not _UNUSED.fullmatch(name)}
    if config.tied_head:
        _take_tied_head(directory, tensors)
    if family.fused:
        tensors = _parted(directory, tensors, family=family, config=config)
    names = _names(config, family)
    expected = [theirs for parts in names.values() for theirs in parts]
    check_names(directory, found=tensors, expected=expected, model=family.architecture)
    for theirs in names.values():
        _check_alike(directory, {name: tensors[name] for name in theirs})
    return StoredModel(
        config=config,
        arrays=stored.of(
            {ours: in_our_form(ours, [tensors[name] for name in theirs]) for ours, theirs in names.items()}
        ),
        stated=(
            f"Outputs end with token {' or '.join(map(str, end_ids))}: {source} says so.",
            *generation.not_followed(),
        ),
        generation=generation.facts(),
    )


def describe_decoder_only(config: LlamaConfig) -> Described:
    """Returns transformers' description of a decoder-only model, for the first family with the same computation.

    Args:
      config: Config of the model, without exit norms, exit heads or classifier.

    Raises:
      ValueError: If no family has the same computation; says how the nearest one differs.
    """
    if config.rope_scaling.kind == "longrope":
        raise ValueError(
            "of longrope, the factors beyond the positions of the first training are not kept, and transformers needs "
            "them."
        )
    nearest: list[tuple[list[str], str]] = []
    for model_type, family in FAMILIES.items():
        if family.fused:
            # Families that store parts separately have the same computation.
            continue
        fields = _fields(config, model_type, family=family)
        try:
            found = _config(pathlib.Path("config.json"), fields, family=family, end_ids=config.end_ids)
        except ValueError:
            # A field that the family does not have.
            continue
        differing = [
            f"{field.name} is {getattr(found, field.name)!r} there and {getattr(config, field.name)!r} here"
            for field in dataclasses.fields(LlamaConfig)
            if getattr(found, field.name) != getattr(config, field.name)
        ]
        if not differing:
            return Described(
                fields=fields,
                generation={"eos_token_id": fields["eos_token_id"]},
                names=_names(config, family),
            )
        nearest.append((differing, model_type))
    differing, model_type = min(nearest, key=lambda each: len(each[0]))
    raise ValueError(
        f"transformers has no model that computes the same; the nearest is {model_type}: {', '.join(differing)}."
    )


def _fields(config: LlamaConfig, model_type: str, *, family: Family) -> dict[str, Any]:
    """Returns the content of `config.json` for a model, if it belongs to a family."""
    theta, scaling = written_rope(config)
    fields: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.emb_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_decoder_layers,
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_positions,
        "hidden_act": _WRITTEN[config.activation],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tied_head,
        # Some defaults are ids that the vocabulary may not have.
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": written_ends(config.end_ids),
        **_feed_forward_fields(config, family),
    }
    if family.activation != "silu":
        fields["hidden_activation"] = _WRITTEN[config.activation]
    if family.skips_turns:
        fields["no_rope_layers"] = [
            int(index not in config.unturned_layers) for index in range(config.num_decoder_layers)
        ]
    if family.local_theta is not None:
        fields["rope_local_base_freq"] = config.local_rope_theta or family.local_theta
    if family.query_scalar is not None:
        factor = config.query_factor or config.head_dim**-0.5
        fields["query_pre_attn_scalar"] = round(factor**-2)
    fields |= {key: getattr(config, ours) for ours, key in family.factors.items()}
    if "query_factor" in family.factors and config.query_factor is None:
        fields[family.factors["query_factor"]] = config.head_dim**-0.5
    fields |= {key: getattr(config, ours) for ours, (key, _) in family.caps.items()}
    if family.has_window:
        fields["sliding_window"] = config.sliding_window
    if family.names_layers:
        fields["layer_types"] = [_KINDS[index in config.windowed_layers] for index in range(config.num_decoder_layers)]
    if family.windows_are_chosen:
        depth, windowed = config.num_decoder_layers, config.windowed_layers
        fields |= {
            "use_sliding_window": bool(windowed),
            "max_window_layers": windowed[0] if windowed else depth,
        }
    return fields


def _feed_forward_fields(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the content of `config.json` on feed-forward layers."""
    experts, width = family.experts, config.mlp_dim // config.num_experts
    if experts is None:
        return {"intermediate_size": width}
    return {
        **experts.fixed,
        "intermediate_size": width,
        experts.width_key: width,
        experts.count_key: config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        **({"norm_topk_prob": config.normed_expert_weights} if experts.weights_may_be_normed else {}),
    }


def _config(path: pathlib.Path, fields: Mapping[str, Any], *, family: Family, end_ids: tuple[int, ...]) -> LlamaConfig:
    architectures = fields.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise CheckpointError(
            f"{path}: architectures is {shortened(repr(architectures))}; only [{family.architecture!r}] is supported."
        )
    caps = {ours: fields.get(key, default) for ours, (key, default) in family.caps.items()}
    for key in set(_OFF) - {key for key, _ in family.caps.values()}:
        if fields.get(key):
            raise CheckpointError(f"{path}: {key} is {shortened(repr(fields[key]))}; that is not supported.")
    tied_head = _flag(path, fields, key="tie_word_embeddings", default=family.is_tied)
    width = _whole(path, fields, key="hidden_size")
    num_heads = _whole(path, fields, key="num_attention_heads")
    # Checked before anything is allocated for each layer.
    depth = _whole(path, fields, key="num_hidden_layers", most=MOST_LAYERS)
    max_positions = _whole(path, fields, key="max_position_embeddings", default=family.max_positions)
    kv_default = num_heads if "num_key_value_heads" in fields or not family.num_kv_heads else family.num_kv_heads
    rope_fields, local_theta = _rope_fields(path, fields, family)
    theta, scaling, turned_share = read_rope(
        path, rope_fields, default=family.theta, max_positions=max_positions, turns_some=family.turns_some
    )
    head_dim = _whole(path, fields, key="head_dim", default=family.head_dim or width // num_heads)
    turned_dim = int(head_dim * turned_share)
    window, windowed_layers = _windows(path, fields, family=family, depth=depth)
    epsilon = fields.get("rms_norm_eps", family.norm_epsilon)
    factors = {ours: fields.get(key, 1.0) for ours, key in family.factors.items()}
    if family.query_scalar is not None:
        scalar = _whole(path, fields, key="query_pre_attn_scalar", default=family.query_scalar)
        factors["query_factor"] = scalar**-0.5
    if factors.get("query_factor") == head_dim**-0.5:
        # The other families' value.
        del factors["query_factor"]
    return LlamaConfig(
        vocab_size=_whole(path, fields, key="vocab_size"),
        emb_dim=width,
        num_heads=num_heads,
        num_kv_heads=_whole(path, fields, key="num_key_value_heads", default=kv_default),
        head_dim=head_dim,
        num_decoder_layers=depth,
        norm_epsilon=epsilon,
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=_positions(max_positions, scaling),
        end_ids=end_ids,
        tied_head=tied_head,
        sliding_window=window,
        windowed_layers=windowed_layers,
        activation=_activation(path, fields, family),
        turned_dim=None if turned_dim == head_dim else turned_dim,
        unturned_layers=_unturned(path, fields, depth=depth) if family.skips_turns else (),
        local_rope_theta=local_theta if windowed_layers else None,
        **_feed_forward(path, fields, family=family, depth=depth),
        **factors,
        **caps,
        **family.settled,
    )


def _feed_forward(path: pathlib.Path, fields: Mapping[str, Any], *, family: Family, depth: int) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` on feed-forward layers."""
    experts = family.experts
    if experts is None:
        return {"mlp_dim": _whole(path, fields, key="intermediate_size")}
    for key, value in experts.fixed.items():
        if fields.get(key, value) not in (value, None):
            raise CheckpointError(f"{path}: {key} is {shortened(repr(fields[key]))}; only {value!r} is supported.")
    given = [key for key in _COUNTS if fields.get(key) is not None]
    if given and any(fields[key] != fields[given[0]] for key in given):
        raise CheckpointError(f"{path}: {' and '.join(given)} differ; expected one number of experts.")
    key = given[0] if given else experts.count_key
    count = _whole(path, fields, key=key, default=experts.count, least=2, most=_MOST_EXPERTS // depth)
    made = {
        "mlp_dim": count * _whole(path, fields, key=experts.width_key),
        "num_experts": count,
        "experts_per_token": _whole(path, fields, key="num_experts_per_tok", default=experts.per_token, most=count),
    }
    if experts.weights_may_be_normed:
        made["normed_expert_weights"] = _flag(path, fields, key="norm_topk_prob", default=False)
    return made


def _rope_fields(
    path: pathlib.Path, fields: Mapping[str, Any], family: Family
) -> tuple[Mapping[str, Any], float | None]:
    """Returns the fields on rotary positions in layers without a window, and the base for layers with one."""
    if family.local_theta is None:
        return fields, None
    local, by_kind = fields.get("rope_local_base_freq"), fields.get("rope_parameters")
    if isinstance(by_kind, dict) and by_kind.keys() <= set(_KINDS.values()):
        # Version 5 has them for each kind of layer.
        fields = {**fields, "rope_parameters": by_kind.get(_KINDS[False])}
        of_windows = by_kind.get(_KINDS[True])
        given = {**of_windows} if isinstance(of_windows, dict) else {}
        if given.pop("rope_type", "default") != "default" or given.keys() > {"rope_theta"}:
            raise CheckpointError(
                f"{path}: rope_parameters of {_KINDS[True]} is {shortened(repr(of_windows))}; only a rope_theta is "
                "supported."
            )
        local = given.get("rope_theta", local)
    return fields, family.local_theta if local is None else local


def _unturned(path: pathlib.Path, fields: Mapping[str, Any], *, depth: int) -> tuple[int, ...]:
    """Returns the layers without rotary positions."""
    if fields.get("use_sliding_window"):
        raise CheckpointError(f"{path}: use_sliding_window is True; that is not supported.")
    turned = fields.get("no_rope_layers")
    if turned is None:
        interval = _whole(path, fields, key="no_rope_layer_interval", default=4)
        turned = [int((index + 1) % interval != 0) for index in range(depth)]
    if not isinstance(turned, list) or len(turned) != depth or not all(each in (0, 1) for each in turned):
        raise CheckpointError(
            f"{path}: no_rope_layers is {shortened(repr(turned))}; expected 0 or 1 for each of {depth} layers."
        )
    return tuple(index for index, is_turned in enumerate(turned) if not is_turned)


def _positions(max_positions: int, scaling: RopeScaling) -> int:
    """Returns the number of positions of a model."""
    if scaling.kind == "longrope":
        # With more, all positions of a prompt would use other factors.
        return min(max_positions, scaling.original_max_positions)
    # YaRN's files give either the length of the first training or the extended length.
    return max(max_positions, int(scaling.factor * scaling.original_max_positions))


def _windows(
    path: pathlib.Path, fields: Mapping[str, Any], *, family: Family, depth: int
) -> tuple[int | None, tuple[int, ...]]:
    """Returns the size of the sliding window, and the layers with it."""
    is_on, first = family.has_window, 0
    if family.windows_are_chosen:
        is_on = _flag(path, fields, key="use_sliding_window", default=False)
        first = _whole(path, fields, key="max_window_layers", default=28, least=0)
    window = fields.get("sliding_window", family.sliding_window) if is_on else None
    pattern = None
    if family.window_pattern is not None:
        pattern = _whole(path, fields, key="sliding_window_pattern", default=family.window_pattern)
    kinds = [
        _KINDS[window is not None and index >= first and (pattern is None or (index + 1) % pattern != 0)]
        for index in range(depth)
    ]
    named = fields.get("layer_types")
    if named is not None and named != kinds:
        if not family.names_layers or not _are_kinds(named, depth) or window is None:
            raise CheckpointError(
                f"{path}: layer_types is {shortened(repr(named))}; expected {shortened(repr(kinds))}."
            )
        kinds = named
    windowed = tuple(index for index, kind in enumerate(kinds) if kind == _KINDS[True])
    return (window if windowed else None), windowed


def _are_kinds(named: object, depth: int) -> bool:
    return isinstance(named, list) and len(named) == depth and all(kind in _KINDS.values() for kind in named)


def _activation(path: pathlib.Path, fields: Mapping[str, Any], family: Family) -> str:
    name = fields.get("hidden_activation") or fields.get("hidden_act") or family.activation
    known = {**_ACTIVATIONS, **family.activations}
    if not isinstance(name, str) or name not in known:
        raise CheckpointError(f"{path}: hidden_act is {shortened(repr(name))}; only {', '.join(known)} are supported.")
    return known[name]


def _take_tied_head(directory: pathlib.Path, tensors: dict[str, Array]) -> None:
    """Removes a copy of the embedding from the tensors, if there is one in place of the head."""
    head = tensors.pop("lm_head.weight", None)
    embedding = tensors.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and not are_equal(head, embedding):
        raise CheckpointError(
            f"{directory}: lm_head.weight differs from model.embed_tokens.weight, but the config ties them. What that "
            "computes depends on the version of transformers: remove lm_head.weight, or set tie_word_embeddings to "
            "false."
        )


def _whole(
    path: pathlib.Path,
    fields: Mapping[str, Any],
    *,
    key: str,
    default: int | None = None,
    least: int = 1,
    most: int | None = None,
) -> int:
    """Returns a whole number; null counts as missing."""
    value = fields.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise CheckpointError(f"{path}: {key} must be a whole number {limits}, got {shortened(repr(value))}.")
    return value


def _flag(path: pathlib.Path, fields: Mapping[str, Any], *, key: str, default: bool) -> bool:
    value = fields.get(key, default)
    if type(value) is not bool:
        raise CheckpointError(f"{path}: {key} must be true or false, got {shortened(repr(value))}.")
    return value


def _parted(
    directory: pathlib.Path, tensors: Mapping[str, Array], *, family: Family, config: LlamaConfig
) -> dict[str, Array]:
    """Returns the tensors with fused ones cut into their parts, under the names that other families use."""
    rows = {
        _SUBLAYERS[name.removesuffix("/kernel")]: shape[-1]
        for name, shape in layer_shapes(config).items()
        if name.endswith("/kernel")
    }
    parted: dict[str, Array] = {}
    for name, tensor in tensors.items():
        match = _KERNEL_IN_LAYER.fullmatch(name)
        parts = family.fused.get(match.group(2), ()) if match else ()
        if not parts or match is None:
            parted[name] = tensor
            continue
        sizes = [rows[part] for part in parts]
        if tensor.shape[:1] != (sum(sizes),):
            raise CheckpointError(
                f"{directory}: {name} has shape {tensor.shape}, expected {sum(sizes)} rows: {' and '.join(parts)}."
            )
        first = 0
        for part, size in zip(parts, sizes, strict=True):
            parted[f"{match.group(1)}.{part}.weight"] = rows_of(tensor, first, first + size)
            first += size
    return parted


def _check_alike(directory: pathlib.Path, tensors: Mapping[str, Array]) -> None:
    """Refuses tensors of a layer's experts of different shapes."""
    if len(tensors) == 1:
        return
    first, expected = next((name, tensor.shape) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if tensor.shape != expected or len(expected) != 2:
            raise CheckpointError(
                f"{directory}: {name} has shape {tensor.shape} and {first} {expected}; expected matrices of one shape."
            )


def _names(config: LlamaConfig, family: Family) -> dict[str, list[str]]:
    """Returns transformers' names of the tensors of each parameter, by our names."""
    names: dict[str, list[str]] = {}
    for name in parameter_shapes(config):
        theirs = _their_name(name, family)
        names[name] = list(dict.fromkeys(theirs.format(expert) for expert in range(config.num_experts)))
    return names


def _their_name(name: str, family: Family) -> str:
    """Returns a parameter's name in transformers, with braces if there is one for every expert.

    >>> _their_name("decoder/layers_3/self_attention/query/kernel", FAMILIES["llama"])
    'model.layers.3.self_attn.q_proj.weight'
    >>> _their_name("decoder/layers_3/post_mlp_layer_norm/scale", FAMILIES["olmo2"])
    'model.layers.3.post_feedforward_layernorm.weight'
    """
    if name in _OUTSIDE_OF_LAYERS:
        return _OUTSIDE_OF_LAYERS[name]
    match = _IN_LAYER.fullmatch(name)
    assert match is not None, name
    index, sublayer, bias = match.groups()
    theirs = {**_SUBLAYERS, **family.sublayers}[sublayer]
    return f"model.layers.{index}.{theirs}.{bias or 'weight'}"
