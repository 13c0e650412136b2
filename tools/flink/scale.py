"""Measures how the pipeline itself scales: thousands of prompts through a decoder that answers at once.

    python -m tools.flink.scale --prompts=10000,100000

Every number of prompts is swept and certified in one process and on a cluster of two TaskManagers, and the files are
compared. Prints seconds, the bytes that Flink moved between its tasks, and the peak memory of each part.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from .checks import Checks
from .cluster import Cluster, running_cluster
from .files import EngineError, Engines

_COMMAND = "certify"
# A fixed number of prompts per shard keeps a worker's memory the same.
_PROMPTS_PER_SHARD = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns 1 if files differ, or an engine is not available."""
    parser = argparse.ArgumentParser(prog="python -m tools.flink.scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", default="build/flink-scale", help="folder of what runs write, and of their logs")
    parser.add_argument("--prompts", default="10000,100000", help="how many, comma-separated")
    flags = parser.parse_args(argv)
    is_equal = True
    try:
        for prompts in map(int, flags.prompts.split(",")):
            checks = Checks(pathlib.Path(flags.output).absolute() / str(prompts), examples=prompts)
            shards = f"--num-shards={max(2, prompts // _PROMPTS_PER_SHARD)}"
            one = checks.run(_COMMAND, runner="one process", flags=(shards,))
            print(f"{prompts:,} prompts, one process: {one.in_words}", flush=True)
            with running_cluster(Engines.here()) as cluster:
                outcome = checks.run(_COMMAND, runner="flink", flags=(shards, *cluster.flags))
                moved, memory = _bytes_moved(cluster), cluster.peak_memory()
            held = ", ".join(f"{name} {peak / 2**20:.0f} MiB" for name, peak in memory.items())
            print(f"{prompts:,} prompts, Flink: {outcome.in_words}; {moved / 2**20:.0f} MiB moved; {held}", flush=True)
            is_equal &= not (one.status or outcome.status or outcome.differing)
    except EngineError as error:
        print(f"scale: {error}", file=sys.stderr)
        return 1
    return int(not is_equal)


def _bytes_moved(cluster: Cluster) -> int:
    """Returns the number of bytes that the tasks of all jobs have sent to others."""
    jobs = (job["jid"] for job in cluster.answer("jobs/overview")["jobs"])
    return sum(step["metrics"]["write-bytes"] for job in jobs for step in cluster.answer(f"jobs/{job}")["vertices"])


if __name__ == "__main__":
    sys.exit(main())
