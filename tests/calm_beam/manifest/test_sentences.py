"""Sentences about manifests."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.manifest import ParetoPlan, SettingTest, Variant, too_few_in_words
from tests.calm_beam.manifest.builders import build_grouped_manifest
from tests.calm_beam.manifest.test_settings import build_setting_manifest


def _test(*, delta: float = 0.05, epsilon: float = 0.05) -> SettingTest:
    return SettingTest(
        group=None,
        delta=delta,
        epsilon=epsilon,
        p_value="exact_binomial",
        procedure="fixed_sequence",
        loss="given",
        tail=None,
    )


@pytest.mark.parametrize(
    ("delta", "epsilon", "least"), [(0.1, 0.05, 29), (0.05, 0.05, 59), (0.5, 0.5, 1), (0.5, 0.25, 2)]
)
def test_the_least_units(delta: float, epsilon: float, least: int) -> None:
    """From the least number of units on, (1 - delta)^n is at most epsilon, equality included."""
    assert _test(delta=delta, epsilon=epsilon).least_units(level=epsilon) == least


@given(delta=st.floats(0.001, 0.9), epsilon=st.floats(0.001, 0.5))
def test_one_unit_fewer_is_too_few(delta: float, epsilon: float) -> None:
    """One unit fewer is too few by the binomial distribution itself."""
    least = _test(delta=delta, epsilon=epsilon).least_units(level=epsilon)
    assert (1 - delta) ** least <= epsilon * (1 + 1e-5)
    assert least == 1 or (1 - delta) ** (least - 1) > epsilon * (1 - 1e-5)
    assert math.isfinite(least)


def test_too_few() -> None:
    """Too few units are reported with the number of promises, the most demanding one, and the needed number."""
    easy, hard = _test(delta=0.2), _test(delta=0.05)
    assert too_few_in_words((easy, hard), 59) == ""
    assert too_few_in_words((easy, hard), 58).startswith("1 of 2 promises cannot be proved by 58 examples, even if")
    assert "delta 0.05 at epsilon 0.05 takes at least 59" in too_few_in_words((easy, hard), 10)
    assert too_few_in_words((hard,), 10).startswith("The promise cannot be proved by 10 examples")


def test_variants_take_more() -> None:
    """Each of several variants is tested at a share of epsilon; or a part of the units chooses, and the rest tests."""
    shared = ParetoPlan(variants=(Variant(min_exit_layer=1), Variant(min_exit_layer=2)))
    assert 0.95**72 <= 0.05 / 2 < 0.95**71
    assert "epsilon 0.05, which 2 variants share, takes at least 72," in too_few_in_words((_test(),), 71, shared)
    assert too_few_in_words((_test(),), 72, shared) == ""
    chosen = dataclasses.replace(shared, choosing_share=0.25)
    assert "where 25% of them choose, takes at least 79," in too_few_in_words((_test(),), 78, chosen)
    assert too_few_in_words((_test(),), 79, chosen) == ""


def test_a_manifest_prints_its_promises() -> None:
    """A printed manifest is a line for each promise, of a group or of all."""
    assert str(build_grouped_manifest()).splitlines()[1:] == [
        "  textual, rouge_l, delta 0.1, epsilon 0.05: threshold 0.8, risk 0.0300, 4.25 layers a token",
        "  group de, textual, rouge_l, delta 0.1, epsilon 0.05: threshold 0.7, risk 0.0200, 2.50 layers a token",
        "  group en, textual, rouge_l, delta 0.1, epsilon 0.05: threshold 0.8, risk 0.0300, 4.25 layers a token",
        "  group fr, textual, rouge_l, delta 0.1, epsilon 0.05: never exit",
    ]


def test_a_manifest_of_settings_prints_its_promises() -> None:
    """A printed manifest of settings names the setting of each promise, or that none is safe."""
    manifest = build_setting_manifest()
    head, *lines = str(manifest).splitlines()
    assert head == f"Manifest of {manifest.created}, 2 entries:"
    for line, entry in zip(lines, manifest.calibrations, strict=True):
        found = "no safe setting" if entry.setting is None else f"setting {entry.setting}, risk {entry.risk:.4f}"
        assert line.endswith(f"delta {entry.delta:g}, epsilon {entry.epsilon:g}: {found}")
