"""The image of the service copies files that exist, and starts the command."""

import re

import pytest

from calm_beam.launch.commands import flag_parsers
from tests.setup_file import read_setup
from tests.snippets import ROOT

_LINES = (ROOT / "launch" / "serve" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


def test_what_is_copied_is_there() -> None:
    """Every path that the image copies from the repository exists."""
    copied = [line.split()[1:-1] for line in _LINES if line.startswith("COPY ") and "--from" not in line]
    assert len(copied) >= 4
    assert [path for paths in copied for path in paths if not (ROOT / path).exists()] == []


def test_extras_and_flags_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extras that the image installs are calm-beam-serving's, and its flags are the command's."""
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", "\n".join(_LINES))
    monkeypatch.setenv("CALM_BEAM_DISTRIBUTION", "calm-beam-serving")
    assert set(extras.split(",")) <= set(read_setup()["extras_require"])
    (start,) = [line for line in _LINES if line.startswith("ENTRYPOINT")]
    command, name, *flags = re.findall(r'"([^"]+)"', start)
    assert (command, name) == ("calm-beam", "serve")
    (parser,) = flag_parsers("serve")
    assert {flag.partition("=")[0] for flag in flags} <= set(parser._option_string_actions)
