"""Completion in bash, zsh and fish, tested by running these shells with the printed script."""

import os
import pathlib
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Sequence

import pytest

from calm_beam.launch import commands
from calm_beam.launch.cli import main
from calm_beam.launch.commands import COMMANDS, flag_parsers
from calm_beam.launch.completion import script
from calm_beam.launch.flags.parser import is_listed
from calm_beam.risk.pvalues import P_VALUES

_SHELLS = ("bash", "zsh", "fish")


def _shell(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} here")
    return path


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the scripts of all shells."""
    folder = tmp_path_factory.mktemp("scripts")
    for name in _SHELLS:
        (folder / name).write_text(script(name), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", _SHELLS)
def test_the_script_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the script and nothing else, with status 0."""
    assert main(["completion", name]) == 0
    assert capsys.readouterr() == (script(name), "")


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown shell is named, with status 2."""
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize("name", _SHELLS)
def test_the_shell_takes_the_script(name: str, scripts: pathlib.Path) -> None:
    """The shell finds no error in it."""
    done = subprocess.run([_shell(name), "-n", str(scripts / name)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", _SHELLS)
def test_every_flag_is_in_the_script(name: str) -> None:
    """The script has every flag that the parsers of a command take."""
    text = script(name)
    for command in COMMANDS:
        for parser in flag_parsers(command):
            for action in filter(is_listed, parser._actions):
                flag = action.option_strings[-1] if action.option_strings else ""
                assert (f"-l {flag[2:]} " if name == "fish" and flag else flag) in text


_COMPLETE_IN_BASH = (
    'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _calm_beam; printf "%s\n" "${COMPREPLY[@]}"'
)


def _bash(scripts: pathlib.Path, *words: str, cwd: pathlib.Path | None = None) -> list[str]:
    """Returns bash's completions, given the words as its line editor divides them."""
    command = [_shell("bash"), "--norc", "-c", _COMPLETE_IN_BASH, str(scripts / "bash"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=cwd)
    assert done.stderr == ""
    return sorted(done.stdout.split("\n")[:-1])


def _fish(scripts: pathlib.Path, line: str, cwd: pathlib.Path | None = None) -> list[str]:
    """Returns fish's completions of a line, without the descriptions."""
    command = [_shell("fish"), "--no-config", "-c", f"source {scripts / 'fish'}; complete -C '{line}'"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=cwd)
    return sorted(found.partition("\t")[0] for found in done.stdout.splitlines())


_STARTING_WITH_HOEFFDING = sorted(name for name in P_VALUES if name.startswith("hoeff"))


def test_bash_completes_commands_flags_and_values(scripts: pathlib.Path) -> None:
    """Bash completes commands, flags and values in every position, also where = is a word of its own, as in bash."""
    assert _bash(scripts, "calm-beam", "c") == ["calibrate", "certify", "completion", "convert"]
    assert _bash(scripts, "calm-beam", "calibrate", "--p_") == ["--p_value="]
    assert _bash(scripts, "calm-beam", "calibrate", "--overw") == ["--overwrite"]
    assert len(_STARTING_WITH_HOEFFDING) > 1
    for words in (["--p_value", "=", "hoeff"], ["--p_value", "hoeff"]):
        assert _bash(scripts, "calm-beam", "calibrate", *words) == _STARTING_WITH_HOEFFDING
    assert _bash(scripts, "calm-beam", "calibrate", "--p_value", "=") == sorted(P_VALUES)
    assert _bash(scripts, "calm-beam", "calibrate", "--p_value=hoeff") == [
        f"--p_value={name}" for name in _STARTING_WITH_HOEFFDING
    ]
    assert _bash(scripts, "calm-beam", "completion", "f") == ["fish"]
    # Numbers are not completed, nor values of unknown flags.
    assert _bash(scripts, "calm-beam", "calibrate", "--delta", "=") == [""]
    assert _bash(scripts, "calm-beam", "nothing", "--p_") == [""]


def test_bash_completes_files(scripts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Where a path is asked for, files are offered, those with spaces in one piece."""
    for name in ("rows 1.jsonl", "rows 2.jsonl", "other"):
        (tmp_path / name).touch()
    expected = ["rows 1.jsonl", "rows 2.jsonl"]
    assert _bash(scripts, "calm-beam", "calibrate", "--data", "=", "ro", cwd=tmp_path) == expected
    assert _bash(scripts, "calm-beam", "inspect", "ro", cwd=tmp_path) == expected


def test_fish_completes_commands_flags_values_and_files(scripts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Fish completes commands, flags, values and files in every position."""
    (tmp_path / "rows.jsonl").touch()
    assert _fish(scripts, "calm-beam c") == ["calibrate", "certify", "completion", "convert"]
    assert _fish(scripts, "calm-beam calibrate --p_") == ["--p_value"]
    assert _fish(scripts, "calm-beam calibrate --p_value=hoeff") == [
        f"--p_value={name}" for name in _STARTING_WITH_HOEFFDING
    ]
    assert _fish(scripts, "calm-beam completion f") == ["fish"]
    assert _fish(scripts, "calm-beam calibrate --data=ro", cwd=tmp_path) == ["--data=rows.jsonl"]
    assert _fish(scripts, "calm-beam inspect ro", cwd=tmp_path) == ["rows.jsonl"]


_START = {
    "bash": (["--norc", "--noprofile", "-i"], "source {path}\n"),
    "zsh": (["-f", "-i"], "autoload -Uz compinit; compinit -u -D; source {path}\n"),
}


@pytest.mark.parametrize("name", _START)
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("calm-beam calib\t", "calm-beam calibrate "),
        ("calm-beam calibrate --p_v\t", "--p_value="),
        ("calm-beam calibrate --procedure=bon\t", "--procedure=bonferroni"),
        ("calm-beam inspect row\t", "inspect rows.jsonl"),
        ("calm-beam verify --data=row\t", "--data=rows.jsonl"),
    ],
)
def test_the_tab_key(name: str, typed: str, completed: str, scripts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """At a terminal, the tab key completes what was typed."""
    (tmp_path / "rows.jsonl").touch()
    flags, first = _START[name]
    shown = _at_a_terminal([_shell(name), *flags], [first.format(path=scripts / name), typed], completed, cwd=tmp_path)
    assert completed in shown


def _at_a_terminal(command: list[str], typed: Sequence[str], awaited: str, *, cwd: pathlib.Path) -> str:
    """Returns what a shell shows when lines are typed, up to the awaited text."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(cwd)
        os.execve(command[0], command, {**os.environ, "TERM": "dumb", "PS1": "$ ", "HOME": str(cwd), "COLUMNS": "200"})
    shown = ""
    deadline = time.monotonic() + 60
    try:
        for text in typed:
            # A shell that still reads its settings would echo what is typed without completing it.
            mark = f"ready{len(shown)}"
            os.write(terminal, f"echo {mark[:5]}''{mark[5:]}\n".encode())
            shown += _read(terminal, mark, deadline=deadline)
            os.write(terminal, text.encode())
        return _read(terminal, awaited, deadline=deadline)
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def _read(terminal: int, awaited: str, *, deadline: float) -> str:
    """Returns what is shown up to the awaited text, or all of it when time is over."""
    shown = b""
    while awaited.encode() not in shown and time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], 1)
        if ready:
            shown += os.read(terminal, 4096)
    return shown.decode(errors="replace")


def test_commands_that_are_not_here_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of calm-beam-serving has only the commands that this package holds."""
    known = commands.command_module

    def without_training(command: str) -> object:
        if command == "train":
            raise ModuleNotFoundError("No module named 'optax'", name="optax")
        return known(command)

    monkeypatch.setattr(commands, "command_module", without_training)
    assert "--muon_learning_rate" not in script("bash")
    assert "--selection_share" in script("bash")
