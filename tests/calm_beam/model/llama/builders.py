"""Small configs of Llama's family."""

from typing import Any

from calm_beam.model.llama import LlamaConfig


def build_llama_config(**changes: Any) -> LlamaConfig:
    """Returns a small config with some fields changed."""
    fields: dict[str, Any] = {
        "vocab_size": 50,
        "emb_dim": 12,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "mlp_dim": 7,
        "num_decoder_layers": 3,
        "norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "max_positions": 64,
        "end_ids": (2,),
    }
    return LlamaConfig(**fields | changes)
