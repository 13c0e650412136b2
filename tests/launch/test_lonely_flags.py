"""Flags that need another flag are refused without it, in every command."""

import argparse
import dataclasses
import pathlib
import re

import pytest

from calm_beam.launch.cli import main
from calm_beam.launch.commands import COMMANDS, flag_parsers
from calm_beam.launch.flags import UsageError, parsed, request_parser
from calm_beam.options import Options, option, options_of, switch
from calm_beam.options.kinds import texts, whole_number

# Values that flags take; all others take a name.
_VALUES = {
    "--activation": "gelu",
    "--consistency": "risk",
    "--data_format": "text",
    "--direction": "lower",
    "--extra_ids": "3",
    "--max_failures": "3",
    "--objective": "latency",
    "--probe_share": "2%",
    "--relative_max_distance": "64",
    "--stop_gain": "2%",
}
# Flags that a command requires before it checks others.
_NEEDED = {
    "generate": ["--manifest=m.json"],
    "serve": ["--manifest=m.json"],
    "train": ["--output=o"],
    "verify": ["--manifest=m.json"],
}


def _pairs() -> list[tuple[str, str, str]]:
    """Returns every flag with its first partner, by command."""
    return sorted(
        {
            (command, f"--{name}", f"--{declared.belongs_to[0]}")
            for command in COMMANDS
            for parser in flag_parsers(command)
            if parser.request is not None
            for name, declared in options_of(parser.request)
            if declared.belongs_to
        }
    )


def _argument(command: str, flag: str) -> str:
    actions = [parser._option_string_actions.get(flag) for parser in flag_parsers(command)]
    takes_none = any(isinstance(action, argparse._StoreTrueAction) for action in actions)
    return flag if takes_none else f"{flag}={_VALUES.get(flag, '7')}"


@pytest.mark.parametrize(("command", "flag", "partner"), _pairs())
def test_declared_partners(command: str, flag: str, partner: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag without its partner is refused with both names before anything starts."""
    assert main([command, *_NEEDED.get(command, []), _argument(command, flag)]) == 2
    assert f"{flag} belongs to {partner}, which is missing." in capsys.readouterr().err


# Partners that depend on more than flags, or are declared elsewhere.
_OTHERS = (
    ("calibrate", "--system=x", "--chat_template"),
    ("calibrate", "--data_format=text", "--data"),
    ("calibrate", "--inputs_field=x", "--data"),
    ("calibrate", "--targets_field=x", "--data"),
    ("calibrate", "--risk_loss=relu --consistency=textual", "--consistency=risk"),
    ("calibrate", "--seqio_split=x", "--seqio_task"),
    ("calibrate", "--seqio_module=x", "--seqio_task"),
    ("calibrate", "--stop_gain=2%", "--sequential"),
    ("calibrate", "--round_examples=5", "--sequential"),
    ("calibrate", "--max_failures=3 --on_error=fail", "--on_error=worst_case"),
    ("calibrate", "--max_failures=3 --generations=here", "--on_error=worst_case"),
    ("calibrate", "--bleurt_checkpoint=x --metric=token_f1,rouge_l", "--metric=bleurt"),
    ("evaluate", "--data_format=text", "--data"),
    ("evaluate", "--experiment=tradeoff --inputs_field=x", "--data"),
    ("evaluate", "--experiment=propagation --vocabulary=x", "--checkpoint"),
    ("suitability", "--targets_field=x", "--data"),
    ("generate", "--manifest=m.json --prompt=a --inputs_field=x", "--input"),
    ("generate", "--manifest=m.json --input=a --output=o/ --max_failures=3 --on_error=fail", "--on_error=list"),
    ("generate", "--manifest=m.json --input=a --output=o/ --probe_salt=x", "--probe_share"),
)


@pytest.mark.parametrize(("command", "flags", "partner"), _OTHERS)
def test_other_partners(
    command: str,
    flags: str,
    partner: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Other partners are refused in the same words, before anything is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text("{}")
    assert main([command, *flags.split()]) == 2
    assert re.search(f"belongs to {partner}, which is missing( or none)?\\.", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


def test_help_that_names_a_partner_declares_it() -> None:
    """A flag whose help begins with another one, as in `with --on_error=list, ...`, is in one of the tables."""
    known = {(command, flag) for command, flag, _ in _pairs()}
    known |= {(command, re.split("[= ]", flag)[0]) for command, flags, _ in _OTHERS for flag in flags.split(" ")}
    # The exit rule refuses these with messages of its own.
    known |= {(command, "--patience") for command in COMMANDS}
    lonely = [
        (command, action.option_strings[-1])
        for command in COMMANDS
        for parser in flag_parsers(command)
        for action in parser._actions
        if re.match("with --", action.help or "") and (command, action.option_strings[-1]) not in known
    ]
    assert lonely == []


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked(Options):
    """Options of which some need others."""

    metric: tuple[str, ...] | None = option(None, "names", kind=texts)
    folder: str | None = option(None, "what they need", belongs_to=("metric=bleurt", "many"))
    count: int = option(5, "how many", kind=whole_number(1), belongs_to=("many",))
    many: bool = switch("more than one")


def test_a_partner_will_do() -> None:
    """A flag is accepted with any of its partners, also one value of a list; flags that are absent need none."""
    parser = request_parser("x", _Asked, doc=None)
    for good in ([], ["--metric=a,bleurt", "--folder=f"], ["--many", "--folder=f", "--count=6"], ["--count=5"]):
        parsed(_Asked, good, parser=parser)
    for bad in (["--folder=f"], ["--metric=a", "--folder=f"], ["--count=6"]):
        with pytest.raises(UsageError, match=r"belongs to --(metric=bleurt|many), which is missing\. See calm-beam x "):
            parsed(_Asked, bad, parser=parser)
