"""Runs with worker processes end however the machine's clock is changed."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import grpc
import pytest
from apache_beam.runners.worker import data_plane

from calm_beam.launch.runners.worker_processes import wait_by_steady_clock

_ROOT = pathlib.Path(__file__).parent.parent.parent

# The clock of every process in a run loses a second per second, or an hour after some seconds.
_CLOCKS = {
    "runs backwards": "2 * start - real()",
    "jumps back": "real() - 3600 * (real() > start + 4)",
}
_CLOCK = """
import time
real, start = time.time, time.time()
time.time = lambda: {now}
"""
_RUN = """
import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from calm_beam.launch.runners import make_runner, run_pipeline
import os, time

def process_id(number):
    time.sleep(3)
    return os.getpid()

options = PipelineOptions(["--direct_num_workers=2", "--direct_running_mode=multi_processing"])
pipeline = beam.Pipeline(runner=make_runner(options), options=options)
_ = pipeline | beam.Create([0, 1]) | beam.Reshuffle() | beam.Map(process_id) | beam.Map(print)
run_pipeline(pipeline)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("clock", _CLOCKS)
def test_two_workers_end(clock: str, tmp_path: pathlib.Path) -> None:
    """Two worker processes finish although the time of day goes back in every process."""
    (tmp_path / "sitecustomize.py").write_text(_CLOCK.format(now=_CLOCKS[clock]))
    path = os.pathsep.join([str(tmp_path), str(_ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2


def test_what_beam_and_grpc_wait_for_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beam's periodic work continues after a jump back, and a wait of gRPC ends."""
    wait_by_steady_clock()
    calls = threading.Semaphore(0)
    thread = data_plane.PeriodicThread(0.01, calls.release)
    thread.daemon = True
    thread.start()
    try:
        assert calls.acquire(timeout=30)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now - 3600)
        for _ in range(3):
            assert calls.acquire(timeout=30)
        with grpc.insecure_channel("127.0.0.1:1") as channel, pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(0.1)
    finally:
        thread.cancel()


def test_modules_see_one_clock() -> None:
    """A second patch changes nothing, and other functions of the time module are Python's."""
    wait_by_steady_clock()
    clock = data_plane.time
    wait_by_steady_clock()
    assert data_plane.time is clock
    assert clock is not time
    assert clock.monotonic is time.monotonic
    assert abs(clock.time() - time.time()) < 60
