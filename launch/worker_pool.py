"""A worker pool that starts workers as processes of this machine, and answers to this machine alone.

    python -m calm_beam.launch.worker_pool --port=50000

Beam's own pool starts a process for whoever reaches its port, from any machine. It also takes a worker for another
one with the same id, and ends the wrong one: TaskManagers of Flink on one machine number their workers alike.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer

from .runners.loopback import listen_on_loopback, require_loopback, serve_until_ended


class _Pool(BeamFnExternalWorkerPoolServicer):
    """Keeps workers with the same id apart.

    Who stops a worker names its id alone. Of several with that id none is stopped: each ends by itself, once whoever
    had it started closes the connection.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._starting = threading.Lock()

    def StartWorker(self, start_worker_request: Any, unused_context: Any) -> Any:  # noqa: N802
        """Starts a worker; arguments and what is returned are those of Beam."""
        worker, processes = start_worker_request.worker_id, self._worker_processes
        with self._starting:
            for name in [name for name, process in list(processes.items()) if process.poll() is not None]:
                processes.pop(name, None)
            same = [name for name in list(processes) if name.partition(" ")[0] == worker]
            if worker in same:
                self._keep_apart(worker)
            response = super().StartWorker(start_worker_request, unused_context)
            if same:
                self._keep_apart(worker)
        return response

    def _keep_apart(self, worker: str) -> None:
        """Gives a process a name under which nobody stops it, and all are stopped with the pool."""
        process = self._worker_processes.pop(worker, None)
        if process is not None:
            self._worker_processes[f"{worker} {process.pid}"] = process


def start_worker_pool(port: int = 0) -> tuple[str, grpc.Server]:
    """Starts a pool in this process; returns its address and its server, to be stopped.

    Args:
      port: To listen at; 0 for a free one.

    Raises:
      OpenPortError: If it could be reached from other machines.
    """
    listen_on_loopback()
    address, server = _Pool.start(use_process=True, port=port)
    require_loopback([server])
    return address, server


def _start(port: int) -> tuple[str, Callable[[], object]]:
    address, server = start_worker_pool(port)
    return address, lambda: server.stop(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is interrupted or terminated."""
    return serve_until_ended(argv, name="worker pool", doc=__doc__ or "", start=_start)


if __name__ == "__main__":
    sys.exit(main())
