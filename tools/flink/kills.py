"""Runs on a Flink cluster of which a part is killed.

    python -m tools.flink.kills --kills=10

Killed with SIGKILL are a TaskManager, the pool with its workers, the JobManager, and the launcher, each up to 3 seconds
after the first finished shard of a calibration: while workers decode the others. A part that was killed is started
again after a moment, as whatever watches over a cluster does. The run has to end by itself, or with `--resume` on the
second call, in what an undisturbed run has written. Prints a line for each kill, and how many ended by themselves; the
exit status is 1 if files differ, or if a run had no shard left to decode when it was disturbed.
"""

import argparse
import dataclasses
import pathlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from .checks import Checks, differing_files
from .cluster import JOB_MANAGER, JOB_SERVER, POOL, Cluster, running_cluster
from .files import EngineError, Engines

LAUNCHER = "launcher"
_TARGETS = ("task-manager-1", POOL, JOB_MANAGER, LAUNCHER)
_COMMAND = "calibrate"
# Far more than a run takes: one that hangs is an outcome of its own.
_LONGEST = 600.0
_SHARDS = "generations/*/*.parquet"
_NUM_SHARDS = 10
# One prompt at a time: slow enough that a kill meets decoding, and that shards are finished one by one.
_FLAGS = (f"--num_shards={_NUM_SHARDS}", "--batch_size=1")
_MOST_SECONDS_AFTER = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Kills as often as flags say; returns 1 if something was not as without."""
    parser = argparse.ArgumentParser(prog="python -m tools.flink.kills", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", default="build/flink-kills", help="folder of what runs write, and of their logs")
    parser.add_argument("--targets", default=",".join(_TARGETS), help="what is killed, comma-separated")
    parser.add_argument("--kills", type=int, default=10, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(argv)
    checks = Checks(pathlib.Path(flags.output).absolute())
    wrong = 0
    try:
        checks.run(_COMMAND, runner="one process", flags=_FLAGS)
        with running_cluster(Engines.here()) as cluster:
            for target in flags.targets.split(","):
                kills = [_kill(checks, cluster, f"{target}-{n}", seed=flags.seed) for n in range(flags.kills)]
                alone, unlike = sum(kill.status == 0 for kill in kills), sum(not kill.is_good for kill in kills)
                wrong += unlike
                print(f"{target}: {len(kills)} kills, {alone} ended by themselves, {unlike} not as wanted", flush=True)
    except EngineError as error:
        print(f"kills: {error}", file=sys.stderr)
        return 1
    return int(wrong > 0)


@dataclasses.dataclass(frozen=True)
class _Kill:
    """What became of a run that was disturbed.

    Attributes:
      shards: How many were finished when it was.
      status: Its exit status, None if it hung.
      resumed: That of its resumption; None if none was needed.
      differing: Files that are not those of an undisturbed run.
    """

    shards: int
    status: int | None
    resumed: int | None
    differing: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether it met decoding, and nothing differs."""
        return 0 < self.shards < _NUM_SHARDS and not self.resumed and not self.differing

    @property
    def in_words(self) -> str:
        """What stands in a line."""
        how = "ended by itself" if self.status == 0 else f"status {self.status}, resumed with status {self.resumed}"
        files = f"not equal: {', '.join(self.differing)}" if self.differing else "equal"
        return f"killed after {self.shards} of {_NUM_SHARDS} shards; {how}; {files}"


def _kill(checks: Checks, cluster: Cluster, name: str, *, seed: int) -> _Kill:
    output, target = checks.output(name, runner="kills"), name.rpartition("-")[0]
    shutil.rmtree(output, ignore_errors=True)
    process = checks.start(_COMMAND, output, (*cluster.flags, *_FLAGS))
    while process.poll() is None and not list(output.glob(_SHARDS)):
        time.sleep(0.05)
    time.sleep(random.Random(f"{seed} {name}").uniform(0, _MOST_SECONDS_AFTER))
    shards = len(list(output.glob(_SHARDS)))
    if target == LAUNCHER:
        process.kill()
    else:
        cluster.kill(target)
        time.sleep(2)
        cluster.start(target)
    status: int | None
    try:
        status = process.wait(_LONGEST)
    except subprocess.TimeoutExpired:
        status = None
        process.kill()
    resumed = None
    if status != 0:
        # What a job that lost its launcher still does would be in the way of the next.
        for part in (JOB_SERVER, JOB_MANAGER):
            cluster.kill(part)
        cluster.start(JOB_MANAGER, JOB_SERVER)
        resumed = checks.start(_COMMAND, output, (*cluster.flags, *_FLAGS, "--resume")).wait(_LONGEST)
    kill = _Kill(shards, status, resumed, differing_files(checks.output(_COMMAND, runner="one process"), output))
    print(f"{name}: {kill.in_words}", flush=True)
    return kill


if __name__ == "__main__":
    sys.exit(main())
