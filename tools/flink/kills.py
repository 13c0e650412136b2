"""Runs on a Flink or Spark cluster while parts of it are killed repeatedly.

    python -m tools.flink.kills --kills=10
    python -m tools.flink.kills --kills=10 --engine=spark

SIGKILL hits a TaskManager or Spark's worker, the pool with its workers, the JobManager or Spark's master, or the
launcher, while workers decode: up to 3 seconds after the first finished shard, and then after each further one. A
killed part is restarted after a moment, as a cluster's supervisor does, and a run that ended without a result goes on
with `--resume`. In the end the files must equal those of an undisturbed run. Prints a line for each part; the exit
status is 1 if files differ, or if a run finished before it was disturbed as often as requested.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from .checks import Checks, differing_files
from .cluster import JOB_MANAGER, running_cluster
from .files import EngineError, Engines
from .local_cluster import POOL, LocalCluster
from .spark import MASTER, running_spark

LAUNCHER = "launcher"
_COMMAND = "calibrate"
# Far more than a run takes: a hanging run is reported as such.
_LONGEST = 1800.0
_SHARDS = "generations/*/*.parquet"
# One prompt at a time, and as many shards as examples: slow enough that kills hit decoding, shard by shard.
_FLAGS = ("--batch_size=1",)
_MOST_SECONDS_AFTER = 3.0
# Tries of a task, enough for all kills of a run.
_TRIES = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Engine:
    """A kind of cluster: how one is run, its coordinator, and one of its members."""

    running: Callable[[], contextlib.AbstractContextManager[LocalCluster]]
    coordinator: str
    member: str

    @property
    def targets(self) -> tuple[str, ...]:
        """All that can be killed."""
        return (self.member, POOL, self.coordinator, LAUNCHER)


_ENGINES = {
    "flink": _Engine(
        running=lambda: running_cluster(Engines.here(), tries=_TRIES), coordinator=JOB_MANAGER, member="task-manager-1"
    ),
    "spark": _Engine(
        running=lambda: running_spark(Engines.here(), tries=_TRIES), coordinator=MASTER, member="worker-1"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Kills as often as flags say; returns 1 if a result differs from that without kills."""
    parser = argparse.ArgumentParser(prog="python -m tools.flink.kills", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", default="build/flink-kills", help="folder of what runs write, and of their logs")
    parser.add_argument("--engine", choices=tuple(_ENGINES), default="flink")
    parser.add_argument("--targets", help="the parts to kill, comma-separated; default: one of each")
    parser.add_argument("--kills", type=int, default=10, help="of each target")
    parser.add_argument("--examples", type=int, default=300, help="enough that ten kills come before the last shard")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(argv)
    engine = _ENGINES[flags.engine]
    checks = Checks(pathlib.Path(flags.output).absolute(), examples=flags.examples)
    words = (*_FLAGS, f"--num_shards={flags.examples}")
    is_good = True
    try:
        checks.run(_COMMAND, runner="one process", flags=words)
        for target in flags.targets.split(",") if flags.targets else engine.targets:
            draw = random.Random(f"{flags.seed} {target}")
            with engine.running() as cluster:
                run = _Disturbed(checks, cluster, target, draw, coordinator=engine.coordinator, flags=words)
                run.kill(flags.kills)
            print(run.in_words(), flush=True)
            is_good &= len(run.kills) == flags.kills and not run.differing()
    except EngineError as error:
        print(f"kills: {error}", file=sys.stderr)
        return 1
    return int(not is_good)


class _Disturbed:
    """A run with kills of one part while shards are decoded.

    Attributes:
      kills: Number of finished shards at each kill.
      resumed: How often it went on with `--resume`.
      is_finished: Whether it reached its end.
    """

    def __init__(
        self,
        checks: Checks,
        cluster: LocalCluster,
        target: str,
        draw: random.Random,
        *,
        coordinator: str,
        flags: Sequence[str],
    ) -> None:
        """Starts nothing yet."""
        self.kills: list[int] = []
        self.resumed = 0
        self.is_finished = False
        self._checks, self._cluster, self._target, self._draw = checks, cluster, target, draw
        self._coordinator = coordinator
        self._flags = flags
        self._output = checks.output(target, runner="kills")
        self._undisturbed = checks.output(_COMMAND, runner="one process")
        self._all_shards = len(list(self._undisturbed.glob(_SHARDS)))

    def kill(self, times: int) -> None:
        """Runs to the end, or until a run hangs; kills as often as requested while something is left to decode."""
        shutil.rmtree(self._output, ignore_errors=True)
        status = self._run(times)
        while status not in (0, None) and self.resumed <= times:
            # A job that lost its launcher may still run and would disturb the next one.
            self._cluster.restart()
            self.resumed += 1
            status = self._run(times, "--resume")
        self.is_finished = status == 0

    def in_words(self) -> str:
        """Returns the outcome as text."""
        at = ", ".join(map(str, self.kills))
        end = "came to its end" if self.is_finished else "did not come to its end"
        files = ", ".join(self.differing())
        return (
            f"{self._target}: killed {len(self.kills)} times, after {at} of {self._all_shards} shards; {end}, "
            f"resumed {self.resumed} times; {f'not equal: {files}' if files else 'equal'}"
        )

    def differing(self) -> tuple[str, ...]:
        """Returns the files that differ from those of an undisturbed run."""
        return differing_files(self._undisturbed, self._output)

    def _run(self, times: int, *flags: str) -> int | None:
        """Returns the exit status of a call; None if it hung."""
        process = self._checks.start(_COMMAND, self._output, (*self._cluster.flags, *self._flags, *flags))
        end, before = time.monotonic() + _LONGEST, self._finished()
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            if len(self.kills) < times and before < self._finished() < self._all_shards:
                time.sleep(self._draw.uniform(0, _MOST_SECONDS_AFTER))
                before = self._finished()
                if before < self._all_shards:
                    self.kills.append(before)
                    self._disturb(process)
        hung = process.poll() is None
        if hung:
            process.kill()
        status = process.wait()
        return None if hung else status

    def _disturb(self, process: subprocess.Popen[bytes]) -> None:
        if self._target == LAUNCHER:
            process.kill()
            process.wait()
        else:
            self._cluster.kill(self._target)
            time.sleep(2)
            self._cluster.start(self._target)

    def _finished(self) -> int:
        return len(list(self._output.glob(_SHARDS)))


if __name__ == "__main__":
    sys.exit(main())
