"""A portable job service that runs jobs on several worker processes.

Beam's own Python job service gives every job one worker, whatever the job asks for. This one starts as many workers as
`--sdk_worker_parallelism` says. On one machine, in three terminals:

    python -m calm_beam.launch.job_service --port=8099
    python -m calm_beam.launch.worker_pool --port=50000

    calm-beam calibrate ... --runner=PortableRunner --job_endpoint=localhost:8099 \
        --environment_type=EXTERNAL --environment_config=localhost:50000 --sdk_worker_parallelism=2

The pool starts the `python` on its PATH. Both listen on loopback only, since they have no authentication.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from apache_beam.options.pipeline_options import PortableOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.local_job_service import BeamJob, LocalJobServicer

from .runners.loopback import require_loopback, serve_until_ended
from .runners.worker_processes import watch_workers


class _Runner(FnApiRunner):
    """A runner that is given the number of workers; Beam's reads it from options that a job service ignores."""

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


def _start(port: int) -> tuple[str, Callable[[], object]]:
    logging.basicConfig(level=logging.ERROR)
    service, port = start_job_service(port)
    return f"localhost:{port}", service.stop


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is interrupted or terminated."""
    return serve_until_ended(argv, name="job service", doc=__doc__ or "", start=_start)


if __name__ == "__main__":
    sys.exit(main())
