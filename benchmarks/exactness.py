"""Whether sharing work changes an output: the sweep against one prompt and one threshold at a time, rule by rule.

Both run on the same prompts at 20 thresholds; every output that differs is listed with its confidences. One at a time
takes minutes per thousand prompts and rule.

    python -m benchmarks.exactness --checkpoint=model/ --data=validation.jsonl.gz --prompts=1000

With `--exit_head=int8`, the sweep decides by the certified head, and the other decoder by the exact head.
"""

import argparse
import time
from collections.abc import Sequence

import numpy as np

from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.branches import Branch, BranchResult, PromptResult, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.head_forms import EXIT_HEADS
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import uniform_grid

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
    parser.add_argument("--exit_head", choices=EXIT_HEADS, default="exact", help="of the sweep")
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
        shared = Decoder(
            checkpoint, sweep_branches(rule, thresholds, max_decode_length=steps), exit_head=flags.exit_head
        )
        found = dict(shared.decode(prompts))
        shared_seconds = time.perf_counter() - start
        expected = _one_at_a_time(checkpoint, rule, prompts, thresholds=thresholds, steps=steps)
        single_seconds = time.perf_counter() - start - shared_seconds
        compare(
            f"{name} (sweep {shared_seconds:.0f} s, one at a time {single_seconds:.0f} s)",
            expected,
            found=found,
            thresholds=thresholds,
        )
        if flags.exit_head != "exact":
            asked, left = shared.work.certified_rows, shared.work.projection_rows
            print(f"  of {asked:,} rows, {left:,} ({left / max(asked, 1):.1%}) were left to the exact head", flush=True)


def _one_at_a_time(
    checkpoint: Checkpoint,
    rule: ExitRule,
    prompts: Sequence[Sequence[int]],
    *,
    thresholds: Sequence[float],
    steps: int,
) -> dict[int, PromptResult]:
    """Returns the outputs of the full model and of every threshold, decoded by a decoder of its own for each."""
    by_prompt: dict[int, list[BranchResult]] = {index: [] for index in range(len(prompts))}
    for threshold in (None, *thresholds):
        decoder = EarlyExitDecoder(checkpoint, Branch.at(rule, threshold, max_decode_length=steps))
        for index, result in decoder.decode(prompts):
            by_prompt[index].append(result)
    return {
        index: PromptResult(
            tokens=np.stack([result.tokens for result in results]),
            exit_layers=np.stack([result.exit_layers for result in results]),
            confidences=np.stack([result.confidences for result in results]),
            lengths=np.array([result.length for result in results], np.int32),
            is_finite=all(result.is_finite for result in results),
        )
        for index, results in by_prompt.items()
    }


if __name__ == "__main__":
    main()
