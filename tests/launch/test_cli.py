"""The command line as a whole: help, version, commands."""

import pathlib
import re
import subprocess
import sys

import pytest

import calm_beam
from calm_beam.decoding.isolation import DecodeError
from calm_beam.launch.cli import main
from calm_beam.launch.flags import UsageError
from calm_beam.manifest import ManifestError, write_manifest
from tests.calm_beam.manifest.builders import build_manifest

# One flag of each command.
_COMMANDS = {
    "calibrate": "--checkpoint",
    "certify": "--candidates",
    "completion": "SHELL",
    "convert": "--layout",
    "decode": "--checkpoint",
    "doctor": "--json",
    "evaluate": "--experiment",
    "generate": "--show_layers",
    "inspect": "--checkpoint",
    "monitor": "--losses",
    "plan": "--risk_guess",
    "report": "--calibration",
    "serve": "--max_waiting",
    "suitability": "--checkpoint",
    "train": "--checkpoint",
    "verify": "--manifest",
}


@pytest.mark.parametrize("argument", ["-h", "--help", "help"])
def test_help_lists_all_commands(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Help goes to stdout, names every command, and is no error."""
    assert main([argument]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("usage: calm-beam COMMAND [flags]")
    for command in _COMMANDS:
        assert re.search(rf"^  {command} +\w", printed.out, re.MULTILINE)


def test_no_command_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command, the usage is shown with status 2, on stderr: stdout is for results."""
    assert main([]) == 2
    printed = capsys.readouterr()
    assert "usage: calm-beam COMMAND [flags]" in printed.err
    assert printed.out == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is printed alone."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{calm_beam.__version__}\n"


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("calibrat", " Did you mean calibrate?"),
        ("Verify", " Did you mean verify?"),
        ("--data=x", ""),
        ("launch.cli", ""),
        ("", ""),
    ],
)
def test_unknown_command(command: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown command has status 2; it is named, with the nearest known one, and the known ones are listed."""
    assert main([command]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"calm-beam: unknown command {command!r}.{hint}\n")
    assert all(known in printed.err for known in _COMMANDS)


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command describes itself and its flags on stdout, and its status is 0."""
    try:
        status = main([command, "--help"])
    except SystemExit as ended:
        # argparse ends the process itself once it has printed help.
        status = int(ended.code or 0)
    assert status == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: calm-beam {command}")
    assert _COMMANDS[command] in printed.out
    assert printed.err == ""


def test_arguments_of_the_process_are_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without arguments, those of the process are taken."""
    monkeypatch.setattr(sys, "argv", ["calm-beam", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"{calm_beam.__version__}\n"


def test_entry_point_hands_the_status_to_the_shell() -> None:
    """The installed command ends with main's status, and warns of nothing on its own."""
    code = "from calm_beam.launch.cli import entry_point; entry_point()"
    done = subprocess.run(
        [sys.executable, "-c", code, "nothing"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith("calm-beam: unknown command 'nothing'.")


def test_a_command_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where Beam is not installed, as in an image that serves, a command that needs it says so, with status 1."""
    for name in list(sys.modules):
        if name.startswith(("calm_beam.launch.decode", "apache_beam")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    assert main(["decode"]) == 1
    assert capsys.readouterr().err == (
        "calm-beam decode: there is no apache_beam here. calm-beam-serving does without what calibrating and training "
        "need: pip install calm-beam.\n"
    )


def test_ctrl_c_has_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupted command ends with status 130 and one line, not with a traceback."""

    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("calm_beam.launch.inspect.main", interrupted)
    assert main(["inspect", "anything"]) == 130
    assert capsys.readouterr().err == "calm-beam inspect: interrupted; nothing was written.\n"


def test_termination_is_an_interrupt() -> None:
    """SIGTERM, with which schedulers end a job, ends a command as Ctrl-C does, so that it can clean up."""
    script = (
        "import os, signal, sys\n"
        "from calm_beam.launch import cli, inspect\n"
        "inspect.main = lambda argv: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.argv = ['calm-beam', 'inspect']\n"
        "cli.entry_point()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130
    assert done.stderr == "calm-beam inspect: interrupted; nothing was written.\n"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UsageError("--a: bad."), 2, "--a: bad."),
        (ManifestError("m.json: bad."), 1, "m.json: bad."),
        (DecodeError("example x: bad."), 1, "example x: bad."),
        (FileNotFoundError(2, "No such file", "/x"), 1, "/x: no such file."),
        (MemoryError(), 1, "memory ran out. Lower --batch_size, --max_cache_tokens or the number of workers."),
        (RecursionError("too deep"), 1, "something that was read is nested too deeply (too deep)."),
    ],
)
def test_no_error_is_a_traceback(
    error: Exception,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Our own, file, memory and recursion errors end a command with one line that names the command."""

    def failing(argv: object) -> int:
        raise error

    monkeypatch.setattr("calm_beam.launch.inspect.main", failing)
    assert main(["inspect", "anything"]) == status
    assert capsys.readouterr() == ("", f"calm-beam inspect: {message}\n")


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error keeps its traceback (the twin)."""

    def failing(argv: object) -> int:
        raise KeyError("defect")

    monkeypatch.setattr("calm_beam.launch.inspect.main", failing)
    with pytest.raises(KeyError, match="defect"):
        main(["inspect", "anything"])


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("argv", [["inspect", "MANIFEST"], ["plan", "--delta=0.1", "--risk_guess=0.01"]])
def test_an_output_that_cannot_be_written_is_told_once(argv: list[str], tmp_path: pathlib.Path) -> None:
    """If standard output is full, the command says so in one line with status 1, and Python adds nothing."""
    write_manifest(build_manifest(), tmp_path / "manifest.json")
    command = [sys.executable, "-m", "calm_beam.launch.cli", *(str(tmp_path) if a == "MANIFEST" else a for a in argv)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.stderr == "calm-beam: standard output cannot be written: No space left on device.\n"
    assert done.returncode == 1


@pytest.mark.parametrize("text", ["caf\udce9", "\udcff" * 1000, "a\0b", "\ud800"])
@pytest.mark.parametrize("command", _COMMANDS)
def test_arguments_are_text(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that are not UTF-8, which Python decodes to surrogates, and NUL are refused in every flag and name."""
    for argument in (f"--task_prefix={text}", f"--output={text}", f"--{text}", text):
        assert main([command, argument]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"calm-beam {command}: ")
        assert "is not UTF-8 text, or holds a NUL character." in line
        line.encode()
    assert len(line) < 400
