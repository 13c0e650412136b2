"""Tokens per second of many prompts under a threshold, against the full model in the same engine.

Every batch is decoded by the full model and with exits, alternately; of each the fastest round counts. The measured
gain is shown with the gain that the counted work allows: layers, decisions of the head, keys and values made for
skipped layers, and sources, each at its own cost. The costs of a layer and a decision per row come from the full
model's run, whose batches are as full as they get; so padding, small steps and bookkeeping are missing from 100 %. For
that, steps are timed in parts; gains are those of whole steps, which may be faster. Thresholds are searched that use
about a quarter and half of the layers. Compilation is done before.

    python -m benchmarks.throughput --checkpoint=model/ --data=validation.jsonl.gz
    python -m benchmarks.throughput --checkpoint=model/ --data=validation.jsonl.gz --widened

`--widened` gives the model the paper's dimensions (`benchmarks/widened_model.py`).
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence

from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.branches import Branch, BranchResult
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.engine import Work
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.decoding.single_prompts import single_prompt_decoder
from calm_beam.exits.head_forms import EXIT_HEADS
from calm_beam.exits.rule import ExitRule

from .machine import describe_machine
from .prompts import read_prompts
from .timed_steps import timed_steps
from .widened_model import widen_to_paper

_MEASURES = ("softmax", "softmax_max", "state", "classifier", "static")
_SHARES = (0.25, 0.5)
MAX_INPUT_LENGTH = 128
# Halvings of [0, 1] in the search for a threshold, and prompts that are decoded for it.
_TRIES, _TRIED = 10, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The workload: prompts, model and settings."""

    checkpoint: Checkpoint
    prompts: Sequence[Sequence[int]]
    steps: int
    exit_head: str


@dataclasses.dataclass(kw_only=True)
class Run:
    """A decoder with what it decodes: the fastest seconds, and the results of one pass."""

    decode: Callable[[], dict[int, BranchResult]]
    seconds: float = float("inf")
    results: dict[int, BranchResult] = dataclasses.field(default_factory=dict)

    def once(self) -> None:
        """Decodes, and keeps the time if it is the shortest."""
        self.seconds = min(self.seconds, self.timed())

    def timed(self) -> float:
        """Decodes, and returns the seconds that it took."""
        start = time.perf_counter()
        self.results = self.decode()
        return time.perf_counter() - start

    @property
    def tokens(self) -> int:
        """Tokens of all results."""
        return sum(result.length for result in self.results.values())

    @property
    def layers(self) -> float:
        """Mean layers of a token."""
        return sum(int(result.exit_layers.sum()) for result in self.results.values()) / self.tokens


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--widened", action="store_true")
    parser.add_argument("--prompts", type=int, default=16, help="times the batch")
    parser.add_argument("--most_prompts", type=int, default=4096)
    parser.add_argument("--max_decode_length", type=int, default=48)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--measures", default=",".join(_MEASURES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--exit_head", choices=EXIT_HEADS, default="auto")
    flags = parser.parse_args()
    use_compilation_cache()
    task = read_task(flags, count=flags.most_prompts)
    print(describe_machine())
    print(f"at most {task.steps} tokens, {flags.rounds} rounds, exit head {flags.exit_head}")
    columns = (
        "prompts at a time",
        "measure",
        "threshold",
        f"layers of {task.checkpoint.config.num_decoder_layers}",
        "full model, tokens/s",
        "with exits, tokens/s",
        "gain",
        "the work allows",
        "share",
    )
    print(f"| {' | '.join(columns)} |")
    print(f"|---:|---{'|---:' * (len(columns) - 2)}|", flush=True)
    for measure in flags.measures.split(","):
        thresholds = [searched(task, measure, layers=share) for share in _SHARES]
        for size in map(int, flags.batches.split(",")):
            some = dataclasses.replace(task, prompts=task.prompts[: max(16, flags.prompts * size)])
            for threshold in thresholds:
                _print_row(some, measure, threshold, size=size, rounds=flags.rounds)


def read_task(flags: argparse.Namespace, *, count: int) -> Task:
    """Returns the first prompts of `--data`, with the model of `--checkpoint`, `--widened` if that is asked for."""
    checkpoint, steps = load_checkpoint(flags.checkpoint), flags.max_decode_length
    settings = DecodeSettings(
        rule=ExitRule(), thresholds=(0.5,), max_input_length=MAX_INPUT_LENGTH, max_decode_length=steps
    )
    prompts = read_prompts(flags.data, checkpoint, settings=settings, count=count)
    if flags.widened:
        checkpoint = widen_to_paper(checkpoint)
    return Task(checkpoint=checkpoint, prompts=prompts, steps=steps, exit_head=flags.exit_head)


