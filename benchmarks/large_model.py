"""What a model of 1 billion parameters takes: a random one in Llama 3.2 1B's shape and bfloat16, and a sweep of it.

    python -m benchmarks.large_model --folder=/tmp/large_model

Writes the checkpoint (2.5 GB) and prompts into the folder, unless they are there. Then `calm-beam decode` runs in a
process of its own, from loading the model to the outputs; printed are its time and the most memory that it held.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from .machine import describe_machine

LLAMA_3_2_1B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
}
# Of the last norm: logits are then so far apart that confidences lie all over (0, 1).
_LOGIT_DEVIATION = 12
_LENGTHS = (20, 60)


def main() -> None:
    """Prints what loading and sweeping took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--thresholds", type=int, default=20)
    parser.add_argument("--max_decode_length", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    flags = parser.parse_args()
    if not (flags.folder / "config.json").exists():
        write_random(flags.folder, LLAMA_3_2_1B)
    data = flags.folder / "prompts.jsonl"
    write_prompts(data, flags.prompts, vocab_size=LLAMA_3_2_1B["vocab_size"])
    thresholds = ",".join(f"{index / flags.thresholds:g}" for index in range(flags.thresholds, 0, -1))
    command = [
        *(sys.executable, "-m", "calm_beam.launch.cli", "decode", "--overwrite"),
        f"--checkpoint={flags.folder}",
        f"--data={data}",
        f"--output={flags.folder / 'outputs.jsonl'}",
        f"--thresholds={thresholds}",
        f"--max_input_length={_LENGTHS[1]}",
        f"--max_decode_length={flags.max_decode_length}",
        f"--dtype={flags.dtype}",
    ]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (flags.folder / "outputs.jsonl").read_text().splitlines()]
    # Of Linux, in KiB.
    peak = used.ru_maxrss * 1024
    exits = [layer for row in rows for layer in row["exit_layers"]]
    print(describe_machine())
    print(
        f"{flags.prompts} prompts x {flags.thresholds} thresholds in {flags.dtype}: {seconds:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} CPU-seconds, {peak / 2**30:.1f} GiB at the most; {len(rows)} outputs, "
        f"{len(exits)} tokens, {np.mean(exits):.1f} layers"
    )


def write_random(folder: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Writes a random model as transformers stores it in bfloat16, a file for each layer, with a word for each id.

    Args:
      folder: Where to.
      fields: Of `config.json`; the head is tied.
    """
    generator = np.random.default_rng(0)
    width, head = fields["hidden_size"], fields["head_dim"]
    queries, keys = fields["num_attention_heads"] * head, fields["num_key_value_heads"] * head
    inner, vocabulary = fields["intermediate_size"], fields["vocab_size"]

    def drawn(*shape: int) -> np.ndarray:
        # [out, in]
        values = generator.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
        return values.astype(ml_dtypes.bfloat16)

    def scale(value: float) -> np.ndarray:
        return np.full(width, value, ml_dtypes.bfloat16)

    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}

    def write(part: str, tensors: dict[str, np.ndarray]) -> None:
        safetensors.numpy.save_file(tensors, folder / part)
        weight_map.update(dict.fromkeys(tensors, part))

    write(
        "model-embedding.safetensors",
        {"model.embed_tokens.weight": drawn(vocabulary, width), "model.norm.weight": scale(_LOGIT_DEVIATION)},
    )
    for index in range(fields["num_hidden_layers"]):
        tensors = {
            "input_layernorm": scale(1),
            "self_attn.q_proj": drawn(queries, width),
            "self_attn.k_proj": drawn(keys, width),
            "self_attn.v_proj": drawn(keys, width),
            "self_attn.o_proj": drawn(width, queries),
            "post_attention_layernorm": scale(1),
            "mlp.gate_proj": drawn(inner, width),
            "mlp.up_proj": drawn(inner, width),
            "mlp.down_proj": drawn(width, inner),
        }
        write(
            f"model-{index:05}.safetensors",
            {f"model.layers.{index}.{name}.weight": tensor for name, tensor in tensors.items()},
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    ends = [f"w{index}" for index in fields["eos_token_id"]]
    tokenizer.add_special_tokens(ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": ends[-1]}))
    # Last: what is there with it is whole.
    (folder / "config.json").write_text(json.dumps(dict(fields)))


def write_prompts(path: pathlib.Path, count: int, *, vocab_size: int) -> None:
    """Writes prompts of random ids as JSON lines."""
    generator = np.random.default_rng(1)
    rows = [
        {"id": str(index), "input_ids": generator.integers(1, vocab_size - 300, generator.integers(*_LENGTHS)).tolist()}
        for index in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
