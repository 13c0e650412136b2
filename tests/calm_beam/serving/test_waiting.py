"""A log line says that a prompt waits for a compiler, in a script as at Python's prompt."""

import re
import time

import pytest

from calm_beam.serving import ContinuousGenerator, generator
from calm_beam.serving.generator import named_while_waiting
from tests.calm_beam.serving.test_generator import _generator


def test_a_long_wait_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The message comes once, after some patience, as a warning; shorter waits are silent."""
    monkeypatch.setattr(generator, "_PATIENCE_SECONDS", 0.05)
    with named_while_waiting("compiling"):
        time.sleep(0.5)
    assert caplog.messages == ["compiling"]
    monkeypatch.setattr(generator, "_PATIENCE_SECONDS", 60)
    with named_while_waiting("compiling"):
        pass
    assert caplog.messages == ["compiling"]


def test_warming_up_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """For single prompts and for batches, the wait is named, then the shapes; a caller that counts hears that alone."""
    monkeypatch.setattr(generator, "_PATIENCE_SECONDS", 0)
    monkeypatch.setattr(generator, "_SECONDS_BETWEEN", 0)
    served = _generator()
    served.warm_up()
    assert any(re.fullmatch(r"calm-beam: compiling for \d+ lengths of prompts, once", each) for each in caplog.messages)
    for single in (True, False):
        if not single:
            with ContinuousGenerator(served) as continuous:
                caplog.clear()
                continuous.warm_up()
            assert "calm-beam: compiling all that batches of prompts may need, once" in caplog.messages
        found = [re.fullmatch(r"calm-beam: compiled (\d+) of (\d+) shapes", each) for each in caplog.messages]
        places = [(int(each[1]), int(each[2])) for each in found if each is not None]
        assert places == [(place, places[0][1]) for place in range(places[0][1])]
    caplog.clear()
    counted: list[int] = []
    with ContinuousGenerator(served) as continuous:
        continuous.warm_up(on_shape=lambda done, _: counted.append(done))
    assert counted == list(range(len(places) + 1))
    assert not caplog.messages


def test_the_first_prompt_of_a_length_names_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first prompt of a length names its compilation; the second does not compile."""
    monkeypatch.setattr(generator, "_PATIENCE_SECONDS", 0)
    served = _generator()
    served.generate([5, 6, 7])
    said = [
        each for each in caplog.messages if each.startswith("calm-beam: compiling for prompts of this length, once")
    ]
    assert len(said) == 1
    caplog.clear()
    served.generate([7, 6, 5])
    assert not any("compiling" in each for each in caplog.messages)