def searched(task: Task, measure: str, *, layers: float) -> float:
    """Returns a threshold that uses about such a share of the layers per token."""
    if measure == "static":
        return layers
    depth = task.checkpoint.config.num_decoder_layers
    some = dataclasses.replace(task, prompts=task.prompts[:_TRIED])
    lower, upper = 0.0, 1.0
    found: list[tuple[float, float]] = []
    for _ in range(_TRIES):
        threshold = (lower + upper) / 2
        run = Run(decode=batched(some, ExitRule(confidence=measure), threshold, size=_TRIED)[0])
        run.once()
        found.append((abs(run.layers - layers * depth), threshold))
        lower, upper = (threshold, upper) if run.layers < layers * depth else (lower, threshold)
    return min(found)[1]


def batched(
    task: Task, rule: ExitRule, threshold: float | None, *, size: int
) -> tuple[Callable[[], dict[int, BranchResult]], Decoder]:
    """Returns what decodes all prompts, so many at a time, and its decoder; the full model if threshold is None."""
    decoder = Decoder(
        task.checkpoint,
        [Branch.at(rule, threshold, max_decode_length=task.steps)],
        max_input_length=MAX_INPUT_LENGTH,
        batch_size=size,
        exit_head=task.exit_head,
    )
    return lambda: {index: result.branch(0) for index, result in decoder.decode(task.prompts)}, decoder


def single(task: Task, rule: ExitRule, threshold: float | None) -> Callable[[], dict[int, BranchResult]]:
    """Returns what decodes all prompts, one at a time."""
    decoder = single_prompt_decoder(
        task.checkpoint,
        Branch.at(rule, threshold, max_decode_length=task.steps),
        max_input_length=MAX_INPUT_LENGTH,
        exit_head=task.exit_head,
    )
    return lambda: dict(decoder.decode(task.prompts))


def decoding(
    task: Task, rule: ExitRule, threshold: float | None, *, size: int
) -> Callable[[], dict[int, BranchResult]]:
    """Returns what decodes all prompts, so many at a time; single prompts have a decoder of their own."""
    return single(task, rule, threshold) if size == 1 else batched(task, rule, threshold, size=size)[0]


def _print_row(task: Task, measure: str, threshold: float, *, size: int, rounds: int) -> None:
    rule = ExitRule(confidence=measure)
    if size == 1:
        # Single prompts are served by a decoder of their own.
        ways = [Run(decode=single(task, rule, at)) for at in (None, threshold)]
        allowed = None
    else:
        (full_decode, full_decoder), (early_decode, early_decoder) = (
            batched(task, rule, at, size=size) for at in (None, threshold)
        )
        ways = [Run(decode=full_decode), Run(decode=early_decode)]
        for run in ways:
            run.once()
        allowed = _allowed(ways[0], full_decoder, ways[1], early_decoder)
    full, early = ways
    gain = measured_gain(full, early, rounds=rounds)
    cells = (
        str(size),
        measure,
        f"{threshold:.4f}",
        f"{early.layers:.2f}",
        f"{full.tokens / full.seconds:,.0f}",
        f"{early.tokens / early.seconds:,.0f}",
        f"{gain:.2f}",
        *(("", "") if allowed is None else (f"{allowed:.2f}", f"{gain / allowed:.0%}")),
    )
    print(f"| {' | '.join(cells)} |", flush=True)


def run_in_turns(runs: Sequence[Run], *, rounds: int) -> None:
    """Takes so many rounds of all runs, one after the other, after a first pass that does not count."""
    for run in runs:
        run.once()
        run.seconds = float("inf")
    for _ in range(rounds):
        for run in runs:
            run.once()


def measured_gain(full: Run, early: Run, *, rounds: int) -> float:
    """Returns how many times the full model's tokens a second exits give, both decoded in turns after a first pass."""
    run_in_turns([full, early], rounds=rounds)
    return full.seconds / full.tokens / (early.seconds / early.tokens)


def _allowed(full: Run, full_decoder: Decoder, early: Run, early_decoder: Decoder) -> float:
    """Returns the gain per token if each piece of work took as long a row as in the full model's run."""
    full_work, full_seconds, whole = _in_pieces(full, full_decoder)
    early_work, early_seconds, _ = _in_pieces(early, early_decoder)
    # Bookkeeping is in the layers' cost.
    layer = (whole - full_seconds["decision"] - full_seconds["source"]) / full_work.layer_rows
    decision = full_seconds["decision"] / _decisions(full_work)
    source = full_seconds["source"] / full_work.prompts
    needed = (
        # Layers that run ahead of decisions only save time, and do not count as work.
        (early_work.layer_rows - early_work.ahead_rows) * layer
        + _decisions(early_work) * decision
        + early_work.prompts * source
        + early_seconds["fill"]
    )
    return (whole / full.tokens) / (needed / early.tokens)


def _decisions(work: Work) -> int:
    return max(work.certified_rows, work.projection_rows) - work.ahead_decisions


def _in_pieces(run: Run, decoder: Decoder) -> tuple[Work, dict[str, float], float]:
    """Returns the work of one pass, the seconds of each piece of it, and of all; each step is waited for."""
    before, start = decoder.work, time.perf_counter()
    with timed_steps() as (seconds, _):
        run.decode()
    return decoder.work - before, seconds, time.perf_counter() - start


if __name__ == "__main__":
    main()
