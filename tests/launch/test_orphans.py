"""Workers whose runner was killed end with one line."""

import os
import signal
import subprocess
import sys
import time

import pytest

from calm_beam.launch.runners.worker_processes import SPEAKS

# gRPC's threads fail so once their connection is closed.
_WORKER = """
import sys, threading, time
from calm_beam.launch.runners.worker_processes import end_with_the_runner
end_with_the_runner()
print("a warning", file=sys.stderr)
print("started", flush=True)
sys.stdin.read()
def fail():
    raise RuntimeError("the stream was removed")
for _ in range(20):
    threading.Thread(target=fail).start()
time.sleep(60)
"""
_RUNNER = f"""
import os, subprocess, sys
for speaks in ("1", ""):
    worker = subprocess.Popen(
        [sys.executable, "-c", {_WORKER!r}], env={{**os.environ, {SPEAKS!r}: speaks}}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    worker.stdout.readline()
print("both", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_workers_of_a_killed_runner_leave_one_line() -> None:
    """Workers of a killed runner print one line about it after their earlier output, and no traceback."""
    runner = subprocess.Popen(
        [sys.executable, "-c", _RUNNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert runner.stdout is not None
    assert runner.stdout.readline() == "both\n"
    os.kill(runner.pid, signal.SIGKILL)
    start = time.monotonic()
    # The read ends once all processes that hold the pipe have ended.
    said = runner.communicate(timeout=50)[1].splitlines()
    assert time.monotonic() - start < 50
    assert said[:2] == ["a warning", "a warning"]
    (line,) = said[2:]
    assert line.startswith("calm-beam: the command was killed, and its workers end.")
