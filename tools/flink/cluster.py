"""A Flink session cluster on this machine's loopback interface, with Beam's job server and a worker pool.

The cluster restarts a failed task: another TaskManager takes over the work of a dead one, or the same one after its
restart.
"""

import contextlib
import pathlib
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

from .files import EngineError, Engines
from .local_cluster import HOST, JOB_SERVER, LocalCluster, running

JOB_MANAGER = "job-manager"
_ENDED = ("FINISHED", "CANCELED", "FAILED")
_CANCEL_SECONDS = 120.0
_SHARED = {
    "jobmanager.rpc.address": HOST,
    "jobmanager.bind-host": HOST,
    "rest.address": HOST,
    "rest.bind-address": HOST,
    "taskmanager.host": HOST,
    "taskmanager.bind-host": HOST,
    # Every job uploads its jars, which by default stay for an hour.
    "blob.service.cleanup.interval": "30",
    # Beam's classes come from the cluster's jars: with a job's own classes, Beam ends all workers after each step.
    "classloader.resolve-order": "parent-first",
    "heartbeat.timeout": "20000",
    "heartbeat.interval": "5000",
}
_JOB_MANAGER = {
    "restart-strategy.type": "fixed-delay",
    # Longer than it takes to detect a lost TaskManager, and than dead workers are kept for the next attempt.
    "restart-strategy.fixed-delay.delay": "15 s",
}
# All memory options of a TaskManager: without Flink's scripts, each must be set.
_TASK_MANAGER = {
    "taskmanager.cpu.cores": "1",
    "taskmanager.numberOfTaskSlots": "1",
    "taskmanager.memory.framework.heap.size": "128m",
    "taskmanager.memory.framework.off-heap.size": "64m",
    "taskmanager.memory.task.heap.size": "384m",
    "taskmanager.memory.task.off-heap.size": "64m",
    "taskmanager.memory.network.min": "128m",
    "taskmanager.memory.network.max": "128m",
    # With the default of 512, a few concurrent shuffles take all of the memory above, and the next task fails.
    "taskmanager.network.sort-shuffle.min-buffers": "64",
    "taskmanager.memory.managed.size": "128m",
    "taskmanager.memory.jvm-metaspace.size": "256m",
    "taskmanager.memory.jvm-overhead.min": "64m",
    "taskmanager.memory.jvm-overhead.max": "64m",
}


class Cluster(LocalCluster):
    """One JobManager, TaskManagers with a slot each, a job server and a worker pool."""

    def __init__(self, engines: Engines, folder: pathlib.Path, *, task_managers: int = 2, tries: int = 4) -> None:
        """Chooses ports and starts nothing. A failed task is retried `tries` times."""
        members = [f"task-manager-{number}" for number in range(1, task_managers + 1)]
        super().__init__(folder, coordinator=JOB_MANAGER, members=members)
        self._tries = tries
        self._engines = engines
        (folder / "conf").mkdir()
        (folder / "conf" / "config.yaml").touch()

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags for running a command here."""
        return ("--runner=FlinkRunner", *super().flags, f"--parallelism={len(self._members)}")

    def running_jobs(self) -> tuple[str, ...]:
        """Returns Flink's ids of the jobs that have not ended.

        Raises:
          OSError: If the JobManager does not answer.
        """
        jobs = self.answer("jobs/overview")["jobs"]
        return tuple(job["jid"] for job in jobs if job["state"] not in _ENDED)

    def cancel_jobs(self) -> None:
        """Cancels all jobs that have not ended, and waits for their ends.

        Raises:
          EngineError: If one does not end.
        """
        end = time.monotonic() + _CANCEL_SECONDS
        while time.monotonic() < end:
            # A busy JobManager answers late.
            with contextlib.suppress(OSError):
                jobs = self.running_jobs()
                if not jobs:
                    return
                for job in jobs:
                    request = urllib.request.Request(f"http://{HOST}:{self._rest}/jobs/{job}", method="PATCH")
                    urllib.request.urlopen(request, timeout=5).close()
            time.sleep(1)
        raise EngineError(f"a job does not end; logs are in {self.folder}")

    def _engine_command(self, name: str) -> Sequence[str]:
        # Flink's jars first: its logger is the older one, for which it has a bridge.
        java = self._java(*self._engines.jars("flink"), *self._engines.jars("beam"))
        if name == JOB_SERVER:
            where = f"--flink-master=http://{HOST}:{self._rest}"
            return [*java, f"{_BEAM}.FlinkJobServerDriver", *self._job_server_flags, where]
        entry = f"{_FLINK}.entrypoint.StandaloneSessionClusterEntrypoint"
        settings: Mapping[str, str] = {**_JOB_MANAGER, "restart-strategy.fixed-delay.attempts": str(self._tries)}
        if name != JOB_MANAGER:
            entry, settings = f"{_FLINK}.taskexecutor.TaskManagerRunner", _TASK_MANAGER
        settings = {
            **_SHARED,
            **settings,
            "jobmanager.rpc.port": str(self._rpc),
            "rest.port": str(self._rest),
            "io.tmp.dirs": str(self.folder / "tmp"),
        }
        given = tuple(word for key, value in settings.items() for word in ("-D", f"{key}={value}"))
        return [*java, entry, "--configDir", str(self.folder / "conf"), *given]

    def _registered(self) -> int:
        return int(self.answer("overview")["taskmanagers"])


_FLINK = "org.apache.flink.runtime"
_BEAM = "org.apache.beam.runners.flink"


@contextlib.contextmanager
def running_cluster(engines: Engines, *, task_managers: int = 2, tries: int = 4) -> Iterator[Cluster]:
    """Gives a running cluster, and stops it when the block ends, also after an error.

    Raises:
      EngineError: If a jar is missing, or if it does not start; its logs are then kept.
    """
    engines.require("flink")
    with running(lambda folder: Cluster(engines, folder, task_managers=task_managers, tries=tries)) as cluster:
        yield cluster
