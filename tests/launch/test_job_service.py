"""The job service as a process of its own."""

import signal
import subprocess
import sys

import pytest


@pytest.mark.timeout(120)
def test_it_serves_until_it_is_terminated() -> None:
    """The job service prints its address once it listens, and ends with status 0 on SIGTERM."""
    command = [sys.executable, "-m", "calm_beam.launch.job_service", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("job service at localhost:")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
