"""Models that are compiled: small ones of every kind, and those whose cost is forecast."""

import dataclasses
from typing import Any, cast

from benchmarks.paper_model import LARGE_DIMENSIONS, PAPER_DIMENSIONS
from calm_beam.model import ModelConfig, T5Config
from calm_beam.model.llama import LlamaConfig

# Of three layers, since compiling takes longer the deeper a model is; but no narrower: XLA makes one product of several
# small ones, whose parts then lie on other devices than what they are made of.
_T5 = T5Config(
    vocab_size=2560,
    emb_dim=512,
    num_heads=8,
    head_dim=64,
    mlp_dim=1024,
    num_encoder_layers=1,
    num_decoder_layers=3,
    exit_classifier=2,
)
_LLAMA = LlamaConfig(
    vocab_size=2560,
    emb_dim=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    mlp_dim=1024,
    num_decoder_layers=3,
    norm_epsilon=1e-5,
    rope_theta=1e4,
    max_positions=4096,
    end_ids=(2,),
    tied_head=True,
    exit_classifier=2,
)

MODELS: dict[str, ModelConfig] = {
    "T5": _T5,
    "Llama": _LLAMA,
    "T5, own exits": dataclasses.replace(_T5, exit_norms=True, exit_heads=True),
}
"""Small models, by what they are."""

LARGE_MODELS: dict[str, ModelConfig] = {
    "T5-small": dataclasses.replace(PAPER_DIMENSIONS, exit_classifier=0),
    "T5-large": dataclasses.replace(LARGE_DIMENSIONS, exit_classifier=0),
    "SmolLM2-135M": dataclasses.replace(
        _LLAMA,
        vocab_size=49_152,
        emb_dim=576,
        num_heads=9,
        num_kv_heads=3,
        mlp_dim=1536,
        num_decoder_layers=30,
        exit_classifier=0,
    ),
    "Llama 3.2 1B": dataclasses.replace(
        _LLAMA,
        vocab_size=128_256,
        emb_dim=2048,
        num_heads=32,
        num_kv_heads=8,
        mlp_dim=8192,
        num_decoder_layers=16,
        exit_classifier=0,
    ),
}
"""Models in their real sizes: T5 1.1's, as the paper has them, and two of Llama's family."""


def learner(config: ModelConfig) -> ModelConfig:
    """Returns a narrow model of the kind of another: what learns compiles ten times as long as what decodes."""
    changes = {
        "vocab_size": 512,
        "emb_dim": 128,
        "mlp_dim": 256,
        "num_heads": 4,
        "head_dim": 32,
        "num_decoder_layers": 2,
    }
    return dataclasses.replace(cast(Any, config), **changes)
