"""Line breaks of printed text, on terminals of several widths and in logs."""

import contextlib
import io
import shlex

import pytest
from rich.cells import cell_len

from calm_beam.launch import cli
from calm_beam.launch.commands import COMMANDS
from calm_beam.launch.terminal import PlainConsole, say, tell, wrapped

_MESSAGE = (
    "calm-beam calibrate: --output /a/long/path/that/is/longer/than/any/line/of/a/narrow/terminal/is/wide/out: holds a "
    "manifest already. Choose another directory, or pass --overwrite."
)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[40, 80, 120])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The columns of the terminal."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


@pytest.mark.parametrize(
    "text", [_MESSAGE, "two lines:\n  an indented one that is long " + "and on " * 30, "漢字 " * 60]
)
def test_terminals_break_at_spaces(width: int, text: str) -> None:
    """Lines fit the terminal unless one word does not, and every word is on one line, unchanged."""
    with contextlib.redirect_stdout(_Terminal()) as out, contextlib.redirect_stderr(_Terminal()) as err:
        say(text)
        tell(text)
        PlainConsole(stderr=True).say(text)
    printed = out.getvalue()
    assert printed.split() == text.split()
    for line in printed.splitlines():
        assert cell_len(line.rstrip()) <= width or " " not in line.strip()
    assert err.getvalue() == 2 * printed


def test_logs_keep_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, a message is one line, however long."""
    say(_MESSAGE)
    PlainConsole(stderr=True).say(_MESSAGE)
    assert capsys.readouterr().err == f"{_MESSAGE}\n{_MESSAGE}\n"


def test_lines_go_on_under_their_indentation() -> None:
    """Each line is wrapped by itself with its indentation; inner spaces, and lines that fit, are unchanged."""
    assert wrapped("a b c\n  d  e f\n\n    g", 5) == "a b c\n  d \n  e f\n\n    g"
    assert wrapped("", 5) == ""
    assert wrapped("      ", 3) == "      "


def test_commands_run_as_pasted(width: int) -> None:
    """A command is broken between words of the shell alone, with a backslash, so that a shell reads the same words."""
    words = [
        "calm-beam",
        "generate",
        "--manifest=my run/calibration",
        "--prompt=Who isn't 'here' \\\\ now?  Two  spaces",
    ]
    words += [f"--flag_{index}=value" for index in range(8)]
    with contextlib.redirect_stdout(_Terminal()) as out:
        tell(f"Next:\n  {shlex.join(words)}\n  calm-beam inspect out")
    first, *lines = out.getvalue().splitlines()
    assert first == "Next:"
    assert max(map(len, lines)) <= width or max(map(len, words)) + 10 > width
    assert [shlex.split(line) for line in "\n".join(lines).replace("\\\n", "").splitlines()] == [
        words,
        ["calm-beam", "inspect", "out"],
    ]


def test_the_usage_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """No line of the list of commands is wider than 80 columns, and each command is in it."""
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "} == set(COMMANDS)
