"""How interrupted commands end."""

import subprocess
import sys

import pytest

from calm_beam.launch.terminal.interrupts import Interrupts

# XLA behaves so when a process ends while it compiles: a thread works on objects that the exit destroys.
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
    """An interrupted process calls libraries' exit handlers and flushes output, but keeps objects in use by threads."""
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
    """Only successful commands end as Python does, since a failed one may leave running threads."""
    done = _run(
        "class Client:\n"
        "    def __del__(self, write=os.write): write(1, b'taken away')\n"
        "client = Client()\n"
        f"inspect.main = lambda argv: {status}\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, printed, "")


def test_an_interrupt_that_was_dropped_comes_again() -> None:
    """A Ctrl-C that meets a callback of C code, which cannot raise, is raised again and not lost."""
    done = _run(
        "class Callback:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "def interrupted(argv):\n"
        "    callback = Callback()\n"
        "    del callback\n"
        # A signal raised by a thread does not end a sleep.
        "    for _ in range(600): time.sleep(0.1)\n"
        "inspect.main = interrupted\n"
    )
    assert done.returncode == 130
    assert done.stderr == "calm-beam inspect: interrupted; nothing was written.\n"


def test_other_dropped_exceptions_are_shown() -> None:
    """Other exceptions in a place that cannot raise are shown as Python shows them."""
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
    """A second Ctrl-C during clean-up prints that clean-up is running; much later, it interrupts again."""
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
