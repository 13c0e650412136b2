"""Native code with weights of two bytes, against the same weights in four.

The weights of the model are rounded to float16 or bfloat16, as `calm-beam convert --dtype=float16` and many published
models have them, so that native code stores two bytes of each. In the model that it is compared with, one weight of
each matrix differs by less than a millionth, which no smaller type has, so that it stores four. Both decode the same
prompts in turns.

    python -m benchmarks.stored_weights --checkpoint=model/ --data=validation.jsonl.gz
    python -m benchmarks.stored_weights --checkpoint=model/ --data=validation.jsonl.gz --widened --batches=1,64

`--widened` gives the model the paper's dimensions (`benchmarks/widened_model.py`).
"""

import argparse
import dataclasses

import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.exits.head_forms import EXIT_HEADS
from calm_beam.exits.rule import ExitRule

from .machine import describe_machine
from .throughput import Run, decoding, measured_gain, read_task

_TYPES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
# How tokens exit, and the threshold; None is the full model.
_EXITS = {
    "full model": (ExitRule(), None),
    "static, half of the layers": (ExitRule(confidence="static"), 0.5),
    "state, 0.9": (ExitRule(confidence="state"), 0.9),
}
_LEAST_CHANGE = 1 + 2**-20


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--widened", action="store_true")
    parser.add_argument("--dtype", choices=_TYPES, default="float16")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--single_prompts", type=int, default=32, help="where one is decoded at a time")
    parser.add_argument("--max_decode_length", type=int, default=48)
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--exit_head", choices=EXIT_HEADS, default="auto")
    flags = parser.parse_args()
    use_compilation_cache()
    # The embedding stays as it is, also where the head is tied to it: a lookup does not wait for memory.
    task = read_task(flags, count=flags.prompts)
    small, large = (
        dataclasses.replace(task, checkpoint=_rounded(task.checkpoint, flags.dtype, is_changed=is_changed))
        for is_changed in (False, True)
    )
    print(describe_machine())
    print(f"weights of {flags.dtype}; {flags.rounds} rounds")
    print("| prompts at a time | exits | four bytes, tokens/s | two bytes, tokens/s | gain |")
    print("|---:|---|---:|---:|---:|", flush=True)
    for size in map(int, flags.batches.split(",")):
        count = flags.single_prompts if size == 1 else flags.prompts
        for name, (rule, threshold) in _EXITS.items():
            wide, halved = (
                Run(
                    decode=decoding(dataclasses.replace(each, prompts=each.prompts[:count]), rule, threshold, size=size)
                )
                for each in (large, small)
            )
            gain = measured_gain(wide, halved, rounds=flags.rounds)
            speeds = [f"{run.tokens / run.seconds:,.0f}" for run in (wide, halved)]
            print(f"| {size} | {name} | {' | '.join(speeds)} | {gain:.2f} |", flush=True)


def _rounded(checkpoint: Checkpoint, dtype: str, *, is_changed: bool) -> Checkpoint:
    """Returns a model whose kernels are rounded; if `is_changed`, the largest weight of each is not quite."""
    arrays = {}
    for name, values in checkpoint.arrays.items():
        array = np.array(values, np.float32)
        if name.endswith("/kernel") and array.any():
            with np.errstate(over="ignore"):
                rounded = array.astype(_TYPES[dtype]).astype(np.float32)
            # The head of a widened model has numbers that float16 has not. It is certified.
            if np.isfinite(rounded).all():
                array = rounded
            if is_changed:
                array.flat[np.abs(array).argmax()] *= _LEAST_CHANGE
        arrays[name] = array
    return dataclasses.replace(checkpoint, arrays=arrays)


if __name__ == "__main__":
    main()
