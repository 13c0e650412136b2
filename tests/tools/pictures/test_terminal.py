"""The picture of a terminal."""

import pathlib
import xml.etree.ElementTree

import pytest

from tools.pictures.terminal import drawn, printed


def test_a_session_is_drawn() -> None:
    """The picture has the typed and printed text in its colours, fetches nothing, and is equal for equal sessions."""
    session = [("calm-beam plan", "\x1b[30;48;2;255;255;204m one \x1b[0m<two>\n")]
    picture = drawn(session)
    assert picture == drawn(session)
    xml.etree.ElementTree.fromstring(picture)
    assert "calm-beam&#160;plan" in picture
    assert "&lt;two&gt;" in picture
    assert "#ffffcc" in picture
    assert "@font-face" not in picture
    assert "url(" not in picture.replace("url(#", "")
    assert 'aria-label="A terminal: calm-beam plan"' in picture


def test_commands_are_run(tmp_path: pathlib.Path) -> None:
    """A command prints for eighty columns; one that fails raises an error."""
    flags = ["plan", "--delta=0.2", "--risk_guess=0.1", "--p_value=exact_binomial"]
    lines = printed(flags, cwd=str(tmp_path)).splitlines()
    assert any("exact_binomial" in line for line in lines)
    assert max(map(len, lines)) > 60
    with pytest.raises(RuntimeError, match="calm-beam plan --delta=5 failed"):
        printed(["plan", "--delta=5"], cwd=str(tmp_path))
