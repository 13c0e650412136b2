"""A cluster of another engine on this machine's loopback interface, with Beam's job server and a worker pool.

Each part is a separate process that can be killed and restarted, as an operator would.
"""

import abc
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .files import EngineError

HOST = "127.0.0.1"
POOL, JOB_SERVER = "pool", "job-server"
_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_MEMORY = "512m"
# Engines use reflection on these; their own scripts open them in the same way.
_OPEN_PACKAGES = (
    *(f"java.{name}" for name in ("io", "lang", "lang.reflect", "net", "nio", "text", "time", "util")),
    *(f"java.util.concurrent{name}" for name in ("", ".atomic", ".locks")),
    "sun.nio.ch",
)
_LOG = """rootLogger.level = INFO
rootLogger.appenderRef.console.ref = Console
appender.console.name = Console
appender.console.type = CONSOLE
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %-5p %c{1} %m%n
"""


class LocalCluster(abc.ABC):
    """A coordinator, members that register with it, a job server and a worker pool.

    Attributes:
      folder: Folder of logs and temporary files.
    """

    def __init__(self, folder: pathlib.Path, *, coordinator: str, members: Sequence[str]) -> None:
        """Chooses ports and starts nothing."""
        self.folder = folder
        self._coordinator, self._members = coordinator, tuple(members)
        self._rest, self._rpc, self._jobs, self._pool = _free_ports(4)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags for running a command here; each engine adds its own."""
        return (
            f"--job_endpoint=localhost:{self._jobs}",
            "--environment_type=EXTERNAL",
            f"--environment_config=localhost:{self._pool}",
        )

    def start(self, *names: str) -> None:
        """Starts some parts, or all if none is named, and waits until they answer.

        Raises:
          EngineError: If one does not answer.
        """
        self._log_settings.write_text(_LOG, encoding="utf-8")
        for name in names or (self._coordinator, *self._members, JOB_SERVER, POOL):
            with open(self.folder / f"{name}.log", "ab") as log:
                # A separate process group, so that the pool's workers are stopped with it.
                self._processes[name] = subprocess.Popen(
                    self._command(name), stdout=log, stderr=log, env=self._environment(), start_new_session=True
                )
        self._wait()

    def kill(self, name: str) -> None:
        """Kills a part and its child processes with SIGKILL."""
        process = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def restart(self) -> None:
        """Restarts all parts but the pool, so that no earlier job is left, and no member waits for a dead one.

        Raises:
          EngineError: If one does not answer.
        """
        for name in (JOB_SERVER, *self._members, self._coordinator):
            self.kill(name)
        # First, since Spark's workers that find no master try again only after several seconds.
        self.start(self._coordinator)
        self.start(*self._members, JOB_SERVER)

    def answer(self, path: str) -> Any:
        """Returns the coordinator's answer for a path of its HTTP interface.

        Raises:
          OSError: If it does not answer.
        """
        with urllib.request.urlopen(f"http://{HOST}:{self._rest}/{path}", timeout=5) as answer:
            return json.load(answer)

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

    @abc.abstractmethod
    def _engine_command(self, name: str) -> Sequence[str]:
        """Returns the command that starts the coordinator, a member or the job server."""

    @abc.abstractmethod
    def _registered(self) -> int:
        """Returns how many members the coordinator knows; raises `OSError` or `ValueError` if it does not answer."""

    def _environment(self) -> dict[str, str]:
        """Returns an environment in which the pool's `python` is this interpreter."""
        return {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}

    @property
    def _log_settings(self) -> pathlib.Path:
        return self.folder / "log4j.properties"

    @property
    def _job_server_flags(self) -> tuple[str, ...]:
        ports = (f"--job-host={HOST}", f"--job-port={self._jobs}", "--artifact-port=0", "--expansion-port=-1")
        return (*ports, f"--artifacts-dir={self.folder / 'artifacts'}")

    def _java(self, *jars: pathlib.Path) -> list[str]:
        opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPEN_PACKAGES]
        log = f"-Dlog4j.configurationFile=file:{self._log_settings}"
        path = os.pathsep.join(map(str, jars))
        return ["java", f"-Xmx{_MEMORY}", "-XX:+UseSerialGC", *opened, log, "-cp", path]

    def _command(self, name: str) -> Sequence[str]:
        if name == POOL:
            return [sys.executable, "-m", "calm_beam.launch.worker_pool", f"--port={self._pool}"]
        return self._engine_command(name)

    def _wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while not self._answers():
            dead = [name for name, process in self._processes.items() if process.poll() is not None]
            if dead or time.monotonic() > end:
                what = f"{dead[0]} ended" if dead else f"no cluster of {', '.join(self._processes)}"
                raise EngineError(f"{what}; logs are in {self.folder}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        ports = {JOB_SERVER: self._jobs, POOL: self._pool}
        if not all(_is_open(port) for name, port in ports.items() if name in self._processes):
            return False
        if self._coordinator not in self._processes:
            return True
        running = [name for name in self._members if name in self._processes]
        try:
            return self._registered() >= len(running)
        except (OSError, ValueError):
            return False


_Cluster = TypeVar("_Cluster", bound=LocalCluster)


@contextlib.contextmanager
def running(make: Callable[[pathlib.Path], _Cluster]) -> Iterator[_Cluster]:
    """Gives a running cluster, and stops it when the block ends, also after an error.

    Args:
      make: Returns the cluster, given its folder.

    Raises:
      EngineError: If it does not start; its logs are then kept.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="calm-beam-cluster-"))
    cluster = make(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder / "tmp", ignore_errors=True)
    shutil.rmtree(folder)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def _is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0
