"""The command that makes the pictures."""

import pathlib

import pytest

from tools.pictures.__main__ import main


def test_one_picture_is_made(tmp_path: pathlib.Path) -> None:
    """Only the named picture is made."""
    assert main([f"--output={tmp_path / 'out'}", "--only=throughput"]) == 0
    (made,) = (tmp_path / "out").iterdir()
    assert made.name == "throughput.svg"
    assert made.read_text(encoding="utf-8").startswith("<?xml")


def test_unknown_pictures_are_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown picture is refused by name before anything is made."""
    with pytest.raises(SystemExit):
        main([f"--output={tmp_path / 'out'}", "--only=throughput,portrait"])
    assert "--only: there is no picture portrait. Choose from report, risk, proof," in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
