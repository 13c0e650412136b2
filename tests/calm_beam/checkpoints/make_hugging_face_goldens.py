"""Makes `hugging_face_goldens/`: tiny random T5s and their kin as transformers saves them, with their outputs.

Needs torch and transformers, which the project itself never does. Made with torch 2.13 and transformers 5.23; `ul2`,
`mt5` and `umt5` with 4.57, since version 5 ties the heads of MT5 and UMT5, and the published ones have heads of their
own; those with a `generation_config.json` with torch 2.15 and transformers 5.24:

    python -m tests.calm_beam.checkpoints.make_hugging_face_goldens NAME ...
"""

import json
import pathlib
import sys
from typing import Any

import numpy as np

FOLDER = pathlib.Path(__file__).with_name("hugging_face_goldens")

_T5_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# Class, seed, chosen for outputs that do not repeat one token from the start, and config.
_MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "original": ("T5", 11, {"feed_forward_proj": "relu"}),
    "t5_1_1": ("T5", 22, _T5_1_1),
    "gated_and_tied": ("T5", 2, {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3}),
    # Fewer buckets than usual, and distances beyond the last.
    "relu_and_untied": ("T5", 3, {"tie_word_embeddings": False, "relative_attention_num_buckets": 8,
                                  "relative_attention_max_distance": 14}),
    "bfloat16_in_parts": ("T5", 4, _T5_1_1),
    "ul2": ("T5", 3, {**_T5_1_1, "feed_forward_proj": "gated-silu"}),
    "mt5": ("MT5", 3, _T5_1_1),
    "umt5": ("UMT5", 5, {**_T5_1_1, "num_decoder_layers": 3}),
    "own_ends": ("T5", 22, _T5_1_1),
    "own_start": ("T5", 22, _T5_1_1),
    "start_by_bos": ("T5", 22, _T5_1_1),
}  # fmt: skip
# Content of `generation_config.json` for some; the others have none.
_GENERATION: dict[str, dict[str, Any]] = {
    "own_ends": {"eos_token_id": [29, 1, 6], "decoder_start_token_id": 0},
    "own_start": {"eos_token_id": 1, "decoder_start_token_id": 7},
    "start_by_bos": {"eos_token_id": [1, 8], "bos_token_id": 5},
}


def build_model(family: str, seed: int, **changes: Any) -> Any:
    """Returns a tiny model with random weights that give varied logits; `changes` are fields of its config."""
    import torch
    import transformers

    sizes = {"vocab_size": 30, "d_model": 12, "d_kv": 4, "num_heads": 3, "d_ff": 16, "num_layers": 2}
    config = getattr(transformers, f"{family}Config")(**{**sizes, "decoder_start_token_id": 0, **changes})
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    if not changes.get("tie_word_embeddings", True):
        # A new model ties its head in any case.
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("layer_norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith(("shared.weight", "relative_attention_bias.weight")):
                parameter.copy_(noise)
            else:
                # T5 does not divide attention logits by sqrt(d_kv).
                scale = 2 * config.d_kv**-0.5 if name.endswith("q.weight") else 3 if name == "lm_head.weight" else 1
                parameter.copy_(noise * scale * parameter.shape[1] ** -0.5)
    return model


def inputs(seed: int, *, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns padded prompts of several lengths, (3, 24), and decoder inputs, (3, 9)."""
    generator = np.random.default_rng(seed)
    source = generator.integers(2, vocab_size, size=(3, 24))
    for row, length in enumerate((24, 11, 1)):
        source[row, length - 1] = 1
        source[row, length:] = 0
    target = generator.integers(2, vocab_size, size=(3, 9))
    target[:, 0] = 0
    return source, target


def layer_logits(model: Any, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the logits, (layers, batch, target, vocabulary), of every layer's output, of a model in float32."""
    import torch

    config = model.config
    # Version 4 has no field for it.
    is_scaled = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(source),
            attention_mask=torch.tensor((source != 0).astype(np.int64)),
            decoder_input_ids=torch.tensor(target),
            output_hidden_states=True,
        )
        # The first is the embedding, and the last is normed.
        states = [model.decoder.final_layer_norm(state) for state in output.decoder_hidden_states[1:-1]]
        states.append(output.decoder_hidden_states[-1])
        found = [model.lm_head(state * config.d_model**-0.5 if is_scaled else state) for state in states]
        torch.testing.assert_close(found[-1], output.logits)
    return torch.stack(found).numpy()


def greedy(model: Any, source: np.ndarray, *, length: int) -> np.ndarray:
    """Returns greedy outputs, (batch, at most `length`), 0 after eos."""
    import torch

    outputs = model.generate(
        input_ids=torch.tensor(source),
        attention_mask=torch.tensor((source != 0).astype(np.int64)),
        max_new_tokens=length,
        # The cache of this version fails if the decoder is deeper than the encoder.
        use_cache=False,
        do_sample=False,
        num_beams=1,
    )
    # The first is the start token.
    return outputs.numpy()[:, 1:]


def main() -> None:
    """Writes the folders with the given names."""
    import torch

    for name in sys.argv[1:]:
        family, seed, changes = _MODELS[name]
        folder = FOLDER / name
        model = build_model(family, seed, **changes)
        if name == "bfloat16_in_parts":
            model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="8KB")
        else:
            model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        if name in _GENERATION:
            text = json.dumps({**_GENERATION[name], "pad_token_id": 0})
            (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")
            model = type(model).from_pretrained(folder)
        model = model.float()
        source, target = inputs(seed, vocab_size=model.config.vocab_size)
        np.savez_compressed(
            folder / "expected.npz",
            source=source,
            target=target,
            logits=layer_logits(model, source, target),
            greedy=greedy(model, source, length=12),
        )


if __name__ == "__main__":
    main()
