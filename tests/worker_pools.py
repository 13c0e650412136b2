"""Worker pools and job services in the process of a test."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from unittest import mock

from calm_beam.launch.job_service import start_job_service
from calm_beam.launch.worker_pool import start_worker_pool

_ROOT = pathlib.Path(__file__).parent.parent


@contextlib.contextmanager
def worker_pool() -> Iterator[str]:
    """Gives the address of a pool that starts workers as children of this process, with this interpreter."""
    # A pool starts the `python` it finds, and workers import modules that tests define.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    packages = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, {"PATH": path, "PYTHONPATH": packages}):
        address, server = start_worker_pool()
        try:
            yield address
        finally:
            server.stop(0)


@contextlib.contextmanager
def flags_of_two_workers(kind: str) -> Iterator[tuple[str, ...]]:
    """Gives the flags for two workers: `processes`, those of a `pool`, or of one behind a `job service`."""
    if kind == "processes":
        yield ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
        return
    with worker_pool() as address:
        external = ("--environment_type=EXTERNAL", f"--environment_config={address}")
        if kind == "pool":
            yield (*external, "--direct_num_workers=2")
            return
        service, port = start_job_service()
        try:
            endpoint = ("--runner=PortableRunner", f"--job_endpoint=localhost:{port}")
            yield (*endpoint, *external, "--sdk_worker_parallelism=2")
        finally:
            service.stop()
