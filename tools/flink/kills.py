"""Runs on a Flink cluster of which a part is killed.

    python -m tools.flink.kills --kills=10

Killed with SIGKILL are a TaskManager, the pool with its workers, the JobManager, and the launcher, each at a random
moment of the first 20 seconds after the folder of outputs is there: before workers decode, or while they do. A part
that was killed is started again after a moment, as whatever watches over a cluster does. The run has to end by itself,
or with `--resume` on the second call, in what an undisturbed run has written. Prints a line for each kill, and how many
ended by themselves; the exit status is 1 if files differ.
"""

import argparse
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
_BEGUN = "generations/*/decode.json"


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
        checks.run(_COMMAND, runner="one process", flags=())
        with running_cluster(Engines.here()) as cluster:
            for target in flags.targets.split(","):
                outcomes = [_kill(checks, cluster, f"{target}-{n}", seed=flags.seed) for n in range(flags.kills)]
                wrong += sum(bool(differing) for _, _, differing in outcomes)
                alone = sum(status == 0 for status, _, _ in outcomes)
                print(f"{target}: {len(outcomes)} kills, {alone} ended by themselves, {wrong} not equal", flush=True)
    except EngineError as error:
        print(f"kills: {error}", file=sys.stderr)
        return 1
    return int(wrong > 0)


def _kill(checks: Checks, cluster: Cluster, name: str, *, seed: int) -> tuple[int | None, int, tuple[str, ...]]:
    """Returns the exit status of a disturbed run, None if it hung, that of its resumption, and files that differ."""
    output, target = checks.output(name, runner="kills"), name.rpartition("-")[0]
    shutil.rmtree(output, ignore_errors=True)
    process = checks.start(_COMMAND, output, cluster.flags)
    while process.poll() is None and not list(output.glob(_BEGUN)):
        time.sleep(0.05)
    time.sleep(random.Random(f"{seed} {name}").uniform(0, 20))
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
    resumed = 0
    if status != 0:
        # What a job that lost its launcher still does would be in the way of the next.
        for part in (JOB_SERVER, JOB_MANAGER):
            cluster.kill(part)
        cluster.start(JOB_MANAGER, JOB_SERVER)
        resumed = checks.start(_COMMAND, output, (*cluster.flags, "--resume")).wait(_LONGEST)
    differing = differing_files(checks.output(_COMMAND, runner="one process"), output)
    said = f"status {status}, resumed with status {resumed}" if status != 0 else "ended by itself"
    print(f"{name}: killed after {shards} shards; {said}; {', '.join(differing) or 'equal'}", flush=True)
    return status, resumed, differing


if __name__ == "__main__":
    sys.exit(main())
