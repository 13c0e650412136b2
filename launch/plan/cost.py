"""The cost of a run, as it is forecast from a pilot, on the terminal."""

import argparse
import dataclasses
import re

import numpy as np
from rich import box
from rich.table import Table

from calm_beam.counted import counted
from calm_beam.efficiency.cost import CONFIDENCE, Cost, Interval, Job, forecast
from calm_beam.launch.flags import UsageError, as_usage
from calm_beam.launch.terminal import PlainConsole, say
from calm_beam.manifest import Calibration
from calm_beam.printable import printable_line
from calm_beam.risk.expected_stop import ExpectedStop, expected_stop, looks_at
from calm_beam.sweeps.shard_count import shards_for
from calm_beam.tails import tail_in_words

from .pilot_run import PilotRun, read_pilot

_REPLICATIONS = 200
# What tells a kind of device, in the names that Dataflow and JAX have for it.
_TELLING = re.compile(r"\b([alt]\d+|h\d+|v\d+[a-z]?|cpu)\b")


def plan_cost(flags: argparse.Namespace) -> int:
    """Prints what the run will cost, and what stopping early may save; returns the exit status."""
    with as_usage():
        _check(flags)
        run = read_pilot(flags.pilot)
        _check_device(flags, run.pilot.device)
    job = _job(flags)
    cost = forecast(run.pilot, job)
    _print_cost(run, job, cost, flags=flags)
    _print_stops(run, job, cost, flags=flags)
    return 0


def _check(flags: argparse.Namespace) -> None:
    if flags.examples is None:
        raise UsageError("--examples is missing: how many the run will have, such as 1e6.")
    for name in ("delta", "epsilon", "power"):
        value = getattr(flags, name)
        if value is not None and not 0 < value < 1:
            raise UsageError(f"--{name} must be in (0, 1), got {value:g}. It is a fraction: for 5 % pass 0.05.")


def _check_device(flags: argparse.Namespace, device: str) -> None:
    if flags.accelerator is None or flags.speedup is not None or is_same_device(flags.accelerator, device):
        return
    raise UsageError(
        f"--accelerator={flags.accelerator}: the pilot ran on {device}, which says nothing about the speed there. "
        f"Measure a pilot on {flags.accelerator}, or pass --speedup: how many times faster you expect it to be."
    )


def is_same_device(accelerator: str, device: str) -> bool:
    """Returns whether the name of an accelerator, as Dataflow has it, is that of a device, as JAX has it.

    >>> is_same_device("nvidia-l4", "NVIDIA L4"), is_same_device("nvidia-l4", "cpu")
    (True, False)
    >>> is_same_device("nvidia-tesla-t4", "Tesla T4"), is_same_device("tpu-v6e-slice", "TPU v6 lite")
    (True, True)
    """
    ours, theirs = ({found.rstrip("e") for found in _TELLING.findall(name.lower())} for name in (accelerator, device))
    return accelerator.lower() == device.lower() or (bool(ours) and ours == theirs)


def _job(flags: argparse.Namespace) -> Job:
    workers = flags.workers or 1
    return Job(
        examples=flags.examples,
        workers=workers,
        num_shards=flags.num_shards or shards_for(flags.examples, workers=workers),
        workers_per_machine=flags.workers_per_machine or 1,
        speedup=flags.speedup or 1.0,
    )


def _print_cost(run: PilotRun, job: Job, cost: Cost, *, flags: argparse.Namespace) -> None:
    console = PlainConsole()
    title = f"{counted(job.examples, 'example')} on {counted(job.workers, 'worker')}, from a pilot of {run.examples:,}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("expected", justify="right", no_wrap=True)
    table.add_column(f"{CONFIDENCE:.0%} interval", justify="right", no_wrap=True)
    unit, seconds = _unit(cost.seconds.value)
    _add(table, f"{unit} by the clock", cost.seconds.times(1 / seconds), digits=3)
    _add(table, "hours of all workers", cost.worker_seconds.times(1 / 3600), digits=3)
    if flags.price_per_hour is not None:
        money = cost.worker_seconds.times(flags.price_per_hour / 3600)
        _add(table, f"money, at {flags.price_per_hour:g} an hour and worker", money, digits=3)
    _add(table, "generations stored, GiB", cost.bytes.times(2**-30), digits=3)
    table.add_row("memory of a worker, GiB", f"{cost.peak_bytes / 2**30:.1f}", "")
    table.add_row("shards to ask for (--num_shards)", f"{job.num_shards:,}", "")
    table.add_row("workers wait for the last shard", f"{cost.idle:.1%}", "of decoding")
    console.print(table)
    for sentence in _assumed(run, job, cost):
        console.say(sentence)


