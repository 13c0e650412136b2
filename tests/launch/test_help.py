"""`--help` and `--help-all` print few flags or all of them, in groups, with examples that work."""

import argparse
import re
import shlex

import pytest

from calm_beam.launch.cli import main
from calm_beam.launch.commands import COMMANDS, flag_parsers
from calm_beam.launch.flags import FlagParser, UsageError, parse_flags
from calm_beam.launch.flags.parser import examples, is_listed, placeholder, summary
from calm_beam.options.kinds import whole_number

_WIDTHS = (60, 80, 120)


def _shown(flag: str, command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*command, flag])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def _flags(parser: FlagParser) -> set[str]:
    return {
        name for action in filter(is_listed, parser._actions) for name in action.option_strings if name.startswith("--")
    }


def _listed(page: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", page, re.MULTILINE))


@pytest.mark.parametrize("command", COMMANDS)
def test_all_flags_are_in_the_long_help(command: str) -> None:
    """`--help-all` lists every flag of every form of a command, hidden ones too."""
    for parser in flag_parsers(command):
        assert _listed(parser.format_help_all()) == _flags(parser) - {"--help", "--help-all"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_short_help_says_how_many_more_there_are(command: str) -> None:
    """`--help` lists some flags, all required ones among them, and counts the others."""
    for parser in flag_parsers(command):
        short, long = _listed(parser.format_help()), _listed(parser.format_help_all())
        assert short <= long
        assert {name for action in parser._actions if action.required for name in action.option_strings} <= short
        more = re.search(r"^(\d+) more flags: (.*)$", parser.format_help(), re.MULTILINE)
        assert (int(more[1]) if more else 0) == len(long) - len(short)
        assert len(short) <= 16
        assert "more flags:" not in parser.format_help_all()


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_marked_exists(command: str) -> None:
    """Every flag marked for the short help exists."""
    parsers = flag_parsers(command)
    marked = {name for parser in parsers for name in parser._essentials or ()}
    assert marked <= {name for parser in parsers for name in _flags(parser)}


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_are_understood(command: str) -> None:
    """Every command has examples of itself, and the parsers of the command that each names take its flags."""
    found = [line for parser in flag_parsers(command) for _, block in examples(parser._doc) for line in _lines(block)]
    named = []
    for line in found:
        words = shlex.split(line)
        if ">" in words:
            words = words[: words.index(">")]
        assert words[0] == "calm-beam"
        assert _is_taken(words[1], words[2:]), line
        named.append(words[1])
    assert command in named


def _lines(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


def _is_taken(command: str, flags: list[str]) -> bool:
    for parser in flag_parsers(command):
        try:
            parse_flags(parser, flags)
        except UsageError:
            continue
        return True
    return False


def test_a_wrong_example_would_be_seen() -> None:
    """The check above fails for a flag that no parser of the command knows."""
    assert not _is_taken("verify", ["--manifest=calibration", "--no_such_flag=1"])


@pytest.mark.parametrize("width", _WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_pages_keep_to_the_terminal(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is longer than the terminal, and none longer than 100, unless a word is."""
    monkeypatch.setenv("COLUMNS", str(width))
    for parser in flag_parsers(command):
        for page in (parser.format_help(), parser.format_help_all()):
            for line in page.splitlines():
                is_one_word = len(line.rstrip("\\").split()) == 1
                assert len(line) <= min(width, 100) or is_one_word or line.startswith("  --"), line


def test_wrapped_examples_are_the_same_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples wrapped at any terminal width are the same command for a shell."""
    read = []
    for width in _WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        page = flag_parsers("calibrate")[0].format_help()
        read.append([shlex.split(line) for line in _lines(page.partition("examples:")[2]) if "calm-beam cali" in line])
    assert len(read[0]) == 5
    assert read[0] == read[1] == read[2]


def test_groups_without_a_flag_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The short help has no heading with nothing below it; the long one has all groups."""
    short, long = (_shown(flag, ["calibrate"], capsys) for flag in ("--help", "--help-all"))
    assert "Dataflow:" in long
    assert "Dataflow:" not in short
    assert not re.search(r"^\S.*:\n\n", short, re.MULTILINE)


@pytest.mark.parametrize("command", ["calibrate", "evaluate", "plan", "train"])
def test_what_is_printed_is_the_page_of_the_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command prints the help of its first parser, flags about its result included."""
    page = _shown("--help-all", [command], capsys)
    assert page == flag_parsers(command)[0].format_help_all()
    assert "--json" in _listed(page)


def test_h_is_the_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`-h` and `--help` are the same."""
    assert _shown("-h", ["decode"], capsys) == _shown("--help", ["decode"], capsys)


def test_positional_arguments_are_in_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line shows positional arguments before the flags."""
    assert _shown("--help", ["inspect"], capsys).startswith("usage: calm-beam inspect PATH [flags]\n")


def test_defaults_and_choices_are_named_once() -> None:
    """A default is added where the text names none; many choices are listed in the text, few before it."""
    parser = FlagParser(prog="calm-beam test")
    parser.add_argument("--size", type=whole_number(1), default=3, help="how large")
    parser.add_argument("--other", default="x", help="which; default: as the first")
    parser.add_argument("--few", choices=("a", "b"), help="one of two")
    parser.add_argument("--many", choices=("alabaster", "basalt", "chalcedony", "dolomite"), help="a stone")
    page = parser.format_help()
    assert re.search(r"--size=N +how large \(default: 3\)\n", page)
    assert re.search(r"--other=OTHER +which; default: as the first\n", page)
    assert re.search(r"--few=\{a,b\} +one of two\n", page)
    assert re.search(r"--many=MANY +a stone; of alabaster, basalt, chalcedony, dolomite\n", page)


def test_placeholders_say_what_a_value_is() -> None:
    """A given placeholder is kept; otherwise it is chosen by the type, or by the last word of the flag."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    assert placeholder(add("--a", metavar="DIR")) == "DIR"
    assert placeholder(add("--b", type=float)) == "X"
    assert placeholder(add("--task_prefix")) == "PREFIX"


def test_summaries_and_examples_of_a_docstring() -> None:
    """A summary is the first paragraph without the command's name; commands include a paragraph that announces them."""
    doc = "`calm-beam x PATH`: does it,\nwell.\n\nMore.\n\n    calm-beam x\n\nSo:\n\n    calm-beam x \\\n        --y\n"
    assert summary(doc) == "Does it, well."
    assert examples(doc) == (("", "calm-beam x"), ("So:", "calm-beam x \\\n    --y"))
