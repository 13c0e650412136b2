"""Makes `decoder_only_goldens/`: tiny random models of Llama's family as transformers saves them, with its outputs.

Needs torch and transformers, which the project itself never does. Made with torch 2.15 and transformers 5.23; those of
`olmo2`, `phi3`, `phi3_longrope`, `granite`, `smollm3`, `gemma2`, `gemma3`, `ministral`, `mixtral`, `qwen3_moe` and
`qwen3_moe_normed` with transformers 5.24:

    python -m tests.calm_beam.checkpoints.make_decoder_only_goldens NAME ...
"""

import pathlib
import sys
from typing import Any

import numpy as np

FOLDER = pathlib.Path(__file__).with_name("decoder_only_goldens")
STEPS = 12

_SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": [2, 5],
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}  # fmt: skip
_LONGROPE = {"type": "longrope", "short_factor": [1.5, 3.0], "long_factor": [2.0, 9.0]}
_GEMMA3_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_MINISTRAL_LAYERS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "mlp_only_layers": []}
# Class, seed, and changed fields; prompts and outputs have up to 48 tokens, far beyond scaled models' first limits.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("Llama", 1, {"num_hidden_layers": 8}),
    "llama_tied": ("Llama", 2, {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_hidden_layers": 2}),
    "llama3": ("Llama", 3, {"rope_scaling": _LLAMA3, "rope_theta": 500000.0}),
    "linear": ("Llama", 4, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic": ("Llama", 5, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "yarn": ("Llama", 6, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                           "original_max_position_embeddings": 16}}),
    "mistral": ("Mistral", 7, {"sliding_window": 6}),
    "qwen2": ("Qwen2", 8, {"head_dim": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", 9, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "gemma": ("Gemma", 10, {"num_key_value_heads": 1, "tie_word_embeddings": True,
                            "hidden_activation": "gelu_pytorch_tanh"}),
    "olmo2": ("Olmo2", 11, {"num_key_value_heads": 2}),
    "smollm3": ("SmolLM3", 15, {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", 16, {"num_hidden_layers": 4, "sliding_window": 5, "query_pre_attn_scalar": 12,
                              "layer_types": _GEMMA3_LAYERS, "tie_word_embeddings": True,
                              "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 500.0,
                              "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "gemma2": ("Gemma2", 17, {"num_hidden_layers": 4, "sliding_window": 5, "query_pre_attn_scalar": 12,
                              "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0,
                              "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}),
    "ministral": ("Ministral", 18, {"num_hidden_layers": 4, "sliding_window": 6, "layer_types": _MINISTRAL_LAYERS}),
    "mixtral": ("Mixtral", 19, {"num_local_experts": 4, "sliding_window": 6}),
    "qwen3_moe": ("Qwen3Moe", 20, _QWEN3_MOE),
    "qwen3_moe_normed": ("Qwen3Moe", 21, {**_QWEN3_MOE, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "phi3": ("Phi3", 12, {"head_dim": 4, "sliding_window": 7}),
    "phi3_longrope": ("Phi3", 13, {"hidden_size": 32, "max_position_embeddings": 192, "partial_rotary_factor": 0.5,
                                   "original_max_position_embeddings": 48, "rope_scaling": _LONGROPE}),
    "granite": ("Granite", 14, {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.25,
                                "logits_scaling": 2.0, "tie_word_embeddings": True}),
}  # fmt: skip


def build_model(family: str, seed: int, **changes: Any) -> Any:
    """Returns a tiny model with random weights that give varied logits; `changes` are fields of its config."""
    import torch
    import transformers

    # Gemma 3's class that reads texts only.
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**_SIZES, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_((not family.startswith("Gemma")) + 0.2 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif name.endswith("embed_tokens.weight"):
                parameter.copy_(noise)
            else:
                scale = 3 if name.endswith(("q_proj.weight", "lm_head.weight")) else 1.5
                parameter.copy_(noise * scale * parameter.shape[-1] ** -0.5)
    return model


def sequences(seed: int) -> list[list[int]]:
    """Returns sequences of token ids, of several lengths; 0 is an id like others."""
    generator = np.random.default_rng(seed)
    return [[*generator.integers(0, _SIZES["vocab_size"], size=length - 1).tolist(), 0] for length in (48, 7, 1)]


def prompts(seed: int) -> list[list[int]]:
    """Returns 50 prompts of 1 to 36 tokens."""
    generator = np.random.default_rng(1000 + seed)
    lengths = generator.integers(1, 37, size=50).tolist()
    return [generator.integers(0, _SIZES["vocab_size"], size=length).tolist() for length in lengths]


def layer_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Returns the logits after every layer, (layers, tokens, vocabulary)."""
    import torch

    with torch.no_grad():
        output = model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        # The first is the embedding; the last is normed already.
        divisor = getattr(model.config, "logits_scaling", 1.0)
        early = [model.lm_head(model.model.norm(hidden)) / divisor for hidden in output.hidden_states[1:-1]]
        cap = getattr(model.config, "final_logit_softcapping", None)
        early = [cap * torch.tanh(logits / cap) if cap else logits for logits in early]
        return torch.cat([*early, output.logits]).numpy()


def greedy(model: Any, prompts: list[list[int]]) -> np.ndarray:
    """Returns greedy outputs, (prompts, steps), -1 after their end."""
    import torch

    outputs = np.full((len(prompts), STEPS), -1)
    for row, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        found = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=STEPS,
            do_sample=False,
            num_beams=1,
            eos_token_id=_SIZES["eos_token_id"],
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        outputs[row, : len(found)] = found
    return outputs


def cut(model: Any, layers: int) -> Any:
    """Returns a model of the first layers, which replaces the given one."""
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = layers
    return model


def main() -> None:
    """Writes the folders with the given names."""
    for name in sys.argv[1:]:
        family, seed, changes = MODELS[name]
        folder = FOLDER / name
        model = build_model(family, seed, **changes)
        model.save_pretrained(folder)
        expected: dict[str, Any] = {
            **{f"logits_{place}": layer_logits(model, tokens) for place, tokens in enumerate(sequences(seed))},
            "seed": np.int64(seed),
            "greedy": greedy(model, prompts(seed)),
        }
        layers = model.config.num_hidden_layers - 1
        expected["greedy_of_a_shallower_model"] = greedy(cut(model, layers), prompts(seed))
        np.savez_compressed(folder / "expected.npz", **expected)


if __name__ == "__main__":
    main()
