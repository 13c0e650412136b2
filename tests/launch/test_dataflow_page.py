"""docs/dataflow.md: its commands have flags that exist, and its tables say what the code does."""

import json
import pathlib
import re

import pytest

from calm_beam.launch.calibrate import flag_parsers
from calm_beam.launch.flags import UsageError, parse_flags
from calm_beam.launch.flags.shared_options import parse_accelerator
from tests.snippets import commands

_ROOT = pathlib.Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "dataflow.md").read_text(encoding="utf-8")
_COMMANDS = commands(_ROOT / "docs" / "dataflow.md")
_FULL_NAMES = dict(re.findall(r"^\| `((?:nvidia|tpu)-[^`]+)` \| `([^`]+)` \|$", _PAGE, re.MULTILINE))


def test_the_first_command_is_understood() -> None:
    """Calibrate accepts the first command of the page."""
    first = _COMMANDS[0]
    assert first[:2] == ["calm-beam", "calibrate"]
    flags, _ = parse_flags(flag_parsers()[0], first[2:])
    assert flags.accelerator == parse_accelerator("nvidia-l4")


@pytest.mark.parametrize("name", _FULL_NAMES)
def test_short_names_stand_for_what_the_page_says(name: str) -> None:
    """A short name and what the page gives for it are the same accelerator."""
    assert parse_accelerator(name) == parse_accelerator(_FULL_NAMES[name])


def test_all_short_names_are_there() -> None:
    """The table has the accelerators of the table of machines; what is named in full is understood."""
    names = set(re.findall(r"`--accelerator=([^` ]+)", _PAGE))
    in_full = {name for name in names if name.startswith("'")}
    assert names - in_full == set(_FULL_NAMES)
    assert [parse_accelerator(name.strip("'")) for name in in_full]


def test_flags_in_the_text_exist() -> None:
    """Every other flag that the page names for calibrate is ours or Beam's."""
    names = set(re.findall(r"`(--[a-z]+_[a-z_]+)(?:=[^`]*)?`", _PAGE))
    assert len(names) > 10
    # Without a good value most are refused, but not for being unknown.
    assert {name for name in names if "unknown flag" in _refusal(f"{name}=1")} == set()
    assert "unknown flag" in _refusal("--no_such_flag=1")


def _refusal(flag: str) -> str:
    try:
        parse_flags(flag_parsers()[0], [flag])
    except UsageError as error:
        return str(error)
    return ""


def test_parameters_of_the_template_exist() -> None:
    """The parameters that the page passes are those of the template, required ones among them."""
    metadata = json.loads((_ROOT / "launch" / "flex_template" / "metadata.json").read_text())
    (run,) = [command for command in _COMMANDS if command[:4] == ["gcloud", "dataflow", "flex-template", "run"]]
    values = [word.removeprefix("--parameters=") for word in run if word.startswith("--parameters=")]
    passed = {pair.partition("=")[0] for value in values for pair in value.split(",")}
    known = {parameter["name"]: parameter["isOptional"] for parameter in metadata["parameters"]}
    assert passed <= set(known)
    assert {name for name, is_optional in known.items() if not is_optional} <= passed
