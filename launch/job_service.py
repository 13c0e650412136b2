"""A portable job service that runs jobs on several worker processes.

Beam's own Python job service gives every job one worker, whatever the job asks for; this one gives it as many as
`--sdk_worker_parallelism` says. On one machine, in three terminals:

    python -m calm_beam.launch.job_service --port=8099
    python -m calm_beam.launch.worker_pool --port=50000

    calm-beam calibrate ... --runner=PortableRunner --job_endpoint=localhost:8099 \
        --environment_type=EXTERNAL --environment_config=localhost:50000 --sdk_worker_parallelism=2

The pool starts the `python` on its PATH. Both answer to this machine alone: they ask nobody for a password.
"""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from apache_beam.options.pipeline_options import PortableOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.local_job_service import BeamJob, LocalJobServicer

from .runners.loopback import OpenPortError, port_number, require_loopback
from .runners.worker_processes import watch_workers


class _Runner(FnApiRunner):
    """Takes the number of workers, which Beam's reads from options that a job service does not look at."""

    def __init__(self, *, num_workers: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._num_workers = num_workers


class _Job(BeamJob):
    """A job on as many workers as its options ask for."""

    def _invoke_runner(self) -> Any:
        workers = int(self.pipeline_options().view_as(PortableOptions).sdk_worker_parallelism or 1)
        runner = _Runner(num_workers=workers, provision_info=self._provision_info)
        return runner.run_via_runner_api(self._pipeline_proto, self.pipeline_options())


def start_job_service(port: int = 0) -> tuple[LocalJobServicer, int]:
    """Starts a job service in this process; returns it, to be stopped, and its port.

    Args:
      port: To listen at; 0 for a free one.
    """
    watch_workers()
    service = LocalJobServicer(beam_job_type=_Job)
    port = service.start_grpc_server(port)
    require_loopback(vars(service).values())
    return service, port


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is interrupted or terminated."""
    parser = argparse.ArgumentParser(
        prog="python -m calm_beam.launch.job_service", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--port", type=port_number, required=True, help="0 for a free one")
    flags = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    try:
        service, port = start_job_service(flags.port)
    except (OpenPortError, OSError) as error:
        print(f"job service: {error}", file=sys.stderr)
        return 1
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    print(f"job service at localhost:{port}", flush=True)
    ended.wait()
    service.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
