"""Workers whose runner was killed end with one line."""

import os
import signal
import subprocess
import sys
import time

import pytest

from calm_beam.launch.runners.worker_processes import RUNNER, SPEAKS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")]

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
        [sys.executable, "-c", {_WORKER!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={{**os.environ, {SPEAKS!r}: speaks, {RUNNER!r}: str(os.getpid())}},
    )
    if "early" not in sys.argv:
        worker.stdout.readline()
print("both", flush=True)
sys.stdin.read()
"""


def _said_after_a_kill(*words: str) -> list[str]:
    """Kills a runner with two workers, and returns the lines of their standard error once all have ended."""
    runner = subprocess.Popen(
        [sys.executable, "-c", _RUNNER, *words],
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
    return said


def test_workers_of_a_killed_runner_leave_one_line() -> None:
    """Workers of a killed runner print one line about it after their earlier output, and no traceback."""
    said = _said_after_a_kill()
    assert said[:2] == ["a warning", "a warning"]
    (line,) = said[2:]
    assert line.startswith("calm-beam: the command was killed, and its workers end.")


def test_workers_end_if_the_runner_was_killed_while_they_started() -> None:
    """Workers whose runner is gone before they have imported their modules end as others do."""
    said = _said_after_a_kill("early")
    assert [line for line in said if line != "a warning"] == [
        "calm-beam: the command was killed, and its workers end. What is finished is kept: --resume goes on with it, "
        "where the command has that."
    ]
