"""Whether sharing work changes an output: the shared sweep against the plain one, rule by rule.

The plain sweep sends every lane through every layer by itself. Both run on the same prompts at 20 thresholds; every
output that differs is listed with its confidences. The plain sweep takes minutes per thousand prompts and rule.

    python -m benchmarks.exactness --checkpoint=model/ --data=validation.jsonl.gz --prompts=1000

With `--exit_head=int8`, the shared sweep decides by the certified head, and the plain one by the exact head.
"""

import argparse
import time

import numpy as np

from calm_beam.checkpoints import load_checkpoint
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.decoding.plain import PlainSweep
from calm_beam.decoding.settings import DecodeSettings, uniform_grid
from calm_beam.decoding.sweep import SweepDecoder
from calm_beam.exits.head_forms import EXIT_HEADS
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.schedule import scheduled_thresholds

from .differences import compare
from .machine import describe_machine
from .prompts import read_prompts

_RULES = {
    "softmax": ExitRule(),
    "state": ExitRule(confidence="state"),
    "classifier": ExitRule(confidence="classifier"),
    "static": ExitRule(confidence="static"),
    "softmax, from_first_exit": ExitRule(state_propagation="from_first_exit"),
    "softmax, projected": ExitRule(state_propagation="projected"),
    "softmax, decay": ExitRule(schedule="decay", tau=4.0),
    "softmax, decay_t5x": ExitRule(schedule="decay_t5x", tau=4.0),
    "softmax_max": ExitRule(confidence="softmax_max"),
    "entropy": ExitRule(confidence="entropy"),
    "patience": ExitRule(confidence="patience", patience=3),
    "own measure": ExitRule(confidence="benchmarks.own_measure:margin"),
}


def main() -> None:
    """Prints the differences, a line for each rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--max_decode_length", type=int, default=64)
    parser.add_argument("--rules", default=";".join(_RULES), help="separated by semicolons")
    parser.add_argument("--exit_head", choices=EXIT_HEADS, default="exact", help="of the shared sweep")
    flags = parser.parse_args()
    keep_freed_memory()
    checkpoint = load_checkpoint(flags.checkpoint)
    thresholds, steps = uniform_grid(0.05), flags.max_decode_length
    settings = DecodeSettings(rule=ExitRule(), thresholds=thresholds, max_input_length=512, max_decode_length=steps)
    prompts = read_prompts(flags.data, checkpoint, settings=settings, count=flags.prompts)
    print(f"{describe_machine()}\n{len(prompts)} prompts, {len(thresholds)} thresholds and the full model", flush=True)
    for name in flags.rules.split(";"):
        rule = _RULES[name]
        start = time.perf_counter()
        shared = SweepDecoder(
            checkpoint, rule, thresholds=thresholds, max_decode_length=steps, exit_head=flags.exit_head
        )
        found = dict(shared.decode(prompts))
        shared_seconds = time.perf_counter() - start
        lanes = np.full((steps, len(thresholds) + 1), np.inf, np.float32)
        lanes[:, 1:] = scheduled_thresholds(rule, thresholds, max_decode_length=steps)
        plain = PlainSweep(checkpoint, rule, thresholds=lanes, max_input_length=512, slots=8)
        expected = dict(plain.decode(prompts))
        plain_seconds = time.perf_counter() - start - shared_seconds
        compare(
            f"{name} (shared {shared_seconds:.0f} s, plain {plain_seconds:.0f} s)",
            expected,
            found=found,
            thresholds=thresholds,
        )
        if flags.exit_head != "exact":
            asked, left = shared.work.certified_rows, shared.work.projection_rows
            print(f"  of {asked:,} rows, {left:,} ({left / max(asked, 1):.1%}) were left to the exact head", flush=True)


if __name__ == "__main__":
    main()
