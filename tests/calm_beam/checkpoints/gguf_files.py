"""GGUF files, made by the package's own writer, with the names and forms of llama.cpp's converter."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from calm_beam.model.llama import LlamaConfig

_NAMES = {
    "self_attention/query": "attn_q",
    "self_attention/key": "attn_k",
    "self_attention/value": "attn_v",
    "self_attention/out": "attn_output",
    "self_attention/query_norm": "attn_q_norm",
    "self_attention/key_norm": "attn_k_norm",
    "pre_self_attention_layer_norm": "attn_norm",
    "pre_mlp_layer_norm": "ffn_norm",
    "post_self_attention_layer_norm": "post_attention_norm",
    "post_mlp_layer_norm": "post_ffw_norm",
    "mlp/wi_0": "ffn_gate",
    "mlp/wi_1": "ffn_up",
    "mlp/wo": "ffn_down",
}
# Phi-3's tensors that hold several, one after another in their rows.
_FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}
_OUTSIDE = {
    "token_embedder/embedding": "token_embd.weight",
    "decoder/decoder_norm/scale": "output_norm.weight",
    "decoder/logits_dense/kernel": "output.weight",
}


def tensors_of(config: LlamaConfig, arrays: Mapping[str, np.ndarray], *, architecture: str) -> dict[str, np.ndarray]:
    """Returns the tensors of a model by GGUF's names, [out, in], transformed as the converter does."""
    tensors = {}
    for name, array in arrays.items():
        tensor = array if name == "token_embedder/embedding" else array.T
        if architecture in ("llama", "granite", "smollm3") and ("/query/" in name or "/key/" in name):
            # Halves of a head become neighbours.
            halves = tensor.reshape(-1, 2, config.head_dim // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and name.endswith("/scale"):
            tensor = tensor + np.float32(1)
        if name in _OUTSIDE:
            tensors[_OUTSIDE[name]] = tensor
            continue
        _, layer, rest = name.split("/", 2)
        sublayer, _, kind = rest.rpartition("/")
        index = layer.removeprefix("layers_")
        tensors[f"blk.{index}.{_NAMES[sublayer]}.{'bias' if kind == 'bias' else 'weight'}"] = tensor
    if architecture == "phi3":
        for number in range(config.num_decoder_layers):
            for fused, names in _FUSED.items():
                parts = [tensors.pop(f"blk.{number}.{name}.weight") for name in names]
                tensors[f"blk.{number}.{fused}.weight"] = np.concatenate(parts)
        if config.rope_scaling.kind == "longrope":
            short = np.array(config.rope_scaling.pair_factors, np.float32)
            tensors |= {"rope_factors_short.weight": short, "rope_factors_long.weight": 2 * short}
    return tensors


def fields_of(config: LlamaConfig, *, architecture: str) -> dict[str, Any]:
    """Returns the metadata of a model by its keys."""
    fields: dict[str, Any] = {
        "context_length": config.max_positions,
        "embedding_length": config.emb_dim,
        "block_count": config.num_decoder_layers,
        "feed_forward_length": config.mlp_dim,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_epsilon,
        "rope.freq_base": config.rope_theta,
    }
    if architecture == "phi3":
        # Heads are as wide as the model's width gives it.
        del fields["attention.key_length"], fields["attention.value_length"]
        fields |= {
            "attention.sliding_window": 0,
            "rope.dimension_count": config.turned,
            "rope.scaling.original_context_length": config.rope_scaling.original_max_positions or config.max_positions,
        }
        if config.rope_scaling.kind == "longrope":
            fields["context_length"] = 4 * config.max_positions
            fields["rope.scaling.attn_factor"] = config.rope_scaling.attention_factor
    if config.sliding_window is not None:
        fields["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        fields |= {"attn_logit_softcapping": config.attention_cap, "final_logit_softcapping": config.logits_cap}
    if architecture == "granite":
        fields |= {
            "embedding_scale": config.embedding_factor,
            "residual_scale": config.residual_factor,
            "attention.scale": config.query_factor,
            "logit_scale": config.logits_divisor,
        }
    return {
        **{f"{architecture}.{key}": value for key, value in fields.items()},
        "tokenizer.ggml.eos_token_id": config.end_ids[0],
    }


def write_gguf(
    path: pathlib.Path,
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str,
    fields: Mapping[str, Any],
    kinds: Mapping[str, str] | None = None,
) -> pathlib.Path:
    """Writes a file and returns it.

    Args:
      path: File to write.
      tensors: By name; float32.
      architecture: `general.architecture`.
      fields: Metadata by key: whole numbers, other numbers, flags, texts, or lists of one of these.
      kinds: Types to store tensors as, by name, such as `Q4_1`; the others are F32.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
