"""How good the forecast of `calm-beam plan` is: a pilot, and the time of a run several times its size on one machine.

    python -m benchmarks.plan_accuracy --checkpoint=model/ --data=calibration.jsonl.gz --pilot=250 --times=8

Pilot and run have different examples of the file. Each is the whole command `calm-beam calibrate`, in processes of its
own; with several workers, these are processes of this machine that share its cores. A run before the pilot leaves
compiled code, so that neither compiles more than the other. All are run several times, in turns.
"""

import argparse
import dataclasses
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from calm_beam.evaluation.cost import Cost, Job, forecast
from calm_beam.evaluation.pilot import read_pilot
from calm_beam.inputs.demo import embedded
from calm_beam.inputs.examples import numbered_lines
from calm_beam.outputs import DecodeJob
from calm_beam.outputs.folder import SweepHome

from .machine import describe_machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Folders:
    """Where everything is: the data of pilot and run, and the outputs."""

    pilot: pathlib.Path
    run: pathlib.Path
    output: pathlib.Path


def main(argv: Sequence[str] | None = None) -> None:
    """Prints what was forecast and what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", default=str(embedded.MODEL))
    parser.add_argument("--data", default=str(embedded.CALIBRATION_SET), help="JSONL")
    parser.add_argument("--pilot", type=int, default=100, help="examples of the pilot")
    parser.add_argument("--times", type=int, default=8, help="examples of the run, in those of the pilot")
    parser.add_argument("--workers", default="1,2", help="numbers of worker processes, comma-separated")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="further flags of calm-beam calibrate, after --")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="calm-beam-") as folder:
        _measure(flags, pathlib.Path(folder))


def _measure(flags: argparse.Namespace, folder: pathlib.Path) -> None:
    paths = _Folders(pilot=folder / "pilot.jsonl", run=folder / "run.jsonl", output=folder / "out")
    examples = flags.pilot * flags.times
    with open(flags.data, "rb") as raw:
        lines = [line for _, line in itertools.islice(numbered_lines(raw, path=flags.data), flags.pilot + examples)]
    assert len(lines) == flags.pilot + examples, f"{flags.data} has only {len(lines)} examples"
    paths.pilot.write_bytes(b"".join(lines[: flags.pilot]))
    paths.run.write_bytes(b"".join(lines[flags.pilot :]))
    workers = [int(count) for count in flags.workers.split(",")]
    print(describe_machine())
    for count in workers:
        _calibrate(paths.run, paths.output, workers=count, flags=flags)
    forecasts: dict[int, list[Cost]] = {count: [] for count in workers}
    seconds: dict[int, list[float]] = {count: [] for count in workers}
    for _ in range(flags.rounds):
        _calibrate(paths.pilot, paths.output, workers=1, flags=flags)
        pilot = read_pilot(str(paths.output)).pilot
        for count in workers:
            seconds[count].append(_calibrate(paths.run, paths.output, workers=count, flags=flags))
            shards = DecodeJob.read(SweepHome(str(paths.output)).only_folder()).num_shards
            job = Job(examples=examples, workers=count, num_shards=shards, workers_per_machine=count)
            forecasts[count].append(forecast(pilot, job))
            expected = forecasts[count][-1].seconds
            print(
                f"{count} workers: forecast {expected.value:.1f} s ({expected.low:.1f} to {expected.high:.1f}), "
                f"measured {seconds[count][-1]:.1f} s; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    print(f"pilot of {flags.pilot}, run of {examples}; medians of {flags.rounds}")
    for count in workers:
        expected_seconds = statistics.median(cost.seconds.value for cost in forecasts[count])
        measured = statistics.median(seconds[count])
        print(
            f"{count:>3} workers: forecast {expected_seconds:.1f} s, measured {measured:.1f} s, "
            f"{expected_seconds / measured - 1:+.0%}"
        )


def _calibrate(data: pathlib.Path, output: pathlib.Path, *, workers: int, flags: argparse.Namespace) -> float:
    """Returns the seconds of the whole command."""
    command = [
        *(sys.executable, "-m", "calm_beam.launch.cli", "calibrate"),
        *(f"--checkpoint={flags.checkpoint}", f"--data={data}", f"--output={output}", "--overwrite"),
        # A forecast is of one way of exiting.
        "--confidence=softmax",
        *((f"--direct_num_workers={workers}",) if workers > 1 else ()),
        *flags.flags,
    ]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
