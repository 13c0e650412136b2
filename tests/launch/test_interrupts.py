"""How interrupted commands end."""

import subprocess
import sys

import pytest

from calm_beam.launch.terminal.interrupts import Interrupts

# What XLA does when a process ends while it compiles: a thread that works on what the exit takes away.
_START = """
import atexit, os, signal, sys, threading, time
from calm_beam.launch import cli, inspect
sys.argv = ["calm-beam", "inspect"]
print("begun", flush=True)
"""


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"{_START}{script}\ncli.entry_point()"], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_an_interrupted_process_does_not_take_down_its_threads(number: str) -> None:
    """Exit handlers of libraries are called and output is flushed, but nothing that threads may use is taken away."""
    done = _run(
        "class Client:\n"
        "    def __del__(self, write=os.write): write(1, b'taken away')\n"
        "client = Client()\n"
        "def interrupted(argv):\n"
        "    atexit.register(lambda: print('handled'))\n"
        f"    os.kill(os.getpid(), signal.{number})\n"
        "    time.sleep(60)\n"
        "inspect.main = interrupted\n"
    )
    assert done.returncode == 130
    assert done.stdout == "begun\nhandled\n"
    assert done.stderr == "calm-beam inspect: interrupted; nothing was written.\n"


@pytest.mark.parametrize(("status", "printed"), [(0, "begun\ntaken away"), (1, "begun\n")])
def test_only_what_succeeded_ends_as_python_ends(status: int, printed: str) -> None:
    """A command that failed may have threads that go on, one that succeeded has none."""
    done = _run(
        "class Client:\n"
        "    def __del__(self, write=os.write): write(1, b'taken away')\n"
        "client = Client()\n"
        f"inspect.main = lambda argv: {status}\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, printed, "")


def test_an_interrupt_that_was_dropped_comes_again() -> None:
    """Callbacks of C code cannot raise, so that a Ctrl-C that meets one would be lost and the run go on."""
    done = _run(
        "class Callback:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "def interrupted(argv):\n"
        "    callback = Callback()\n"
        "    del callback\n"
        # What a thread asks for does not end a sleep.
        "    for _ in range(600): time.sleep(0.1)\n"
        "inspect.main = interrupted\n"
    )
    assert done.returncode == 130
    assert done.stderr == "calm-beam inspect: interrupted; nothing was written.\n"


def test_other_dropped_exceptions_are_shown() -> None:
    """What else goes wrong in a place that cannot raise is told as Python tells it."""
    done = _run(
        "class Callback:\n"
        "    def __del__(self): raise ValueError('odd')\n"
        "def main(argv):\n"
        "    callback = Callback()\n"
        "    del callback\n"
        "    return 0\n"
        "inspect.main = main\n"
    )
    assert done.returncode == 0
    assert "ValueError: odd" in done.stderr


def test_a_second_interrupt_does_not_break_off_cleaning_up(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever presses Ctrl-C again is told that it is being cleaned up; much later, it counts again."""
    now = 0.0
    interrupts = Interrupts(lambda: now)
    with pytest.raises(KeyboardInterrupt):
        interrupts.take(2, None)
    now = 5.0
    interrupts.take(2, None)
    assert capfd.readouterr().err == "calm-beam: interrupted already, cleaning up\n"
    now = 60.0
    with pytest.raises(KeyboardInterrupt):
        interrupts.take(2, None)
