"""Checks that every command gives on Flink, Spark and Prism the same files as in one process.

    make flink
    python -m tools.flink --runners=flink --commands=calibrate --examples=200

Fetches missing engines into a cache (`CALM_BEAM_ENGINES`, by default a folder of the user's cache), starts a cluster
on loopback, runs commands on the demo model, compares every file that they write with that of one process, and
stops the cluster. `certify` itself has no pipeline: here it certifies the outputs of a user's decoder from the runner.
Prints a line for each command; the exit status is 1 if files differ.
"""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Iterator, Sequence

from .checks import PROCESSES, Checks, Outcome
from .cluster import running_cluster
from .files import EngineError, Engines
from .spark import running_spark

_RUNNERS = ("one process", "two processes", "flink", "spark", "prism")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the commands that flags select; returns 1 if files differ, or an engine is not available."""
    parser = argparse.ArgumentParser(prog="python -m tools.flink", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", default="build/flink", help="folder of what commands write, and of their logs")
    parser.add_argument("--runners", default="two processes,flink,spark,prism", help=f"of {', '.join(_RUNNERS[1:])}")
    parser.add_argument("--commands", default=",".join(Checks.commands))
    parser.add_argument("--examples", type=int, default=40)
    flags = parser.parse_args(argv)
    checks = Checks(pathlib.Path(flags.output).absolute(), examples=flags.examples)
    outcomes: dict[tuple[str, str], Outcome] = {}
    asked = [command for command in Checks.commands if command in flags.commands.split(",")]
    # `generate` needs the calibration of one process.
    here = [command for command in Checks.commands if command in ("calibrate", *asked)]
    try:
        for runner in ("one process", *flags.runners.split(",")):
            with _flags_of(runner) as words:
                for command in here if runner == "one process" else asked:
                    outcomes[runner, command] = checks.run(command, runner=runner, flags=words)
                    print(f"{runner}, {command}: {outcomes[runner, command].in_words}", flush=True)
    except EngineError as error:
        print(f"flink: {error}", file=sys.stderr)
        return 1
    return int(any(outcome.status or outcome.differing for outcome in outcomes.values()))


@contextlib.contextmanager
def _flags_of(runner: str) -> Iterator[tuple[str, ...]]:
    """Gives the flags for running a command on a runner."""
    engines = Engines.here()
    if runner == "flink":
        engines.fetch("flink")
        with running_cluster(engines) as cluster:
            yield cluster.flags
    elif runner == "spark":
        engines.fetch("spark")
        with running_spark(engines) as spark:
            yield spark.flags
    elif runner == "prism":
        engines.fetch_prism()
        yield "--runner=PrismRunner", f"--prism_location={engines.prism}"
    else:
        yield PROCESSES if runner == "two processes" else ()


if __name__ == "__main__":
    sys.exit(main())