def _unit(seconds: float) -> tuple[str, int]:
    """Returns the unit in which a time is best read, and its seconds."""
    for name, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return name, length
    return "seconds", 1


def _add(table: Table, name: str, interval: Interval, *, digits: int) -> None:
    between = (
        f"{_number(interval.low, digits)} to {_number(interval.high, digits)}"
        if interval.low is not None and interval.high is not None
        else "unknown"
    )
    table.add_row(name, _number(interval.value, digits), between)


def _number(value: float, digits: int) -> str:
    """Returns a number with so many digits, without an exponent."""
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if value >= 1e-4 else "0"


def _assumed(run: PilotRun, job: Job, cost: Cost) -> list[str]:
    """Returns in words what the forecast rests on."""
    pilot, (timed, shards) = run.pilot, run.timed
    found = [
        f"Measured on {pilot.device} by {counted(pilot.workers, 'process', several='processes')}: "
        f"{counted(pilot.examples, 'example')} in {counted(timed, 'shard')}. Before the first shard a run takes "
        f"{pilot.start_seconds:.0f} s, a worker compiles for {pilot.compile_seconds:.0f} s, and at the end, scoring "
        f"takes {1000 * pilot.score_seconds:.2g} ms an example (measured here and now) and the rest "
        f"{pilot.end_seconds:.0f} s."
    ]
    if timed < shards:
        found.append(f"Of {shards - timed} more shards of the pilot, nobody knows what they took.")
    if not run.has_run_timing:
        found.append(
            "What starting and ending take is not known, since this pilot was not made by one calm-beam calibrate from "
            "start to end: add it."
        )
    if timed < 2:
        found.append("There are no intervals: that takes a pilot of at least two shards.")
    if job.speedup != 1:
        found.append(f"Decoding is assumed to be {job.speedup:g} times faster than the pilot's (--speedup).")
    if job.workers_per_machine > 1:
        found.append(
            f"{job.workers_per_machine} workers share {min(shard.timing.cores for shard in pilot.shards)} cores, of "
            f"which the pilot's kept {pilot.busy_cores:.1f} busy."
        )
    found.append(
        "The intervals are about the pilot's shards being a sample. Assumed: examples like the pilot's, on machines "
        "like its; the same settings; starting, and reading the data, as long as there. Workers are paid from start "
        "to end."
    )
    return found


