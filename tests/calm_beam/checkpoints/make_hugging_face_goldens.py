"""Makes `hugging_face_goldens/`: tiny random T5s as transformers saves them, with the logits and outputs it gives.

Needs torch and transformers, which the project itself never does. Made with torch 2.13 and transformers 5.23:

    python -m tests.calm_beam.checkpoints.make_hugging_face_goldens
"""

import pathlib
from typing import Any

import numpy as np

FOLDER = pathlib.Path(__file__).with_name("hugging_face_goldens")

_T5_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# Seed, chosen for outputs that do not repeat one token from the start, and config.
_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "original": (11, {"feed_forward_proj": "relu"}),
    "t5_1_1": (22, _T5_1_1),
    "gated_and_tied": (2, {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3}),
    # Fewer buckets than usual, and distances beyond the last.
    "relu_and_untied": (3, {"tie_word_embeddings": False, "relative_attention_num_buckets": 8,
                            "relative_attention_max_distance": 14}),
    "bfloat16_in_parts": (4, _T5_1_1),
}  # fmt: skip


def build_model(seed: int, **changes: Any) -> Any:
    """Returns a tiny T5 with random weights that make for varied logits; `changes` are fields of its config."""
    import torch
    import transformers

    sizes = {"vocab_size": 30, "d_model": 12, "d_kv": 4, "num_heads": 3, "d_ff": 16, "num_layers": 2}
    config = transformers.T5Config(**{**sizes, "decoder_start_token_id": 0, **changes})
    model = transformers.T5ForConditionalGeneration(config).eval()
    if not config.scale_decoder_outputs:
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


def logits(model: Any, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the logits, (batch, target, vocabulary), of a model in float32."""
    import torch

    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(source),
            attention_mask=torch.tensor((source != 0).astype(np.int64)),
            decoder_input_ids=torch.tensor(target),
        )
    return output.logits.numpy()


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
    """Writes the folder."""
    import torch

    for name, (seed, changes) in _MODELS.items():
        folder = FOLDER / name
        model = build_model(seed, **changes)
        if name == "bfloat16_in_parts":
            model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="8KB")
        else:
            model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        model = model.float()
        source, target = inputs(seed, vocab_size=model.config.vocab_size)
        np.savez_compressed(
            folder / "expected.npz",
            source=source,
            target=target,
            logits=logits(model, source, target),
            greedy=greedy(model, source, length=12),
        )


if __name__ == "__main__":
    main()
