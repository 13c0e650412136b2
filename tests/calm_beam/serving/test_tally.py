"""The tally of answers: the number of exit tests."""

import dataclasses
import types
from typing import Any

import pytest

from calm_beam.manifest import Variant
from calm_beam.serving.answer import exit_tests
from tests.calm_beam.manifest.builders import build_manifest


def _answer(layers: tuple[int, ...], *, threshold: float | None, variant: Variant | None = None) -> Any:
    """Returns the fields of an answer that the tally reads, for a model of eight layers, by an entry."""
    entry = types.SimpleNamespace(threshold=threshold, variant=variant)
    return types.SimpleNamespace(exit_layers=layers, num_layers=8, entry=entry)


def _manifest() -> Any:
    """Returns a manifest of softmax at every layer."""
    decode = dataclasses.replace(
        build_manifest().decode, confidence="softmax", schedule="constant", tau=None, min_exit_layer=1, exit_interval=1
    )
    return build_manifest(decode=decode)


@pytest.mark.parametrize(
    ("variant", "tests"),
    [
        # Every layer but the last is tested, and the test that accepts gives the token.
        (None, 1 + 3 + 7),
        (Variant(confidence="softmax", min_exit_layer=2, exit_interval=2), 0 + 1 + 3),
        (Variant(confidence="state", min_exit_layer=2, exit_interval=2), 1 + 2 + 3),
        (Variant(confidence="static", min_exit_layer=1, exit_interval=1), 0),
    ],
)
def test_tests_are_those_of_the_entrys_rule(variant: Variant | None, tests: int) -> None:
    """Tests are counted from exit layers and the entry's exit rule."""
    assert exit_tests(_answer((2, 4, 8), threshold=0.5, variant=variant), _manifest()) == tests


def test_the_full_model_asks_nothing() -> None:
    """The full model has no tests, whether an entry never exits or there is none."""
    assert exit_tests(_answer((8, 8), threshold=None), _manifest()) == 0
    answer = _answer((8, 8), threshold=0.5)
    answer.entry = None
    assert exit_tests(answer, _manifest()) == 0
