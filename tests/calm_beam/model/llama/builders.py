"""Small models of Llama's family."""

import json
import pathlib
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from calm_beam.model.llama import LlamaConfig, parameter_shapes


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


def build_llama_arrays(config: LlamaConfig, seed: int, *, logit_scale: float = 4.0) -> dict[str, np.ndarray]:
    """Returns random float32 weights that give varied outputs, and confidences across (0, 1).

    Args:
      config: Sizes of the model.
      seed: Seed of the draws.
      logit_scale: Scale of the output head.
    """
    generator = np.random.default_rng(seed)
    arrays = {
        name: (generator.standard_normal(shape) * _standard_deviation(name, shape)).astype(np.float32)
        for name, shape in parameter_shapes(config).items()
    }
    for name in arrays:
        if name.endswith("/scale") and not config.unit_offset_norms:
            arrays[name] += np.float32(1)
    if config.tied_head:
        # The head sees the embedding too: the scale goes into the norms.
        for name in arrays:
            if name == "decoder/decoder_norm/scale" or name.startswith("decoder/exit_norms_"):
                arrays[name] *= np.float32(logit_scale * config.emb_dim**-0.5)
    for name in arrays:
        if name.startswith(("decoder/logits_dense/", "decoder/exit_heads_")):
            arrays[name] *= np.float32(config.emb_dim**0.5 if config.tied_head else logit_scale)
            # A longer column is more often the largest: some outputs end.
            arrays[name][:, list(config.end_ids)] *= np.float32(1.4)
    return arrays


def _standard_deviation(name: str, shape: tuple[int, ...]) -> float:
    if name.endswith(("/scale", "/bias")):
        return 0.2
    if name == "token_embedder/embedding":
        return 1.0
    if name.startswith("decoder/meta_cls/"):
        return 0.25
    return float(shape[0] ** -0.5) * (2 if name.endswith("/query/kernel") else 1)


def write_word_tokenizer(path: pathlib.Path, words: int, *, ends: tuple[int, ...]) -> pathlib.Path:
    """Writes a tokenizer with a word for each id; end-of-sequence ids are special."""
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([f"w{index}" for index in ends])
    tokenizer.save(str(path))
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": f"w{ends[-1]}"}))
    return path
