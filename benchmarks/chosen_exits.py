"""Exits that `calibrate` chooses, next to softmax at every layer and the best fixed rule found by hand.

For each objective (single prompts, and batches of each size) the default of `calibrate` is calibrated on the first
examples of `--calibration_data`. So is each fixed rule. All are decoded on prompts of `--data`, in turns with the full
model, and the fastest fixed rules again in more rounds; of each the median over rounds counts. The best by hand is the
fixed rule that was fastest there. It and the chosen one are then timed on further prompts of `--data`.

    python -m benchmarks.chosen_exits --checkpoint=model/ --calibration_data=validation.jsonl.gz --data=test.jsonl.gz

`--widened` gives the model the paper's dimensions (`benchmarks/widened_model.py`). Its outputs are those of the small
model, so that thresholds of fixed rules are proved on the small one; what is chosen depends on times, and is calibrated
on the large one.
"""

import argparse
import dataclasses
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Mapping
from typing import Any

import calm_beam as calm
from calm_beam.checkpoints import Checkpoint, write_native
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.decoding.settings import recorded_rule
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import numbered_lines
from calm_beam.inputs.vocabularies.vocabulary import missing_sentinels
from calm_beam.storage import open_input

from .machine import describe_machine
from .throughput import MAX_INPUT_LENGTH, Run, Task, decoding, read_task

_EPSILON = 0.05
# First layer that may exit, and the distance to the next.
_LAYERS = "1:1,2:2,4:2,4:4"
_PAPERS = ("softmax", 1, 1)
# Fixed rules whose gains are measured again, in more rounds, after a first look at all.
_MEASURED_AGAIN = 3
# Rounds of the first look.
_FIRST_LOOK = 3


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
    parser.add_argument("--widened", action="store_true")
    parser.add_argument("--examples", type=int, default=1000, help="of --calibration_data, that calibrate")
    parser.add_argument("--prompts", type=int, default=512, help="to find the best by hand, and as many to time it")
    parser.add_argument("--single_prompts", type=int, default=96, help="as many, where one is decoded at a time")
    parser.add_argument("--max_decode_length", type=int, default=48)
    parser.add_argument("--measures", default="softmax,state,static")
    parser.add_argument("--exits", default=_LAYERS, help="min_exit_layer:exit_interval, ...")
    parser.add_argument("--consistency", default="textual,risk")
    parser.add_argument("--deltas", default="0.02,0.05,0.1")
    parser.add_argument("--metric", default="rouge_l_unicode")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--rounds", type=int, default=7)
    flags = parser.parse_args()
    flags.exit_head = "auto"
    use_compilation_cache()
    task = read_task(flags, count=2 * flags.prompts)
    sizes = [int(size) for size in flags.batches.split(",")]
    print(describe_machine())
    print(
        f"{flags.examples} examples calibrate; twice {len(task.prompts) // 2} prompts are timed, {flags.rounds} rounds"
    )
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "examples.jsonl"
        with open_input(flags.calibration_data) as raw:
            rows = numbered_lines(raw, path=flags.calibration_data)
            data.write_bytes(b"".join(line for _, line in itertools.islice(rows, flags.examples)))
        by_hand = {
            rule: _calibrated(
                flags,
                data,
                model=flags.checkpoint,
                exits=ExitRule(confidence=rule[0], min_exit_layer=rule[1], exit_interval=rule[2]),
            )
            for rule in _rules(flags)
        }
        model = _written(task.checkpoint, pathlib.Path(folder) / "model") if flags.widened else flags.checkpoint
        _print_head(task)
        for size in sizes:
            objective = "latency" if size == 1 else f"throughput:{size}"
            chosen = _calibrated(flags, data, model=model, exits="auto", objective=objective)
            # One at a time, fewer take as long each.
            count = flags.single_prompts if size == 1 else len(task.prompts) // 2
            found_on, timings = (
                Timings(dataclasses.replace(task, prompts=task.prompts[start : start + count]), size=size)
                for start in (0, count)
            )
            _print_rows(chosen, by_hand=by_hand, found_on=found_on, timings=timings, rounds=flags.rounds)


def _written(checkpoint: Checkpoint, folder: pathlib.Path) -> str:
    """Writes a model to a folder, and returns its path."""
    assert checkpoint.vocabulary_path is not None, "prompts are text"
    write_native(
        folder,
        checkpoint.config,
        arrays=checkpoint.arrays,
        vocabulary_path=checkpoint.vocabulary_path,
        extra_ids=missing_sentinels(checkpoint.vocabulary_path),
    )
    return str(folder)


