"""A worker pool that starts workers as processes of this machine, and listens on loopback only.

    python -m calm_beam.launch.worker_pool --port=50000

Beam's own pool starts a process for any client that reaches its port, from any machine. It also confuses workers that
have the same id, and ends the wrong one: Flink's TaskManagers on one machine use the same worker ids.

Source: ids are unique within one TaskManager, since https://github.com/apache/beam/pull/8990, and not between several.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer

from .runners.loopback import listen_on_loopback, require_loopback, serve_until_ended


class _Pool(BeamFnExternalWorkerPoolServicer):
    """A pool that keeps workers with the same id separate.

    A request to stop a worker has only its id. If several workers have that id, none is stopped: each ends when the
    client that started it closes the connection.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._starting = threading.Lock()

    def StartWorker(self, start_worker_request: Any, unused_context: Any) -> Any:  # noqa: N802
        """Starts a worker, with Beam's arguments and return value."""
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
        """Renames a process so that no request stops it by its id; it still ends with the pool."""
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
