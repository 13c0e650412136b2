"""A Flink session cluster on this machine's loopback interface, with Beam's job server and a worker pool.

Each part is a separate process that can be killed and restarted, as an operator would. The cluster restarts a failed
task: another TaskManager takes over the work of a dead one, or the same one after its restart.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .files import EngineError, Engines

HOST = "127.0.0.1"
POOL, JOB_SERVER, JOB_MANAGER = "pool", "job-server", "job-manager"
_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_ENDED = ("FINISHED", "CANCELED", "FAILED")
_MEMORY = "512m"
# Flink uses reflection on these; its own scripts open them in the same way.
_OPEN_PACKAGES = (
    *(f"java.{name}" for name in ("io", "lang", "lang.reflect", "net", "nio", "text", "time", "util")),
    *(f"java.util.concurrent{name}" for name in ("", ".atomic", ".locks")),
    "sun.nio.ch",
)
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
_LOG = """rootLogger.level = INFO
rootLogger.appenderRef.console.ref = Console
appender.console.name = Console
appender.console.type = CONSOLE
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %-5p %c{1} %m%n
"""


class Cluster:
    """One JobManager, TaskManagers, a job server and a worker pool.

    Attributes:
      folder: Folder of logs and temporary files.
    """

    def __init__(self, engines: Engines, folder: pathlib.Path, *, task_managers: int = 2, tries: int = 4) -> None:
        """Chooses ports and starts nothing. A failed task is retried `tries` times."""
        self.folder = folder
        self._tries = tries
        self._engines = engines
        self._rest, self._rpc, self._jobs, self._pool = _free_ports(4)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._task_managers = [f"task-manager-{number}" for number in range(1, task_managers + 1)]

    @property
    def task_managers(self) -> tuple[str, ...]:
        """Names of the TaskManagers."""
        return tuple(self._task_managers)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags for running a command here."""
        return (
            "--runner=FlinkRunner",
            f"--job_endpoint=localhost:{self._jobs}",
            "--environment_type=EXTERNAL",
            f"--environment_config=localhost:{self._pool}",
            f"--parallelism={len(self._task_managers)}",
        )

    def start(self, *names: str) -> None:
        """Starts some parts, or all if none is named, and waits until they answer.

        Raises:
          EngineError: If one does not answer.
        """
        (self.folder / "conf").mkdir(parents=True, exist_ok=True)
        (self.folder / "conf" / "config.yaml").touch()
        (self.folder / "log4j.properties").write_text(_LOG, encoding="utf-8")
        for name in names or (JOB_MANAGER, *self._task_managers, JOB_SERVER, POOL):
            with open(self.folder / f"{name}.log", "ab") as log:
                # A separate process group, so that the pool's workers are stopped with it.
                self._processes[name] = subprocess.Popen(
                    self._command(name), stdout=log, stderr=log, env=_environment(), start_new_session=True
                )
        self._wait()

    def kill(self, name: str) -> None:
        """Kills a part and its child processes with SIGKILL."""
        process = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def answer(self, path: str) -> Any:
        """Returns the JobManager's answer for a path of its REST interface.

        Raises:
          OSError: If it does not answer.
        """
        with urllib.request.urlopen(f"http://{HOST}:{self._rest}/{path}", timeout=5) as answer:
            return json.load(answer)

    def running_jobs(self) -> tuple[str, ...]:
        """Returns Flink's ids of the jobs that have not ended."""
        jobs = self.answer("jobs/overview")["jobs"]
        return tuple(job["jid"] for job in jobs if job["state"] not in _ENDED)

    def cancel_jobs(self) -> None:
        """Cancels all jobs that have not ended, and waits for their ends.

        Raises:
          EngineError: If one does not end.
        """
        end = time.monotonic() + _START_SECONDS
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

    def peak_memory(self) -> Mapping[str, int]:
        """Returns the peak memory in bytes of each running part, and of each of the pool's workers."""
        groups = {process.pid: name for name, process in self._processes.items()}
        peaks = {}
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pid = int(folder.name)
                part = groups.get(os.getpgid(pid))
                held = [line for line in (folder / "status").read_text().splitlines() if line.startswith("VmHWM:")]
                if part and held:
                    # VmHWM is in KiB.
                    peaks[part if pid in groups else f"worker {pid}"] = int(held[0].split()[1]) * 1024
        return dict(sorted(peaks.items()))

    def stop(self) -> None:
        """Stops all parts."""
        for process in self._processes.values():
            process.terminate()
        for name, process in list(self._processes.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            self.kill(name)

    def _command(self, name: str) -> Sequence[str]:
        if name == POOL:
            return [sys.executable, "-m", "calm_beam.launch.worker_pool", f"--port={self._pool}"]
        if name == JOB_SERVER:
            ports = (f"--job-host={HOST}", f"--job-port={self._jobs}", "--artifact-port=0", "--expansion-port=-1")
            where = (f"--flink-master=http://{HOST}:{self._rest}", f"--artifacts-dir={self.folder / 'artifacts'}")
            return [*self._java(), f"{_BEAM}.FlinkJobServerDriver", *ports, *where]
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
        return [*self._java(), entry, "--configDir", str(self.folder / "conf"), *given]

    def _java(self) -> list[str]:
        opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPEN_PACKAGES]
        log = f"-Dlog4j.configurationFile=file:{self.folder / 'log4j.properties'}"
        # Flink's jars first: its logger is the older one, for which it has a bridge.
        path = os.pathsep.join(map(str, (*self._engines.flink, *self._engines.job_server)))
        return ["java", f"-Xmx{_MEMORY}", "-XX:+UseSerialGC", *opened, log, "-cp", path]

    def _wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while not self._answers():
            dead = [name for name, process in self._processes.items() if process.poll() is not None]
            if dead or time.monotonic() > end:
                what = f"{dead[0]} ended" if dead else f"no cluster of {len(self._task_managers)} TaskManagers"
                raise EngineError(f"{what}; logs are in {self.folder}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        ports = {JOB_SERVER: self._jobs, POOL: self._pool}
        if not all(_is_open(port) for name, port in ports.items() if name in self._processes):
            return False
        if JOB_MANAGER not in self._processes:
            return True
        running = [name for name in self._task_managers if name in self._processes]
        try:
            return int(self.answer("overview")["taskmanagers"]) >= len(running)
        except (OSError, ValueError):
            return False


_FLINK = "org.apache.flink.runtime"
_BEAM = "org.apache.beam.runners.flink"


@contextlib.contextmanager
def running_cluster(engines: Engines, *, task_managers: int = 2, tries: int = 4) -> Iterator[Cluster]:
    """Gives a running cluster, and stops it when the block ends, also after an error.

    Raises:
      EngineError: If it does not start; its logs are then kept.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="calm-beam-flink-"))
    cluster = Cluster(engines, folder, task_managers=task_managers, tries=tries)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder / "tmp", ignore_errors=True)
    shutil.rmtree(folder)


def _environment() -> dict[str, str]:
    """Returns an environment in which the pool's `python` is this interpreter."""
    return {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def _is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0
