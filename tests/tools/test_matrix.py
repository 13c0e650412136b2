"""The test matrix: pairs of Python and versions, and their report."""

import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tools import matrix
from tools.matrix import PYTHONS, Run, in_words, main, pythons, run


def _executable(path: pathlib.Path, status: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {status}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_pythons_that_can_be_started(tmp_path: pathlib.Path) -> None:
    """The shell's Python is taken if it starts, else pyenv's newest; without either it is missing."""
    first = _executable(tmp_path / "bin" / "python3.11", 0)
    _executable(tmp_path / "bin" / "python3.12", 127)
    _executable(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python", 0)
    newest = _executable(tmp_path / "pyenv" / "versions" / "3.12.4" / "bin" / "python", 0)
    environment = {"PATH": str(tmp_path / "bin"), "PYENV_ROOT": str(tmp_path / "pyenv")}
    assert pythons(environment) == {"3.11": first, "3.12": newest}


def _commands(monkeypatch: pytest.MonkeyPatch, statuses: list[int]) -> list[list[str]]:
    """Makes commands end with the given statuses, the last with a line; returns the commands that were run."""
    commands: list[list[str]] = []

    def done(command: list[str], *, stdout: Any, **settings: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        stdout.write(f"=== line {len(commands)} ===\n")
        stdout.flush()
        return subprocess.CompletedProcess(command, statuses[len(commands) - 1])

    monkeypatch.setattr(subprocess, "run", done)
    return commands


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [([0, 0, 0], "passed"), ([0, 0, 1], "failed"), ([0, 2], "not installable"), ([2], "not installable")],
)
def test_a_pair_is_installed_and_tested(
    statuses: list[int], verdict: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment is made, everything is installed at its lowest version, tests run; the first failure ends it."""
    commands = _commands(monkeypatch, statuses)
    found = run("3.12", "lowest", "/python", folder=tmp_path / "x", tests=["tests/a"])
    assert (found.verdict, found.last) == (verdict, f"line {len(statuses)}")
    assert found.is_bad == (verdict != "passed")
    expected = [
        [sys.executable, "-m", "uv", "venv", "--python", "/python", str(tmp_path / "x")],
        ["--resolution=lowest-direct", "--editable"],
        [str(tmp_path / "x" / "bin" / "python"), "pytest", "tests/a"],
    ]
    for command, words in zip(commands, expected, strict=False):
        assert [word for word in command if word in words] == words
    assert len(commands) == len(statuses)


def test_what_is_not_here_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing Python is named as not run, which is neither failure nor success."""
    monkeypatch.setattr(matrix, "pythons", lambda environment: {})
    assert main([f"--output={tmp_path}", "tests"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("") + 1 :]
    assert table == [
        f"Python {python}, {resolution} versions: not run: this Python is not here"
        for python in PYTHONS
        for resolution in ("lowest", "newest")
    ]


def test_a_failure_is_the_status(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failing pair makes the whole fail; pytest's own flags reach it."""
    asked = []

    def failed(python: str, resolution: str, interpreter: Any, *, folder: pathlib.Path, tests: list[str]) -> Run:
        asked.append((python, resolution, tests))
        return Run(python=python, resolution=resolution, verdict="failed", last="1 failed")

    monkeypatch.setattr(matrix, "run", failed)
    assert main([f"--output={tmp_path}", "--python=3.13", "--resolution=newest", "tests", "--ignore=tests/b"]) == 1
    assert asked == [("3.13", "newest", ["tests", "--ignore=tests/b"])]
    assert in_words(Run(python="3.13", resolution="newest", verdict="failed", last="1 failed")) == (
        "Python 3.13, newest versions: failed (1 failed)"
    )
