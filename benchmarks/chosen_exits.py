"""Exits that `calibrate` chooses, next to softmax at every layer and the best fixed rule found by hand.

For each objective (single prompts, and batches of each size) the default of `calibrate` is calibrated on the first
examples of `--calibration_data`. So is each fixed rule. All are decoded on other prompts, in turns with the full model;
of each the fastest round counts. The best by hand is the fixed rule that was fastest on those very prompts, which is
more than could be known beforehand.

    python -m benchmarks.chosen_exits --checkpoint=model/ --calibration_data=validation.jsonl.gz --data=test.jsonl.gz
"""

import argparse
import dataclasses
import itertools
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import calm_beam as calm
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.decoding.settings import recorded_rule
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import numbered_lines
from calm_beam.storage import open_input

from .machine import describe_machine
from .throughput import MAX_INPUT_LENGTH, Run, Task, batched, measured_gain, read_task, single

_EPSILON = 0.05
# First layer that may exit, and the distance to the next.
_LAYERS = "1:1,2:2,4:2,4:4"
_PAPERS = ("softmax", 1, 1)


@dataclasses.dataclass(frozen=True)
class Exits:
    """How tokens exit: a rule at a threshold that is proved; None never exits."""

    rule: ExitRule
    threshold: float | None

    def in_words(self, depth: int) -> str:
        """Returns measure, exit layers and threshold, for a model of so many layers."""
        if self.threshold is None:
            return "never"
        layers = ", ".join(map(str, self.rule.exit_layers(depth)))
        return f"{self.rule.confidence} at {layers}: {self.threshold:g}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--calibration_data", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--examples", type=int, default=1000, help="of --calibration_data, that calibrate")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--max_decode_length", type=int, default=48)
    parser.add_argument("--measures", default="softmax,state,static")
    parser.add_argument("--exits", default=_LAYERS, help="min_exit_layer:exit_interval, ...")
    parser.add_argument("--consistency", default="textual,risk")
    parser.add_argument("--deltas", default="0.02,0.05,0.1")
    parser.add_argument("--metric", default="rouge_l_unicode")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    flags.widened, flags.exit_head = False, "auto"
    use_compilation_cache()
    task = read_task(flags, count=flags.prompts)
    depth = task.checkpoint.config.num_decoder_layers
    sizes = [int(size) for size in flags.batches.split(",")]
    print(describe_machine())
    print(f"{flags.examples} examples calibrate; {len(task.prompts)} prompts, {flags.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "examples.jsonl"
        with open_input(flags.calibration_data) as raw:
            rows = numbered_lines(raw, path=flags.calibration_data)
            data.write_bytes(b"".join(line for _, line in itertools.islice(rows, flags.examples)))
        by_hand = {
            rule: _calibrated(
                flags, data, exits=ExitRule(confidence=rule[0], min_exit_layer=rule[1], exit_interval=rule[2])
            )
            for rule in _rules(flags)
        }
        columns = (
            "prompts at a time",
            "consistency",
            "delta",
            "chosen",
            f"layers of {depth}",
            "gain",
            "softmax at every layer",
            "best by hand",
            "its gain",
            "chosen / best",
        )
        print(f"| {' | '.join(columns)} |")
        print("|---:|---|---:|---|---:|---:|---:|---|---:|---:|", flush=True)
        for size in sizes:
            objective = "latency" if size == 1 else f"throughput:{size}"
            chosen = _calibrated(flags, data, exits="auto", objective=objective)
            timed: dict[Exits, tuple[float, float]] = {}
            for promise, exits in chosen.items():
                layers, gain = _timed(task, exits, flags, size=size, known=timed)
                hands = {
                    rule: _timed(task, found[promise], flags, size=size, known=timed)[1]
                    for rule, found in by_hand.items()
                }
                best = max(hands, key=hands.__getitem__)
                cells = (
                    size,
                    promise[0],
                    f"{promise[1]:g}",
                    exits.in_words(depth),
                    f"{layers:.2f}",
                    f"{gain:.2f}",
                    f"{hands[_PAPERS]:.2f}" if _PAPERS in hands else "",
                    by_hand[best][promise].in_words(depth),
                    f"{hands[best]:.2f}",
                    f"{gain / hands[best]:.2f}",
                )
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _rules(flags: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Returns the fixed rules: static layers need no choice of exits."""
    layers = [tuple(map(int, each.split(":"))) for each in flags.exits.split(",")]
    return [
        (measure, first, interval)
        for measure in flags.measures.split(",")
        for first, interval in (layers[:1] if measure == "static" else layers)
    ]


def _calibrated(flags: argparse.Namespace, data: pathlib.Path, **exits: Any) -> Mapping[tuple[str, float], Exits]:
    """Returns what is proved for each promise, by consistency and delta."""
    with tempfile.TemporaryDirectory() as output:
        manifest = calm.calibrate(
            model=flags.checkpoint,
            data=str(data),
            guarantees=[
                calm.Guarantee(consistency, flags.metric, delta=float(delta), epsilon=_EPSILON)
                for consistency in flags.consistency.split(",")
                for delta in flags.deltas.split(",")
            ],
            max_input_length=MAX_INPUT_LENGTH,
            max_decode_length=flags.max_decode_length,
            output=output,
            overwrite=True,
            **exits,
        )
    return {
        (entry.consistency, entry.delta): Exits(recorded_rule(manifest.decode_of(entry)), entry.threshold)
        for entry in manifest.calibrations
    }


def _timed(
    task: Task, exits: Exits, flags: argparse.Namespace, *, size: int, known: dict[Exits, tuple[float, float]]
) -> tuple[float, float]:
    """Returns layers and gain over the full model; each way of exiting is timed once."""
    if exits.threshold is None:
        return float(task.checkpoint.config.num_decoder_layers), 1.0
    if exits not in known:
        # One at a time, fewer take as long.
        some = dataclasses.replace(task, prompts=task.prompts[: 64 if size == 1 else None])
        full, early = (
            Run(decode=single(some, exits.rule, at) if size == 1 else batched(some, exits.rule, at, size=size)[0])
            for at in (None, exits.threshold)
        )
        gain = measured_gain(full, early, rounds=flags.rounds)
        known[exits] = early.layers, gain
    return known[exits]


if __name__ == "__main__":
    main()