class Timings:
    """How much faster than the full model ways of exiting decode the same prompts, each in turns with it."""

    def __init__(self, task: Task, *, size: int) -> None:
        """Keeps what is timed.

        Args:
          task: The prompts and the model.
          size: Prompts at a time.
        """
        self.task, self.size = task, size
        self._full = Run(decode=decoding(task, ExitRule(), None, size=size))
        self._full.once()
        self._runs: dict[Exits, Run] = {}
        self._gains: dict[Exits, list[float]] = {}

    def gain(self, exits: Exits, *, rounds: int) -> float:
        """Returns the full model's seconds divided by those with exits: the median of at least so many rounds of both.

        As in `calibrate`, seconds are for the same prompts, whose outputs may differ in length.
        """
        if exits.threshold is None:
            return 1.0
        if exits not in self._runs:
            self._runs[exits] = Run(decode=decoding(self.task, exits.rule, exits.threshold, size=self.size))
            self._gains[exits] = []
            # The first pass compiles, and does not count.
            self._runs[exits].once()
        while len(self._gains[exits]) < rounds:
            full, early = self._full.timed(), self._runs[exits].timed()
            self._gains[exits].append(full / early)
        # Static layers up to the last one are the full model.
        is_full = exits.rule.confidence == "static" and self.layers(exits) == self._depth
        return 1.0 if is_full else statistics.median(self._gains[exits])

    def layers(self, exits: Exits) -> float:
        """Returns the mean layers of a token, of what was timed before."""
        return float(self._depth) if exits.threshold is None else self._runs[exits].layers

    @property
    def _depth(self) -> int:
        return self.task.checkpoint.config.num_decoder_layers


def _print_head(task: Task) -> None:
    columns = (
        "prompts at a time",
        "consistency",
        "delta",
        "chosen",
        f"layers of {task.checkpoint.config.num_decoder_layers}",
        "gain",
        "softmax at every layer",
        "best by hand",
        "its gain",
        "chosen / best",
    )
    print(f"| {' | '.join(columns)} |")
    print("|---:|---|---:|---|---:|---:|---:|---|---:|---:|", flush=True)


def _print_rows(
    chosen: Mapping[tuple[str, float], Exits],
    *,
    by_hand: Mapping[tuple[str, int, int], Mapping[tuple[str, float], Exits]],
    found_on: Timings,
    timings: Timings,
    rounds: int,
) -> None:
    """Prints a row for each promise.

    Args:
      chosen: What `calibrate` chose, by promise.
      by_hand: What was proved of each fixed rule, by promise.
      found_on: Prompts on which the best fixed rule is found.
      timings: Prompts on which it is timed, next to what was chosen.
      rounds: Rounds of each.
    """
    depth = timings.task.checkpoint.config.num_decoder_layers
    for promise, exits in chosen.items():
        first_look = {rule: found_on.gain(found[promise], rounds=_FIRST_LOOK) for rule, found in by_hand.items()}
        fastest = sorted(first_look, key=first_look.__getitem__)[-_MEASURED_AGAIN:]
        best = max(fastest, key=lambda rule: found_on.gain(by_hand[rule][promise], rounds=rounds))
        of_best = timings.gain(by_hand[best][promise], rounds=rounds)
        gain = timings.gain(exits, rounds=rounds)
        cells = (
            timings.size,
            promise[0],
            f"{promise[1]:g}",
            exits.in_words(depth),
            f"{timings.layers(exits):.2f}",
            f"{gain:.2f}",
            f"{timings.gain(by_hand[_PAPERS][promise], rounds=rounds):.2f}" if _PAPERS in by_hand else "",
            by_hand[best][promise].in_words(depth),
            f"{of_best:.2f}",
            f"{gain / of_best:.2f}",
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


def _calibrated(
    flags: argparse.Namespace, data: pathlib.Path, *, model: str, **exits: Any
) -> Mapping[tuple[str, float], Exits]:
    """Returns what is proved for each promise, by consistency and delta."""
    with tempfile.TemporaryDirectory() as output:
        manifest = calm.calibrate(
            model=model,
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


if __name__ == "__main__":
    main()
