"""The forecast cost on the terminal: of a run, from a pilot; of a model's step, as its least time on an accelerator."""

import itertools
import os
from collections.abc import Sequence

from calm_beam.checkpoints import load_checkpoint
from calm_beam.errors import UsageError
from calm_beam.evaluation.cost import CONFIDENCE, Cost, Interval, Job, forecast
from calm_beam.evaluation.device_forecast import device_forecast
from calm_beam.evaluation.pilot import (
    PilotRun,
    StopForecast,
    is_same_device,
    read_pilot,
    round_examples,
    stop_forecasts,
)
from calm_beam.launch.device_times import device_times_in_words, device_times_record, device_times_table
from calm_beam.launch.flags import as_usage
from calm_beam.launch.terminal import PlainConsole, give, say, tell
from calm_beam.launch.terminal.lines import PlainTable
from calm_beam.manifest import Calibration
from calm_beam.outputs.sharding import shards_for
from calm_beam.precision import Precision
from calm_beam.report import write_page
from calm_beam.report.cost_page import CostInWords, StopRow, cost_page, short_number, unit_of
from calm_beam.report.document import short_place
from calm_beam.text import counted, printable_line

from .request import PAGE, PlanRequest, checked_output


def plan_cost(request: PlanRequest) -> int:
    """Prints what the run will cost, and what stopping early may save; returns the exit status."""
    with as_usage():
        if request.examples is None:
            raise UsageError("--examples is missing: how many the run will have, such as 1e6.")
        output, pilot = checked_output(request, kinds=(PAGE,)), os.fspath(request.pilot or "")
        say("reading the pilot, and scoring some of its outputs to time that")
        run = read_pilot(pilot)
        _check_device(request, run.pilot.device)
    job = _job(request, examples=request.examples)
    cost = forecast(run.pilot, job)
    rows, assumed = _rows(job, cost, price=request.price_per_hour), _assumed(run, job, cost)
    _print_cost(run, job, rows, assumed=assumed)
    forecasts: list[StopForecast] = []
    # Clusters would have to be drawn whole.
    if run.entries and not run.clusters:
        forecasts = [
            forecast
            for delta, epsilon in itertools.product(request.deltas or (None,), request.epsilons or (None,))
            for forecast in stop_forecasts(
                run,
                job,
                delta=delta,
                epsilon=epsilon,
                power=request.power,
                replications=_replications(request),
                seed=request.seed,
                simulating=_say_simulated,
            )
        ]
    saved = _saved_in_words(forecasts, job, cost, price=request.price_per_hour)
    notes = [*([] if saved is None else [saved]), *_about_stops(run, job, request=request)]
    _print_stops(forecasts, run, job, notes=notes)
    give({"job": job, "cost": cost, "stops": [_stop_row(each, run, job) for each in forecasts], "notes": notes})
    if output is not None:
        page = cost_page(
            run.pilot,
            job,
            cost,
            words=CostInWords(
                rows=rows,
                assumed=assumed,
                stops=[_stop_row(each, run, job) for each in forecasts],
                notes=notes,
                facts=[
                    ("Pilot", f"{short_place(pilot)}, {counted(run.examples, 'example')}"),
                    ("Device", run.pilot.device),
                ],
            ),
            price=request.price_per_hour,
            shards_of=lambda workers: request.num_shards or shards_for(job.examples, workers=workers),
        )
        write_page(page, output)
        tell(f"Page: {output}")
    return 0


def _say_simulated(entry: Calibration, delta: float) -> None:
    kind, metric = entry.objective.consistency_in_words(), printable_line(entry.metric)
    say(f"simulating sequential calibrations of {kind}, {metric}, delta {delta:g}")


def _check_device(request: PlanRequest, device: str) -> None:
    if request.accelerator is None or request.speedup is not None or is_same_device(request.accelerator, device):
        return
    raise UsageError(
        f"--accelerator={request.accelerator}: the pilot ran on {device}, which says nothing about the speed there. "
        f"Measure a pilot on {request.accelerator}, or pass --speedup: how many times faster you expect it to be."
    )


def _replications(request: PlanRequest) -> int:
    """Returns how many calibrations are simulated."""
    return request.replications or 200


def _job(request: PlanRequest, *, examples: int) -> Job:
    return Job(
        examples=examples,
        workers=request.workers,
        num_shards=request.num_shards or shards_for(examples, workers=request.workers),
        workers_per_machine=request.workers_per_machine,
        speedup=request.speedup or 1.0,
    )


def _rows(job: Job, cost: Cost, *, price: float | None) -> list[tuple[str, str, str]]:
    """Returns what the run takes: names, what is expected, and intervals."""
    unit, seconds = unit_of(cost.seconds.value)
    intervals = [
        (f"{unit} by the clock", cost.seconds.times(1 / seconds)),
        ("hours of all workers", cost.worker_seconds.times(1 / 3600)),
    ]
    if price is not None:
        intervals.append((f"money, at {price:g} an hour and worker", cost.worker_seconds.times(price / 3600)))
    intervals.append(("generations stored, GiB", cost.bytes.times(2**-30)))
    return [
        *((name, short_number(interval.value), _between(interval)) for name, interval in intervals),
        ("memory of a worker, GiB", f"{cost.peak_bytes / 2**30:.1f}", ""),
        ("shards to ask for (--num_shards)", f"{job.num_shards:,}", ""),
        ("workers wait for the last shard", f"{cost.idle:.1%}", "of decoding"),
    ]


