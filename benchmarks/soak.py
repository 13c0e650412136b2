"""Whether a long sweep stays within its memory: what is resident after every part of many prompts, and the most so far.

python -m benchmarks.soak --checkpoint=model/ --data=train.jsonl.gz --prompts=20000 --token_budget=60000
"""

import argparse
import os
import pathlib
import time

from calm_beam.checkpoints import load_checkpoint
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.decoding.settings import DecodeSettings, uniform_grid
from calm_beam.decoding.sweep import SweepDecoder
from calm_beam.exits.rule import ExitRule

from .machine import describe_machine
from .process import peak_memory_bytes
from .prompts import read_prompts

_PART = 1000


def main() -> None:
    """Prints a line after every part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--max_decode_length", type=int, default=64)
    parser.add_argument(
        "--token_budget", type=int, help="positions held at a time; default: of the memory that is free"
    )
    flags = parser.parse_args()
    keep_freed_memory()
    checkpoint = load_checkpoint(flags.checkpoint)
    config = checkpoint.config
    settings = DecodeSettings(
        rule=ExitRule(),
        thresholds=uniform_grid(0.05),
        max_input_length=512,
        max_decode_length=flags.max_decode_length,
    )
    prompts = read_prompts(flags.data, checkpoint, settings=settings, count=flags.prompts)
    decoder = SweepDecoder(
        checkpoint,
        settings.rule,
        thresholds=settings.thresholds,
        max_decode_length=flags.max_decode_length,
        token_budget=flags.token_budget,
    )
    position = config.num_decoder_layers * 2 * config.num_heads * config.head_dim * 4
    print(describe_machine())
    if flags.token_budget:
        held = flags.token_budget * position / 2**20
        print(f"budget: {flags.token_budget} positions, {held:.0f} MiB of keys and values")
    print(f"before the first prompt: {_resident_mib():.0f} MiB resident", flush=True)
    start, tokens = time.perf_counter(), 0
    for begin in range(0, len(prompts), _PART):
        for _, result in decoder.decode(prompts[begin : begin + _PART]):
            tokens += int(result.lengths[0])
        done = min(begin + _PART, len(prompts))
        print(
            f"{done} prompts, {tokens} tokens of the full model, {time.perf_counter() - start:.0f} s: "
            f"{_resident_mib():.0f} MiB resident, {peak_memory_bytes() / 2**20:.0f} MiB at most so far",
            flush=True,
        )


def _resident_mib() -> float:
    pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
