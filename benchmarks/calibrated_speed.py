"""The time that calibrated exits save, by the layers that may exit.

An exit test has its price: with `softmax` a product with the whole vocabulary. Where fewer layers may exit, fewer are
tested, and tokens run to the next of them. This measures which is cheaper at the same promise: each rule is calibrated
on the same examples, by the sweep, and decoded at the thresholds that are proved for each tolerance, on other prompts,
alternating with the full model; of each the fastest round counts.

    python -m benchmarks.calibrated_speed --checkpoint=model/ --calibration_data=calibration.jsonl --data=fresh.jsonl

`--widened` takes the same thresholds to a model of the paper's dimensions whose outputs are the same
(`benchmarks/widened_model.py`).
"""

import argparse
import dataclasses
import tempfile

import calm_beam as calm
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.exits.head_forms import EXIT_HEADS
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import uniform_grid

from .machine import describe_machine
from .throughput import MAX_INPUT_LENGTH, Run, Task, decoding, measured_gain, read_task

_EPSILON = 0.05
# First layer that may exit, and the distance to the next.
_LAYERS = "1:1,2:2,4:2,4:4"
# Where every layer may exit, small tolerances need thresholds close to 1.
_GRID = (0.99, 0.97, *uniform_grid(0.05))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--calibration_data", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--widened", action="store_true")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--max_decode_length", type=int, default=48)
    parser.add_argument("--measures", default="softmax,state,static")
    parser.add_argument("--exits", default=_LAYERS, help="min_exit_layer:exit_interval, ...")
    parser.add_argument("--deltas", default="0.05,0.1,0.25")
    parser.add_argument("--metric", default="rouge_l_unicode")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--exit_head", choices=EXIT_HEADS, default="auto")
    flags = parser.parse_args()
    use_compilation_cache()
    task = read_task(flags, count=flags.prompts)
    depth = task.checkpoint.config.num_decoder_layers
    sizes = [int(size) for size in flags.batches.split(",")]
    print(describe_machine())
    print(
        f"{len(task.prompts)} prompts, at most {task.steps} tokens, {flags.rounds} rounds, exit head {flags.exit_head}"
    )
    columns = ("measure", "exits at", "delta", "threshold", f"layers of {depth}", *(f"gain, {size}" for size in sizes))
    print(f"| {' | '.join(columns)} |")
    print(f"|---|---{'|---:' * (len(columns) - 2)}|", flush=True)
    for measure in flags.measures.split(","):
        for first, interval in (map(int, each.split(":")) for each in flags.exits.split(",")):
            rule = ExitRule(confidence=measure, min_exit_layer=first, exit_interval=interval)
            layers = ", ".join(map(str, rule.exit_layers(depth)))
            for delta, threshold in _calibrated(rule, depth, flags):
                cells = [measure, layers, f"{delta:g}", "never" if threshold is None else f"{threshold:g}"]
                if threshold is not None:
                    cells += _timed(task, rule, threshold, sizes=sizes, rounds=flags.rounds)
                print(f"| {' | '.join(cells)} |", flush=True)


def _calibrated(rule: ExitRule, depth: int, flags: argparse.Namespace) -> list[tuple[float, float | None]]:
    """Returns the threshold that is proved for each tolerance."""
    is_static = rule.confidence == "static"
    with tempfile.TemporaryDirectory() as output:
        manifest = calm.calibrate(
            model=flags.checkpoint,
            data=flags.calibration_data,
            guarantees=[
                calm.Guarantee("textual", flags.metric, delta=float(delta), epsilon=_EPSILON)
                for delta in flags.deltas.split(",")
            ],
            exits=rule,
            thresholds=[layer / depth for layer in range(depth, 0, -1)] if is_static else _GRID,
            max_input_length=MAX_INPUT_LENGTH,
            max_decode_length=flags.max_decode_length,
            output=output,
            overwrite=True,
        )
    return [(entry.delta, entry.threshold) for entry in manifest.calibrations]


def _timed(task: Task, rule: ExitRule, threshold: float, *, sizes: list[int], rounds: int) -> list[str]:
    """Returns the layers, and what is gained at each size of the batch."""
    gains = []
    for size in sizes:
        # One at a time, fewer take as long.
        some = dataclasses.replace(task, prompts=task.prompts[: 64 if size == 1 else None])
        full, early = (Run(decode=decoding(some, rule, at, size=size)) for at in (None, threshold))
        gains.append(f"{measured_gain(full, early, rounds=rounds):.2f}")
    return [f"{early.layers:.2f}", *gains]


if __name__ == "__main__":
    main()
