"""What is counted of answers: layers, and how often a confidence was asked."""

import dataclasses

import pytest

from calm_beam.manifest import Manifest, Variant
from calm_beam.serving.answer import Answer
from calm_beam.serving.tally import exit_tests
from tests.calm_beam.manifest.builders import build_manifest


def _answer(manifest: Manifest, layers: tuple[int, ...], **entry: object) -> Answer:
    """Returns the answer of a model of eight layers by the first entry."""
    return Answer(
        text="",
        tokens=(5,) * len(layers),
        exit_layers=layers,
        confidences=(1.0,) * len(layers),
        num_layers=8,
        truncated=False,
        entry=dataclasses.replace(manifest.calibrations[0], **entry),  # type: ignore[arg-type]
    )


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
    manifest = build_manifest()
    assert exit_tests(_answer(manifest, (2, 4, 8), threshold=0.5, variant=variant), manifest) == tests


def test_the_full_model_asks_nothing() -> None:
    """Neither where an entry never exits, nor where no entry decides."""
    manifest = build_manifest()
    assert exit_tests(_answer(manifest, (8, 8), threshold=None), manifest) == 0
    full = dataclasses.replace(_answer(manifest, (8, 8)), entry=None)
    assert exit_tests(full, manifest) == 0
