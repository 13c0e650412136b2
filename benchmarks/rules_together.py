"""The time of a sweep of several exit rules at once, against one rule, and against a sweep for each of them.

    python -m benchmarks.rules_together
    python -m benchmarks.rules_together --checkpoint=model/ --data=validation.jsonl.gz --prompts=1000

Without flags, this takes the demo model and data. Rules are all of `--confidence`, from the first layer on
in steps of 1, 2 and 4. Times are processor seconds, in which other work on the machine counts little; the least of
`--runs` counts, after one that compiles. Outputs of every rule are compared with those of its own sweep.
"""

import argparse
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.prompts import read_prompts
from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.branches import PromptResult, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.demo import embedded

_STEPS = (1, 2, 4)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table; the status is 1 if outputs differ."""
    flags = _parser().parse_args(argv)
    checkpoint = load_checkpoint(flags.checkpoint or embedded.MODEL)
    rules = [ExitRule(confidence=name, exit_interval=step) for name in flags.confidence for step in _STEPS]
    grid = tuple(np.linspace(1, 0, flags.thresholds).tolist())
    settings = DecodeSettings(
        rule=rules[0], thresholds=grid, max_input_length=512, max_decode_length=flags.max_decode_length
    )
    data = flags.data or str(embedded.CALIBRATION_SET)
    prompts = read_prompts(data, checkpoint, settings=settings, count=flags.prompts)
    print(describe_machine())
    print(f"{len(prompts)} prompts, {len(grid)} thresholds, {len(rules)} rules: {', '.join(flags.confidence)}")
    together, seconds = _swept(checkpoint, rules, settings, prompts, runs=flags.runs)
    alone, equal = [], True
    for place, rule in enumerate(rules):
        expected, took = _swept(checkpoint, [rule], settings, prompts, runs=flags.runs)
        alone.append(took)
        equal &= all(
            np.array_equal(result.by_rule(len(rules))[place].tokens, expected[index].tokens)
            for index, result in together.items()
        )
        print(f"{rule.confidence}, every {rule.exit_interval}: {took:.2f} s")
    of_first, of_all = seconds / alone[0], seconds / sum(alone)
    print(f"all at once: {seconds:.2f} s, {of_first:.2f} of the first alone, {of_all:.2f} of all")
    print(f"outputs of every rule are {'those' if equal else 'NOT those'} of its own sweep")
    return 0 if equal else 1


def _swept(
    checkpoint: Checkpoint,
    rules: Sequence[ExitRule],
    settings: DecodeSettings,
    prompts: Sequence[Sequence[int]],
    *,
    runs: int,
) -> tuple[dict[int, PromptResult], float]:
    """Returns the outputs by prompt, and the processor seconds of the fastest run."""
    decoder = Decoder(
        checkpoint,
        sweep_branches(rules, settings.thresholds, max_decode_length=settings.max_decode_length),
        max_input_length=settings.max_input_length,
    )
    results: dict[int, PromptResult] = {}
    times = []
    for _ in range(1 + runs):
        start = time.process_time()
        results = dict(decoder.decode(prompts))
        times.append(time.process_time() - start)
    return results, min(times[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="default: the demo model")
    parser.add_argument("--data", help="JSONL; default: the demo data")
    parser.add_argument("--confidence", type=lambda text: text.split(","), default=["softmax", "state", "static"])
    parser.add_argument("--thresholds", type=int, default=20, metavar="N")
    parser.add_argument("--prompts", type=int, default=200, metavar="N")
    parser.add_argument("--max_decode_length", type=int, default=64, metavar="N")
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
