"""Folders of decoder-only models as transformers saves them, with its names and without its reader."""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

# Of a small model of any family; keys are those of `config.json`.
SIZES = {
    "vocab_size": 40,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
# Of a mixture, each expert of the width above.
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# By type, the place and names of experts' tensors: gate, up and down.
_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def build_tensors(model_type: str, fields: Mapping[str, Any], *, tied: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random tensors, [out, in], of a model with the given fields."""
    generator = np.random.default_rng(seed)
    width, heads, kv = fields["hidden_size"], fields["num_attention_heads"], fields["num_key_value_heads"]
    head, inner, vocabulary = fields["head_dim"], fields["intermediate_size"], fields["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.norm.weight": (width,),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, width)
    first_norm = "post_feedforward_layernorm" if model_type == "olmo2" else "input_layernorm"
    for index in range(fields["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.{first_norm}.weight": (width,), f"{layer}.post_attention_layernorm.weight": (width,)}
        for letter, size in (("q", heads * head), ("k", kv * head), ("v", kv * head)):
            shapes[f"{layer}.self_attn.{letter}_proj.weight"] = (size, width)
            if model_type == "qwen2":
                shapes[f"{layer}.self_attn.{letter}_proj.bias"] = (size,)
            if model_type in ("qwen3", "qwen3_moe", "gemma3_text") and letter != "v":
                shapes[f"{layer}.self_attn.{letter}_norm.weight"] = (head,)
            if model_type == "olmo2" and letter != "v":
                shapes[f"{layer}.self_attn.{letter}_norm.weight"] = (size,)
        if model_type in ("gemma2", "gemma3_text"):
            shapes |= {f"{layer}.{side}_feedforward_layernorm.weight": (width,) for side in ("pre", "post")}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (width, heads * head)
        place, (gate, up, down) = _EXPERTS.get(model_type, ("mlp", ("gate_proj", "up_proj", "down_proj")))
        homes = [f"{layer}.{place}"]
        if model_type in _EXPERTS:
            homes = [f"{layer}.{place}.experts.{expert}" for expert in range(EXPERTS["num_local_experts"])]
            shapes[f"{layer}.{place}.gate.weight"] = (len(homes), width)
        for home in homes:
            shapes |= {f"{home}.{name}.weight": (inner, width) for name in (gate, up)}
            shapes[f"{home}.{down}.weight"] = (width, inner)
    tensors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return _fused(tensors) if model_type == "phi3" else tensors


def _fused(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns tensors with queries, keys and values joined, and gate and up joined."""
    fused: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        for parts, whole in (
            ("self_attn.[qkv]_proj", "self_attn.qkv_proj"),
            ("mlp.(gate|up)_proj", "mlp.gate_up_proj"),
        ):
            if re.search(parts, name):
                name = re.sub(parts, whole, name)
                tensor = np.concatenate([fused[name], tensor]) if name in fused else tensor
        fused[name] = tensor
    return fused


def write_decoder_only(
    folder: pathlib.Path,
    model_type: str = "llama",
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    tied: bool = False,
    generation: Mapping[str, Any] | None = None,
    **changes: Any,
) -> pathlib.Path:
    """Writes a folder and returns it.

    Args:
      folder: Folder to write; made if needed.
      model_type: As in `config.json`.
      tensors: Those to store, by name; by default those of the sizes.
      tied: Whether there is no tensor of a head, and the config says so.
      generation: Content of `generation_config.json`; with None, there is no file.
      changes: Fields of `config.json`; those that are `...` are left out.
    """
    fields = {
        "architectures": [_ARCHITECTURES.get(model_type, "OtherForCausalLM")],
        "model_type": model_type,
        **SIZES,
        **(EXPERTS if model_type in _EXPERTS else {}),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in fields.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tensors is None:
        tensors = build_tensors(model_type, SIZES, tied=tied)
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return folder