def _print_cost(run: PilotRun, job: Job, rows: Sequence[tuple[str, str, str]], *, assumed: Sequence[str]) -> None:
    console = PlainConsole()
    title = f"{counted(job.examples, 'example')} on {counted(job.workers, 'worker')}, from a pilot of {run.examples:,}"
    table = PlainTable(title)
    table.add_column("", no_wrap=True)
    table.add_numbers("expected", f"{CONFIDENCE:.0%} interval")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for sentence in assumed:
        console.say(sentence)


def _between(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return "unknown"
    return f"{short_number(interval.low)} to {short_number(interval.high)}"


def _assumed(run: PilotRun, job: Job, cost: Cost) -> list[str]:
    """Returns sentences about the assumptions of the forecast."""
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
            "The time to start and end is not known, since this pilot was not made by one calm-beam calibrate from "
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
        "like its; the same settings; starting, and reading the data, take as long as in the pilot. Workers are paid "
        "from start to end."
    )
    return found


def _print_stops(forecasts: Sequence[StopForecast], run: PilotRun, job: Job, *, notes: Sequence[str]) -> None:
    """Prints what a sequential calibration may save."""
    console = PlainConsole()
    if forecasts:
        table = PlainTable("A sequential run: when it may stop")
        table.add_column("consistency\nmetric", overflow="fold")
        table.add_numbers(
            "delta\nepsilon",
            "pilot's\nthreshold",
            "to be\nproved",
            f"examples needed\n({CONFIDENCE:.0%} of runs)",
            "saved",
        )
        for each in forecasts:
            row = _stop_row(each, run, job)
            between = f"\n({row.between})" if row.between else ""
            table.add_row(
                f"{row.kind}\n{row.metric}",
                f"{row.delta:g}\n{row.epsilon:g}",
                row.chosen,
                row.proved,
                row.examples + between,
                row.saved,
            )
        console.print(table)
    for note in notes:
        console.say(note)


def _saved_in_words(forecasts: Sequence[StopForecast], job: Job, cost: Cost, *, price: float | None) -> str | None:
    """Returns what a run saves that stops once all is proved; None where no stop was forecast."""
    saved = [each.saved for each in forecasts if each.saved is not None]
    if not saved:
        return None
    if not min(saved):
        return "Stopping early saves nothing here: one of these is not proved by fewer examples than all."
    seconds = min(saved) * cost.decode_seconds.value
    unit, length = unit_of(seconds)
    money = "" if price is None else f", and {short_number(seconds / 3600 * job.workers * price)} of the money"
    return (
        f"A run that stops once all of these are proved saves {_share(min(saved))} of decoding: about "
        f"{short_number(seconds / length)} {unit}{money}."
    )


def _about_stops(run: PilotRun, job: Job, *, request: PlanRequest) -> list[str]:
    """Returns what the forecast of stops rests on, and what it leaves out."""
    if not run.entries:
        return ["A forecast of what stopping early may save takes the manifest of the pilot, which is not there."]
    if run.clusters:
        return ["For clusters there is no forecast of what stopping early may save."]
    notes = [
        f"To be proved: the lowest threshold that {request.power:.0%} of runs over all examples prove. A sequential "
        f"run tests after every {round_examples(job):,} examples at first, later after more, by signed_mixture, which "
        "holds however often it tests. Simulated by drawing from the pilot's losses "
        f"({counted(_replications(request), 'run')}, seed {request.seed}): a forecast, and no promise."
    ]
    if any(losses.entry.group is not None for losses in run.entries):
        notes.append("Not forecast: entries of groups, for which a sequential run waits too.")
    if not all(losses.is_of_its_exits for losses in run.entries):
        notes.append(
            'Where the pilot\'s threshold is "other exits", the calibration chose exits of another folder, and the '
            "forecast is for those of this one."
        )
    if any(losses.losses is None for losses in run.entries):
        notes.append("Not forecast: metrics that are not calm-beam's own, whose code a manifest cannot have imported.")
    return notes


def _stop_row(each: StopForecast, run: PilotRun, job: Job) -> StopRow:
    entry, stop = each.entry, each.stop
    proved, examples, between, saved = "", "not forecast", "", ""
    if stop is not None:
        proved, examples, saved = "none", f"{job.examples:,}", "0%"
        if stop.shares is not None:
            examples, low, high = (f"{round(share * job.examples):,}" for share in stop.shares)
            proved, between = f"{run.thresholds[stop.place]:g}", f"{low} to {high}"
            saved = _share(1 - stop.shares[0])
    chosen = "never exit" if entry.threshold is None else f"{entry.threshold:g}"
    if not each.is_of_its_exits:
        chosen = "other exits"
    return StopRow(
        kind=entry.objective.consistency_in_words(),
        metric=printable_line(entry.metric),
        delta=each.delta,
        epsilon=each.epsilon,
        chosen=chosen if each.is_as_asked else "",
        proved=proved,
        examples=examples,
        between=between,
        saved=saved,
    )


def _share(share: float) -> str:
    return f"{share:.1%}" if 0.99 <= share < 1 else f"{share:.0%}"


def plan_device(request: PlanRequest, device: str) -> int:
    """Prints what a step takes on a device at the least; returns the exit status."""
    if request.checkpoint is None:
        raise UsageError(f"--checkpoint is missing: the model whose steps --device={device} is to take.")
    positions, rows = request.positions, request.batch_size
    with as_usage((ValueError, OSError)):
        config = load_checkpoint(os.fspath(request.checkpoint)).config
    forecast = device_forecast(config, device, Precision(dtype=request.dtype), positions=positions, rows=rows)
    console = PlainConsole()
    console.print(device_times_table(forecast))
    for sentence in device_times_in_words(forecast, positions=positions, rows=rows):
        console.say(sentence)
    give(device_times_record(forecast, positions=positions, rows=rows))
    return 0
