"""Standard streams accept any text, and a closed pipe breaks nothing."""

import io
import os
import subprocess
import sys

import pytest

from calm_beam.launch.terminal.interrupts import StreamError, prepare_streams


def _prepare(monkeypatch: pytest.MonkeyPatch, **streams: io.TextIOWrapper | None) -> None:
    """Prepares the given streams, and ASCII ones for the rest; restores the process's streams after the test."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, streams.get(name, io.TextIOWrapper(io.BytesIO(), "ascii")))
    prepare_streams()


def _broken_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return io.TextIOWrapper(open(writer, "wb"), "utf-8")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_an_ascii_terminal_takes_any_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ASCII stream writes other characters with backslashes, lone surrogates included."""
    _prepare(monkeypatch)
    print("│ été \udcff", file=getattr(sys, name), flush=True)
    assert getattr(sys, name).buffer.getvalue() == b"\\u2502 \\xe9t\\xe9 \\udcff\n"


def test_prompts_in_a_pipe_are_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in a pipe are read as UTF-8 in any locale; invalid bytes are marked, and reading continues."""
    _prepare(monkeypatch, stdin=io.TextIOWrapper(io.BytesIO("été\n".encode() + b"\xff\nlast\n"), "ascii"))
    assert list(sys.stdin) == ["été\n", "\udcff\n", "last\n"]


def test_a_closed_pipe_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write to a closed pipe ends the command with the status of a broken pipe; later ones are dropped."""
    _prepare(monkeypatch, stdout=_broken_pipe())
    with pytest.raises(StreamError) as raised:
        print("text", flush=True)
    assert (raised.value.is_reader_gone, raised.value.status) == (True, 141)
    print("more", flush=True)


def test_a_closed_pipe_of_messages_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed stderr ends nothing: hours of work are worth more than messages about them."""
    _prepare(monkeypatch, stderr=_broken_pipe())
    for _ in range(2):
        print("text", file=sys.stderr, flush=True)


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk under standard output is a clear failure."""
    _prepare(monkeypatch, stdout=open("/dev/full", "w", encoding="utf-8"))  # noqa: SIM115
    with pytest.raises(StreamError, match=r"standard output cannot be written: No space left on device\.") as raised:
        print("text", flush=True)
    assert (raised.value.is_reader_gone, raised.value.status) == (False, 1)


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_streams_that_are_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process started without a stream reads nothing from it and writes nothing."""
    _prepare(monkeypatch, **{name: None})
    assert list(sys.stdin) == []
    print("text", file=getattr(sys, name) if name != "stdin" else sys.stdout, flush=True)


def test_the_command_line_ends_quietly() -> None:
    """Help into a closed pipe has the status of a broken pipe, and no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "calm_beam.launch.cli", "--help"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")
