"""A worker pool that starts workers as processes of this machine, and answers to this machine alone.

    python -m calm_beam.launch.worker_pool --port=50000

Beam's own pool starts a process for whoever reaches its port, from any machine. It also takes a worker for another
one with the same id, and ends the wrong one: TaskManagers of Flink on one machine number their workers alike.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import grpc
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer

from .runners.loopback import OpenPortError, listen_on_loopback, port_number, require_loopback


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


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is interrupted or terminated."""
    parser = argparse.ArgumentParser(
        prog="python -m calm_beam.launch.worker_pool", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--port", type=port_number, required=True, help="0 for a free one")
    flags = parser.parse_args(argv)
    try:
        address, server = start_worker_pool(flags.port)
    except (OpenPortError, OSError) as error:
        print(f"worker pool: {error}", file=sys.stderr)
        return 1
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    print(f"worker pool at {address}", flush=True)
    ended.wait()
    server.stop(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
