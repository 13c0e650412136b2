"""What is counted of answers: how often a confidence was asked."""

import dataclasses
import types
from typing import Any

import pytest

from calm_beam.manifest import Variant
from calm_beam.serving.answer import exit_tests
from tests.calm_beam.manifest.builders import build_manifest


def _answer(layers: tuple[int, ...], *, threshold: float | None, variant: Variant | None = None) -> Any:
    """Returns what is read of an answer of a model of eight layers, by an entry."""
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
        # Every layer but the last is tested, and the test that lets a token out gives the token.
        (None, 1 + 3 + 7),
        (Variant(confidence="softmax", min_exit_layer=2, exit_interval=2), 0 + 1 + 3),
        (Variant(confidence="state", min_exit_layer=2, exit_interval=2), 1 + 2 + 3),
        (Variant(confidence="static", min_exit_layer=1, exit_interval=1), 0),
    ],
)
def test_tests_are_those_of_the_entrys_rule(variant: Variant | None, tests: int) -> None:
    """They follow from the layers where tokens left, and the rule by which they did."""
    assert exit_tests(_answer((2, 4, 8), threshold=0.5, variant=variant), _manifest()) == tests


def test_the_full_model_asks_nothing() -> None:
    """Neither where an entry never exits, nor where no entry decides."""
    assert exit_tests(_answer((8, 8), threshold=None), _manifest()) == 0
    answer = _answer((8, 8), threshold=0.5)
    answer.entry = None
    assert exit_tests(answer, _manifest()) == 0
