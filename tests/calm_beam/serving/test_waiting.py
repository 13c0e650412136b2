"""A user who waits for a compiler at Python's prompt gets a message; programs get none."""

import sys
import time

import pytest

from calm_beam.serving import generator
from calm_beam.serving.generator import named_while_waiting
from tests.calm_beam.serving.test_generator import _generator


@pytest.mark.parametrize(("is_interactive", "told"), [(True, "compiling\n"), (False, "")])
def test_only_people_are_told(
    is_interactive: bool, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message comes once, after some patience, on standard error; shorter waits are silent."""
    monkeypatch.setattr(generator, "_PATIENCE_SECONDS", 0.05)
    if is_interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with named_while_waiting("compiling"):
        time.sleep(0.5)
    assert capsys.readouterr() == ("", told)
    monkeypatch.setattr(generator, "_PATIENCE_SECONDS", 60)
    with named_while_waiting("compiling"):
        pass
    assert capsys.readouterr() == ("", "")


def test_the_first_prompt_of_a_length_names_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first prompt of a length names its compilation; the second does not compile."""
    monkeypatch.setattr(generator, "_PATIENCE_SECONDS", 0)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    served = _generator()
    served.generate([5, 6, 7])
    assert capsys.readouterr().err.startswith("calm-beam: compiling for prompts of this length, once")
    served.generate([7, 6, 5])
    assert capsys.readouterr().err == ""