def _print_stops(run: PilotRun, job: Job, cost: Cost, *, flags: argparse.Namespace) -> None:
    """Prints what a sequential calibration may save."""
    console = PlainConsole()
    if not run.entries:
        console.say("What stopping early may save takes the manifest of the pilot, which is not there.")
        return
    if run.clusters:
        console.say("What stopping early may save is not forecast for clusters.")
        return
    say("simulating sequential calibrations")
    table = Table(title="A sequential run: when it may stop", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("consistency\nmetric", overflow="fold")
    for name in (
        "delta\nepsilon",
        "pilot's\nthreshold",
        "to be\nproved",
        f"examples needed\n({CONFIDENCE:.0%} of runs)",
        "saved",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    least_saved: float | None = None
    for asked in _asked(run, flags):
        entry = asked.entry
        cells = ["", "not forecast", ""]
        if asked.losses is not None:
            stop = _stop(asked, asked.losses, job=job, flags=flags)
            saved = 0.0 if stop.shares is None else 1 - stop.shares[0]
            least_saved = saved if least_saved is None else min(least_saved, saved)
            cells = _cells(stop, run, job)
        table.add_row(
            f"{entry.consistency}{tail_in_words(entry.known_loss)}\n{printable_line(entry.metric)}",
            f"{asked.delta:g}\n{asked.epsilon:g}",
            asked.threshold_in_words(),
            *cells,
        )
    console.print(table)
    if least_saved is not None:
        saved_seconds = least_saved * cost.decode_seconds.value
        unit, length = _unit(saved_seconds)
        price = flags.price_per_hour
        money = "" if price is None else f", and {_number(saved_seconds / 3600 * job.workers * price, 3)} of the money"
        console.say(
            f"A run that stops once all of these are proved saves {_share(least_saved)} of decoding: about "
            f"{_number(saved_seconds / length, 3)} {unit}{money}."
        )
    console.say(
        f"To be proved: the lowest threshold that {flags.power:.0%} of whole runs prove, by the signed mixture, whose "
        f"proof may be watched, after every {_round_examples(job):,} examples at first. Simulated by drawing from the "
        "pilot's losses "
        f"({counted(flags.replications or _REPLICATIONS, 'run')}, seed {flags.seed}): a forecast, and no promise."
    )
    if any(losses.entry.group is not None for losses in run.entries):
        console.say("Not forecast: entries of groups, for which a sequential run waits too.")
    if any(losses.losses is None for losses in run.entries):
        console.say("Not forecast: metrics that are not calm-beam's own, whose code a manifest cannot have imported.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """A guarantee that is planned for.

    Attributes:
      entry: Of the pilot, about the same losses.
      losses: As in `EntryLosses`.
      delta: Risk tolerance, the entry's or another.
      epsilon: Allowed probability of error, likewise.
    """

    entry: Calibration
    losses: np.ndarray | None
    delta: float
    epsilon: float

    def threshold_in_words(self) -> str:
        """Returns what the pilot has chosen; nothing if it was asked for something else."""
        if (self.delta, self.epsilon) != (self.entry.delta, self.entry.epsilon):
            return ""
        return "never exit" if self.entry.threshold is None else f"{self.entry.threshold:g}"


def _asked(run: PilotRun, flags: argparse.Namespace) -> list[_Asked]:
    """Returns what the entries of the pilot guarantee, with other tolerances if flags say so; each once."""
    found: dict[tuple[object, ...], _Asked] = {}
    for each in run.entries:
        entry = each.entry
        if entry.group is not None:
            # Of a group there would be a share of the examples, which a pilot knows too little of.
            continue
        delta = entry.delta if flags.delta is None else flags.delta
        epsilon = entry.epsilon if flags.epsilon is None else flags.epsilon
        asked = _Asked(entry=entry, losses=each.losses, delta=delta, epsilon=epsilon)
        key = (entry.consistency, entry.metric, entry.known_loss, delta, epsilon)
        if key not in found or asked.threshold_in_words():
            found[key] = asked
    return list(found.values())


def _stop(asked: _Asked, losses: np.ndarray, *, job: Job, flags: argparse.Namespace) -> ExpectedStop:
    return expected_stop(
        losses,
        delta=asked.delta,
        epsilon=asked.epsilon,
        looks=looks_at(job.examples, first=_round_examples(job)),
        power=flags.power,
        replications=flags.replications or _REPLICATIONS,
        seed=flags.seed,
    )


def _round_examples(job: Job) -> int:
    """Returns the examples of a round in which every worker has a shard."""
    return max(1, job.examples * min(job.workers, job.num_shards) // job.num_shards)


def _cells(stop: ExpectedStop, run: PilotRun, job: Job) -> list[str]:
    if stop.shares is None:
        return ["none", f"{job.examples:,}", "0%"]
    median, low, high = (f"{round(share * job.examples):,}" for share in stop.shares)
    return [f"{run.thresholds[stop.place]:g}", f"{median}\n({low} to {high})", _share(1 - stop.shares[0])]


def _share(share: float) -> str:
    return f"{share:.1%}" if 0.99 <= share < 1 else f"{share:.0%}"
