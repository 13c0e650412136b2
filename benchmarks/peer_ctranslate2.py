"""Tokens per second against CTranslate2, an engine for the same models without exits.

The same weights are given to both, and what CTranslate2 writes is compared with the full model's outputs here: the
table says how many are equal. All are decoded greedily, in turns; of each the fastest round counts. CTranslate2 runs
on one thread or on as many as there are cores, whichever was faster, and sorts its batches by length. Exits leave at
`--threshold`, which a manifest has proved with its measure and exit layers; without it, at one that uses about a
quarter of the layers, which nobody has calibrated.

    pip install ctranslate2
    python -m benchmarks.peer_ctranslate2 --checkpoint=model/ --data=validation.jsonl.gz
    python -m benchmarks.peer_ctranslate2 --checkpoint=model/ --data=validation.jsonl.gz --widened

`--widened` gives the model the paper's dimensions (`benchmarks/widened_model.py`).
"""

import argparse
import dataclasses
import importlib
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import BranchResult
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.exits.head_forms import EXIT_HEADS
from calm_beam.exits.rule import ExitRule
from calm_beam.model import T5Config

from .machine import describe_machine
from .throughput import MAX_INPUT_LENGTH, Run, Task, decoding, read_task, run_in_turns, searched

_ONE, _MANY = 1, 64


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--widened", action="store_true")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--single_prompts", type=int, default=48, help="of those that are decoded one at a time")
    parser.add_argument("--max_decode_length", type=int, default=48)
    parser.add_argument("--measure", default="state")
    parser.add_argument("--min_exit_layer", type=int, default=1)
    parser.add_argument("--exit_interval", type=int, default=1)
    parser.add_argument("--threshold", type=float, help="default: one that uses about a quarter of the layers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--exit_head", choices=EXIT_HEADS, default="auto")
    flags = parser.parse_args()
    peer = importlib.import_module("ctranslate2")
    use_compilation_cache()
    task = read_task(flags, count=flags.prompts)
    few = dataclasses.replace(task, prompts=task.prompts[: flags.single_prompts])
    rule = ExitRule(confidence=flags.measure, min_exit_layer=flags.min_exit_layer, exit_interval=flags.exit_interval)
    threshold = searched(task, flags.measure, layers=0.25) if flags.threshold is None else flags.threshold
    print(describe_machine())
    print(f"CTranslate2 {peer.__version__}; {len(task.prompts)} prompts, {len(few.prompts)} of them one at a time")
    layers = ", ".join(map(str, rule.exit_layers(task.checkpoint.config.num_decoder_layers)))
    print(f"{flags.rounds} rounds; {flags.measure} exits at {threshold:.4f}, from layers {layers}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        _specification(task.checkpoint).save(folder)
        for some, size in ((task, _MANY), (few, _ONE)):
            ways = {
                f"CTranslate2, {kind}": _fastest(peer, folder, some, kind=kind, size=size)
                for kind in ("float32", "int8")
            }
            ways["full model"] = Run(decode=decoding(some, ExitRule(), None, size=size))
            ways[f"{flags.measure} exits"] = Run(decode=decoding(some, rule, threshold, size=size))
            _print_table(ways, size=size, rounds=flags.rounds)


def _print_table(ways: Mapping[str, Run], *, size: int, rounds: int) -> None:
    run_in_turns([*ways.values()], rounds=rounds)
    full = ways["full model"]
    speeds = {name: run.tokens / run.seconds for name, run in ways.items()}
    baseline = "CTranslate2, "
    print(f"\n| {size} at a time | layers | tokens/s | of its float32 | of its int8 | outputs of the full model |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, run in ways.items():
        equal = sum(
            bool(np.array_equal(result.tokens[: result.length], full.results[index].tokens[: result.length]))
            for index, result in run.results.items()
        )
        cells = (
            name,
            f"{run.layers:.2f}",
            f"{speeds[name]:,.0f}",
            *(f"{speeds[name] / speeds[baseline + kind]:.2f}" for kind in ("float32", "int8")),
            f"{equal} of {len(run.results)}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def _fastest(peer: Any, folder: str, task: Task, *, kind: str, size: int) -> Run:
    """Returns CTranslate2 on as many threads as are faster, of one and all, in a second pass."""
    runs = [
        Run(decode=_translated(peer, folder, task, kind=kind, size=size, threads=threads))
        for threads in sorted({1, os.cpu_count() or 1})
    ]
    run_in_turns(runs, rounds=1)
    return min(runs, key=lambda run: run.seconds)


def _translated(
    peer: Any, folder: str, task: Task, *, kind: str, size: int, threads: int
) -> Callable[[], dict[int, BranchResult]]:
    """Returns what has CTranslate2 decode all prompts, so many at a time, on so many threads."""
    config = task.checkpoint.config
    translator = peer.Translator(folder, compute_type=kind, intra_threads=threads, inter_threads=1)
    prompts = [[str(token) for token in prompt] for prompt in task.prompts]

    def decode() -> dict[int, BranchResult]:
        found = translator.translate_batch(
            prompts,
            beam_size=1,
            # Its end is not counted there.
            max_decoding_length=task.steps,
            max_input_length=MAX_INPUT_LENGTH,
            max_batch_size=size,
            end_token=[str(end) for end in config.end_ids],
            return_end_token=True,
        )
        return {index: _result(each.hypotheses[0], config) for index, each in enumerate(found)}

    return decode


def _result(tokens: list[str], config: T5Config) -> BranchResult:
    ids = np.array([int(token) for token in tokens], np.int32)
    layers = np.full(len(ids), config.num_decoder_layers, np.int32)
    return BranchResult(
        tokens=ids, exit_layers=layers, confidences=np.ones(len(ids), np.float32), length=len(ids), is_finite=True
    )


def _specification(checkpoint: Checkpoint) -> Any:
    """Returns a T5 as CTranslate2 is told of it: matrices are transposed, and factors of one input are joined."""
    specs = importlib.import_module("ctranslate2.specs")
    config, arrays = checkpoint.config, checkpoint.arrays
    activation = {"gelu": "GELUTanh", "relu": "RELU", "silu": "SWISH"}[config.activation]
    spec = specs.TransformerSpec.from_config(
        (config.num_encoder_layers, config.num_decoder_layers),
        config.num_heads,
        pre_norm=True,
        activation=getattr(specs.Activation, activation),
        ffn_glu=config.gated_mlp,
        relative_attention_bias=True,
        rms_norm=True,
    )

    def array(name: str) -> np.ndarray:
        return np.ascontiguousarray(np.asarray(arrays[name], np.float32))

    def joined(*names: str) -> np.ndarray:
        return np.concatenate([array(f"{name}/kernel").T for name in names])

    def set_attention(of_layer: Any, name: str, *, norm: str, is_cross: bool) -> None:
        of_layer.queries_scale = np.float32(1)
        parts = [["query"], ["key", "value"]] if is_cross else [["query", "key", "value"]]
        for linear, kernels in zip(of_layer.linear, [*parts, ["out"]], strict=True):
            linear.weight = joined(*(f"{name}/{kernel}" for kernel in kernels))
        of_layer.layer_norm.gamma = array(f"{norm}/scale")

    for stack, of_stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        embeddings = of_stack.embeddings
        (embeddings[0] if isinstance(embeddings, list) else embeddings).weight = array("token_embedder/embedding")
        of_stack.scale_embeddings = False
        of_stack.layer_norm.gamma = array(f"{stack}/{stack}_norm/scale")
        is_decoder = stack == "decoder"
        for index, of_layer in enumerate(of_stack.layer):
            layer = f"{stack}/layers_{index}"
            own, norm = (
                ("self_attention", "pre_self_attention_layer_norm")
                if is_decoder
                else ("attention", "pre_attention_layer_norm")
            )
            set_attention(of_layer.self_attention, f"{layer}/{own}", norm=f"{layer}/{norm}", is_cross=False)
            bias = f"{layer if config.relative_bias_per_layer else stack}/relpos_bias/rel_embedding"
            of_layer.self_attention.relative_attention_bias = np.ascontiguousarray(array(bias).T)
            of_layer.self_attention.relative_attention_max_distance = np.int32(config.relative_max_distance)
            if is_decoder:
                cross = f"{layer}/encoder_decoder_attention"
                set_attention(of_layer.attention, cross, norm=f"{layer}/pre_cross_attention_layer_norm", is_cross=True)
            of_layer.ffn.linear_0.weight = joined(f"{layer}/mlp/{'wi_0' if config.gated_mlp else 'wi'}")
            if config.gated_mlp:
                of_layer.ffn.linear_0_noact.weight = joined(f"{layer}/mlp/wi_1")
            of_layer.ffn.linear_1.weight = joined(f"{layer}/mlp/wo")
            of_layer.ffn.layer_norm.gamma = array(f"{layer}/pre_mlp_layer_norm/scale")
    if config.tied_head:
        spec.decoder.projection.weight = array("token_embedder/embedding")
        spec.decoder.scale_outputs = np.float32(config.emb_dim**-0.5)
    else:
        spec.decoder.projection.weight = joined("decoder/logits_dense")
    ids = [str(token) for token in range(config.vocab_size)]
    spec.register_source_vocabulary(ids)
    spec.register_target_vocabulary(ids)
    spec.config.add_source_eos = False
    spec.config.bos_token = spec.config.decoder_start_token = str(config.start_id)
    spec.config.eos_token = str(config.end_ids[0])
    spec.config.unk_token = ids[2]
    spec.validate()
    spec.optimize()
    return spec


if __name__ == "__main__":
    main()
