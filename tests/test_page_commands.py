"""Commands on all pages use flags that exist, whether a test runs the commands or not."""

import pathlib

import pytest

from calm_beam.launch.commands import flag_parsers
from calm_beam.launch.flags import FlagParser, UsageError
from tests.snippets import PAGES, ROOT, own_commands

# Beam's flags that pages name.
_BEAMS = {
    "--direct_num_workers",
    "--direct_running_mode",
    "--environment_config",
    "--environment_type",
    "--files_to_stage",
    "--job_endpoint",
    "--max_num_workers",
    "--parallelism",
    "--project",
    "--region",
    "--runner",
    "--sdk_container_image",
    "--service_account_email",
    "--temp_location",
}
_COMMANDS = [(page, command) for page in PAGES for command in own_commands(page)]


def _refusal(command: list[str]) -> str | None:
    """Returns the error of a command's parsers for its flags; None if one of them takes them all."""
    name, *flags = command
    # Placeholders that the page leaves out or the shell fills in.
    shown = [flag for flag in flags if flag != "..." and "$" not in flag]
    refusals = [_refusal_of(parser, shown) for parser in flag_parsers(name)]
    return None if None in refusals else refusals[0]


def _refusal_of(parser: FlagParser, flags: list[str]) -> str | None:
    for action in parser._actions:
        action.required = False
    try:
        unknown = parser.parse_known_args(flags)[1]
    except UsageError as error:
        return str(error)
    foreign = [flag for flag in unknown if flag.partition("=")[0] not in _BEAMS]
    return f"unknown: {foreign}" if foreign else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_exist(page: pathlib.Path) -> None:
    """Every flag of every command on a page exists, and its value is valid."""
    refused = {" ".join(command): _refusal(command) for command in own_commands(page) if command[0] != "--version"}
    assert {command: why for command, why in refused.items() if why} == {}


def test_commands_are_found() -> None:
    """Many commands are found, in folders too, and one with an unknown flag is refused."""
    assert len(_COMMANDS) > 60
    assert {"tutorials", "how-to", "explanation"} <= {page.parent.name for page, _ in _COMMANDS}
    assert _refusal(["calibrate", "--no_such_flag=1"]) == "unknown: ['--no_such_flag=1']"
    assert "delta" in str(_refusal(["plan", "--delta=much"]))
