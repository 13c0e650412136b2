"""The cost of a sweep over a grid of thresholds, in work and time, against decoding without shared work.

    python benchmarks/sweep.py --json --thresholds=20 --prompts=64
    python benchmarks/sweep.py --checkpoint=model/ --data=validation.jsonl.gz --confidence=state --thresholds=100
    python benchmarks/sweep.py --paper_dimensions --confidence=classifier --thresholds=20 --prompts=16
    python benchmarks/sweep.py --paper_dimensions --checkpoint=model/ --data=validation.jsonl.gz --thresholds=100

Without flags, this takes the demo model and data. With `--paper_dimensions`, a model that is named is
widened to them, so that it generates what it did at a larger model's cost; else the weights and prompts are random.
The sweep is compared with

- the same decoder once per threshold and once without exits, with as many prompts at a time;
- one pass of the full model;
- a decoder of one prompt at a time that skips the layers above the exit, once per threshold and once without exits.

All times are of runs in which next to nothing is compiled. Of many thresholds, the baselines decode some that stand
evenly in the grid, and the third some prompts; what they took is scaled up, which the output states. The process's peak
memory is read before the baselines run.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

if not __package__:
    # Run as a file, Python looks for modules next to it, and not in the folder of the packages.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np

from benchmarks import large_steps, multiply_adds
from benchmarks.machine import describe_machine
from benchmarks.paper_model import build_paper_model, draw_prompts
from benchmarks.process import CompileTime, peak_memory_bytes
from benchmarks.prompts import read_prompts
from benchmarks.widened_model import widen_to_paper
from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.branches import Branch, PromptResult
from calm_beam.decoding.compilation import bucket_width
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.engine import Work
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.decoding.single_prompts import single_prompt_decoder
from calm_beam.exits.head_forms import EXIT_HEADS
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.demo import embedded

_CONFIDENCES = ("softmax", "softmax_max", "state", "classifier")
_MAX_INPUT_LENGTH = 512
# Of a longer grid, so many thresholds are decoded one by one.
_MOST_MEASURED = 20
_BATCH_1_THRESHOLDS = 5
_BATCH_1_PROMPTS = 4
# So short a run is easily disturbed.
_BATCH_1_RUNS = 3
# Share of a run's time.
_MOST_COMPILING = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The inputs of all decoders.

    Attributes:
      checkpoint: The model.
      rule: How exits are decided.
      grid: Thresholds, descending.
      prompts: Token ids of each.
      steps: Most tokens of an output.
      batch_size: Prompts decoded at the same time.
      runs: Runs that are timed; the fastest counts. One that compiles is not timed.
      exit_head: Form of the head that decides, of all decoders.
    """

    checkpoint: Checkpoint
    rule: ExitRule
    grid: tuple[float, ...]
    prompts: Sequence[tuple[int, ...]]
    steps: int
    batch_size: int
    runs: int
    exit_head: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A decoder's outputs of all prompts, its work, and its time."""

    results: Mapping[int, PromptResult]
    work: Work
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, and with `--json` a last line with the same figures."""
    task, flags = started(__doc__, argv)
    figures = _measure(task)
    model = flags.checkpoint or ("random" if flags.paper_dimensions else "demo")
    figures = {"machine": describe_machine(), "model": model, "paper_dimensions": flags.paper_dimensions, **figures}
    if flags.json:
        print(json.dumps(figures))
    return 0


def started(documentation: str | None, argv: Sequence[str] | None) -> tuple[Task, argparse.Namespace]:
    """Returns the workload that the flags name, and all flags, after printing the machine and any notes.

    Args:
      documentation: Of the script; its first line is in the help.
      argv: The flags; None for those of the command line.
    """
    parser = argparse.ArgumentParser(description=(documentation or "").split("\n")[0])
    parser.add_argument("--checkpoint", help="the demo model if omitted")
    parser.add_argument("--data", help="JSONL file of prompts; the demo data if omitted")
    parser.add_argument(
        "--paper_dimensions", action="store_true", help="widen --checkpoint to them; random weights if none is named"
    )
    parser.add_argument("--confidence", choices=_CONFIDENCES, default="softmax")
    parser.add_argument("--thresholds", type=int, default=20, help="how many, evenly in [0, 1)")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=64, help="prompts decoded at the same time")
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        help="time everything so often (one prompt at a time: 3 at least); the fastest counts",
    )
    parser.add_argument("--exit_head", choices=EXIT_HEADS, default="auto", help="of all decoders")
    parser.add_argument("--max_decode_length", type=int, help="64 if omitted; 32 with random weights")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")

    flags = parser.parse_args(argv)
    for name in ("thresholds", "prompts", "batch_size", "runs", "max_decode_length"):
        if (value := getattr(flags, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if bool(flags.checkpoint) != bool(flags.data):
        parser.error("--checkpoint and --data go together: pass both, or neither for the demo model and data")
    try:
        task, notes = _task(flags)
    except ValueError as error:
        parser.error(str(error))
    if flags.confidence == "classifier" and not task.checkpoint.config.exit_classifier:
        parser.error(
            "--confidence=classifier needs a model with an exit classifier, which this one is without: pass another "
            "--checkpoint and --data, or --paper_dimensions alone"
        )
    keep_freed_memory()
    print(describe_machine())
    for note in notes:
        print(note)
    return task, flags


def _task(flags: argparse.Namespace) -> tuple[Task, list[str]]:
    """Returns the workload, and notes about it."""
    rule = ExitRule(confidence=flags.confidence)
    grid = tuple(index / flags.thresholds for index in reversed(range(flags.thresholds)))
    notes = []
    if flags.paper_dimensions and not flags.checkpoint:
        steps = flags.max_decode_length or 32
        checkpoint, prompts = build_paper_model(), draw_prompts(flags.prompts)
    else:
        steps = flags.max_decode_length or 64
        checkpoint = load_checkpoint(flags.checkpoint or embedded.MODEL)
        settings = DecodeSettings(
            rule=rule, thresholds=grid, max_input_length=_MAX_INPUT_LENGTH, max_decode_length=steps
        )
        data = flags.data or str(embedded.CALIBRATION_SET)
        distinct = read_prompts(data, checkpoint, settings=settings, count=flags.prompts)
        prompts = [distinct[index % len(distinct)] for index in range(flags.prompts)]
        if flags.paper_dimensions:
            checkpoint = widen_to_paper(checkpoint)
        if len(distinct) < len(prompts):
            notes.append(f"The data has {len(distinct)} prompts only: they are repeated. No decoder gains by that.")
    task = Task(
        checkpoint=checkpoint,
        rule=rule,
        grid=grid,
        prompts=prompts,
        steps=steps,
        batch_size=flags.batch_size,
        runs=flags.runs,
        exit_head=flags.exit_head,
    )
    return task, notes


def _measure(task: Task) -> dict[str, Any]:
    """Runs and prints everything, and returns the figures."""
    config = task.checkpoint.config
    before = peak_memory_bytes()
    everything = branches_of(task, [None, *task.grid])
    with CompileTime() as compiling:
        decode(task, everything)
    sweep = fastest(task, everything)
    peak = peak_memory_bytes()
    # Before and after the sweep's rivals: a machine that others use too is slow by turns, and its best is what counts.
    exits = np.stack([result.exit_layers for result in sweep.results.values()])
    length = math.ceil((exits > 0).sum() / exits[..., 0].size)
    rates = _rates(task, length)
    full = _decode_warm(task, branches_of(task, [None]))
    measured = _evenly(len(task.grid), _MOST_MEASURED)
    alone = {place: _decode_warm(task, branches_of(task, [task.grid[place]])) for place in measured}
    batch_1 = _batch_1(task, sweep.results)
    rates = {name: max(rate, rates[name]) for name, rate in _rates(task, length).items()}

    scale = len(task.grid) / len(measured)
    per_threshold_seconds = full.seconds + scale * sum(run.seconds for run in alone.values())
    # Layers that one threshold alone runs ahead of its decisions save time, and are no work that its outputs need.
    per_threshold_work = [
        dataclasses.replace(
            work,
            layer_rows=work.layer_rows - work.ahead_rows,
            projection_rows=work.projection_rows - (0 if work.certified_rows else work.ahead_decisions),
        )
        for work in (full.work, *(run.work for run in alone.values()))
    ]
    rate = max(rates["square_product"], rates["projection_product"])
    multiply_adds_of_sweep = multiply_adds.large_steps(config, sweep.work)
    tokens = sum(int(result.lengths[0]) for result in sweep.results.values())
    full_pass = Work(layer_rows=tokens * config.num_decoder_layers, projection_rows=tokens)

    def over_full_pass(name: str, works: Sequence[Work]) -> float:
        weights = [1.0] + [scale] * (len(works) - 1)
        done = sum(weight * getattr(work, name) for weight, work in zip(weights, works, strict=True))
        return done / getattr(full_pass, name)

    figures = {
        "confidence": task.rule.confidence,
        "thresholds": len(task.grid),
        "prompts": len(task.prompts),
        "distinct_prompts": len(set(task.prompts)),
        "batch_size": task.batch_size,
        "max_decode_length": task.steps,
        "runs": task.runs,
        "tokens_of_full_model": tokens,
        "tokens_of_all_lanes": int((exits > 0).sum()),
        "mean_exit_layer_by_threshold": _mean_exits(exits),
        "layer_work_over_full_pass": over_full_pass("layer_rows", [sweep.work]),
        "projection_work_over_full_pass": over_full_pass("projection_rows", [sweep.work]),
        "fill_rows_over_layer_rows": sweep.work.fill_rows / sweep.work.layer_rows,
        "padded_rows_over_layer_rows": sweep.work.padded_rows / sweep.work.layer_rows,
        "sweep_seconds": sweep.seconds,
        "compile_seconds": compiling.seconds(),
        "full_pass_layer_work": over_full_pass("layer_rows", [full.work]),
        "full_pass_projection_work": over_full_pass("projection_rows", [full.work]),
        "full_pass_seconds": full.seconds,
        "seconds_over_full_pass": sweep.seconds / full.seconds,
        "per_threshold_measured": len(measured),
        "per_threshold_layer_work_over_full_pass": over_full_pass("layer_rows", per_threshold_work),
        "per_threshold_projection_work_over_full_pass": over_full_pass("projection_rows", per_threshold_work),
        "per_threshold_padded_rows_over_layer_rows": sum(work.padded_rows for work in per_threshold_work)
        / sum(work.layer_rows for work in per_threshold_work),
        "per_threshold_seconds": per_threshold_seconds,
        "per_threshold_outputs_compared": len(task.prompts) * len(measured),
        "per_threshold_outputs_that_differ": sum(
            bool((sweep.results[index].tokens[place + 1] != result.tokens[0]).any())
            for place, run in alone.items()
            for index, result in run.results.items()
        ),
        "speedup_over_per_threshold": per_threshold_seconds / sweep.seconds,
        **batch_1,
        "speedup_over_batch_1": batch_1["batch_1_seconds"] / sweep.seconds,
        "multiply_adds_per_second": rates,
        "matmul_share": multiply_adds_of_sweep / sweep.seconds / rate,
        "projection_step_matmul_share": rates["projection_step"] / rate,
        "layer_step_matmul_share": rates["layer_step"] / rate,
        "peak_memory_bytes": peak,
        "memory_before_sweep_bytes": before,
    }
    _print_table(figures)
    return figures


def branches_of(task: Task, thresholds: Sequence[float | None]) -> list[Branch]:
    """Returns the branches of thresholds; None stands for the full model."""
    return [Branch.at(task.rule, threshold, max_decode_length=task.steps) for threshold in thresholds]


def decode(task: Task, branches: Sequence[Branch]) -> Run:
    """Decodes all prompts by all branches, as many at a time as the task says."""
    decoder = Decoder(
        task.checkpoint,
        branches,
        max_input_length=_MAX_INPUT_LENGTH,
        batch_size=task.batch_size,
        # Room for every prompt at its worst: nobody gives way in any run.
        max_cache_tokens=task.batch_size * (_MAX_INPUT_LENGTH + task.steps * len(branches)),
        exit_head=task.exit_head,
    )
    start = time.perf_counter()
    results = dict(decoder.decode(task.prompts))
    seconds = time.perf_counter() - start
    return Run(results=results, work=decoder.work, seconds=seconds)


def fastest(task: Task, branches: Sequence[Branch]) -> Run:
    """Decodes as often as the task says, and returns the fastest run."""
    return min((decode(task, branches) for _ in range(task.runs)), key=lambda run: run.seconds)


def _decode_warm(task: Task, branches: Sequence[Branch]) -> Run:
    """Returns the fastest run, of which the first does not count where it had to compile."""
    with CompileTime() as compiling:
        first = decode(task, branches)
    if compiling.seconds() > _MOST_COMPILING * first.seconds:
        return fastest(task, branches)
    others = (decode(task, branches) for _ in range(task.runs - 1))
    return min((first, *others), key=lambda run: run.seconds)


def _batch_1(task: Task, results: Mapping[int, PromptResult]) -> dict[str, Any]:
    """Returns what decoding one prompt at a time takes, from some prompts and thresholds.

    Seconds per token of a measured threshold stand for those of the thresholds around it, encoder included.
    """
    measured = _evenly(len(task.grid), _BATCH_1_THRESHOLDS)
    chosen = [task.prompts[index] for index in _evenly(len(task.prompts), _BATCH_1_PROMPTS)]
    lengths = np.sum([result.lengths for result in results.values()], axis=0)
    seconds, tokens = 0.0, 0
    for place in [None, *measured]:
        decoder = single_prompt_decoder(
            task.checkpoint,
            Branch.at(task.rule, None if place is None else task.grid[place], max_decode_length=task.steps),
            max_input_length=_MAX_INPUT_LENGTH,
            exit_head=task.exit_head,
        )
        made = sum(result.length for _, result in decoder.decode(chosen))
        times = []
        for _ in range(max(task.runs, _BATCH_1_RUNS)):
            start = time.perf_counter()
            list(decoder.decode(chosen))
            times.append(time.perf_counter() - start)
        per_token = min(times) / made
        weight = 1.0 if place is None else len(task.grid) / len(measured)
        seconds += weight * per_token * int(lengths[0 if place is None else place + 1])
        tokens += made
    return {
        "batch_1_thresholds_measured": len(measured),
        "batch_1_prompts_measured": len(chosen),
        "batch_1_tokens_measured": tokens,
        "batch_1_seconds": seconds,
    }


def _evenly(count: int, most: int) -> list[int]:
    """Returns indices below `count`, at most so many, each in the middle of as many: 10, 30, 50, 70, 90 of 100."""
    chosen = min(count, most)
    return [(2 * index + 1) * count // (2 * chosen) for index in range(chosen)]


def _rates(task: Task, length: int) -> dict[str, float]:
    """Returns multiply-adds per second, of bare matrix products and of the sweep's large steps with full batches.

    Args:
      task: Model and rule.
      length: Tokens of an output, as many as the rows of the layer step attend to.
    """
    config = task.checkpoint.config
    width = bucket_width(max(map(len, task.prompts)), _MAX_INPUT_LENGTH)
    return {
        "square_product": multiply_adds.square_rate(),
        "projection_product": multiply_adds.projection_rate(config, rows=large_steps.ROWS),
        "projection_step": large_steps.projection_step_rate(task.checkpoint, task.rule),
        "layer_step": large_steps.layer_step_rate(task.checkpoint, task.rule, steps=length, source=width),
    }


def _mean_exits(exits: np.ndarray) -> list[float]:
    """Returns the mean exit layer of every threshold, of exit layers (prompts, branches, steps)."""
    return [round(float(place[place > 0].mean()), 3) for place in np.moveaxis(exits, 1, 0)[1:]]


def _print_table(figures: Mapping[str, Any]) -> None:
    """Prints the figures of one run as Markdown, times in seconds and work in passes of the full model."""
    print(
        f"{figures['prompts']} prompts, {figures['tokens_of_full_model']} tokens of the full model, "
        f"{figures['tokens_of_all_lanes']} in all branches; {figures['confidence']}, {figures['thresholds']} "
        f"thresholds, {figures['batch_size']} prompts at a time"
    )
    print(f"mean exit layers, from the highest threshold down: {figures['mean_exit_layer_by_threshold']}\n")
    print("| | layer work | projection work | s | sweep is faster by |")
    print("|---|---:|---:|---:|---:|")
    sweep_seconds = figures["sweep_seconds"]
    for title, layers, projections, seconds in (
        ("sweep", "layer_work_over_full_pass", "projection_work_over_full_pass", "sweep_seconds"),
        ("full model alone", "full_pass_layer_work", "full_pass_projection_work", "full_pass_seconds"),
        (
            f"once per threshold ({figures['per_threshold_measured']} of {figures['thresholds']} measured)",
            "per_threshold_layer_work_over_full_pass",
            "per_threshold_projection_work_over_full_pass",
            "per_threshold_seconds",
        ),
        (
            f"one prompt at a time ({figures['batch_1_tokens_measured']} tokens of "
            f"{figures['batch_1_prompts_measured']} prompts at {figures['batch_1_thresholds_measured']} thresholds "
            "measured)",
            None,
            None,
            "batch_1_seconds",
        ),
    ):
        work = [f"{figures[name]:.2f}" if name else "" for name in (layers, projections)]
        print(f"| {title} | {' | '.join(work)} | {figures[seconds]:.2f} | {figures[seconds] / sweep_seconds:.2f} |")
    print(
        f"\npadding, as a share of layer rows: {figures['padded_rows_over_layer_rows']:.2f} in the sweep, "
        f"{figures['per_threshold_padded_rows_over_layer_rows']:.2f} once per threshold"
    )
    print(
        f"{figures['per_threshold_outputs_that_differ']} of {figures['per_threshold_outputs_compared']} outputs differ "
        "from those of their threshold alone"
    )
    rates = figures["multiply_adds_per_second"]
    print(
        "multiply-adds per second, 10^9: "
        + ", ".join(f"{name.replace('_', ' ')} {rate / 1e9:.1f}" for name, rate in rates.items())
    )
    print(
        f"share of the machine's float32 rate: {figures['matmul_share']:.0%} of the whole sweep (attention over "
        f"positions, encoder and padding not counted as work), {figures['projection_step_matmul_share']:.0%} of a full "
        f"projection step, {figures['layer_step_matmul_share']:.0%} of a full layer step ({large_steps.ROWS} rows)"
    )
    print(
        f"compilation {figures['compile_seconds']:.1f} s; peak memory {figures['peak_memory_bytes'] / 2**20:.0f} MiB, "
        f"{figures['memory_before_sweep_bytes'] / 2**20:.0f} MiB of it model and imports",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
