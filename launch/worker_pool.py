"""A worker pool that starts workers as processes of this machine, and answers to this machine alone.

    python -m calm_beam.launch.worker_pool --port=50000

Beam's own pool starts a process for whoever reaches its port, from any machine.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

import grpc
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer

from .runners.loopback import OpenPortError, listen_on_loopback, port_number, require_loopback


def start_worker_pool(port: int = 0) -> tuple[str, grpc.Server]:
    """Starts a pool in this process; returns its address and its server, to be stopped.

    Args:
      port: To listen at; 0 for a free one.

    Raises:
      OpenPortError: If it could be reached from other machines.
    """
    listen_on_loopback()
    address, server = BeamFnExternalWorkerPoolServicer.start(use_process=True, port=port)
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
