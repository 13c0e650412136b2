"""Costs of tokens and measured speeds in manifests."""

import dataclasses
import json
from typing import Any

import pytest

from calm_beam.manifest import (
    ManifestError,
    manifest_text,
    parse_manifest,
    speeds_in_words,
)
from calm_beam.report.promise import promise_in_words
from tests.calm_beam.manifest.builders import (
    SPEED,
    build_planned_manifest,
    build_timed_manifest,
    build_variants_manifest,
)


def test_costs_and_speeds_are_read_again() -> None:
    """Costs and speeds read back unchanged, and other manifests have no such fields."""
    manifest = build_timed_manifest()
    assert parse_manifest(manifest_text(manifest)) == manifest
    assert manifest.cost is not None
    assert manifest.cost.was_measured
    assert not {"cost", "speeds"} & json.loads(manifest_text(build_planned_manifest())).keys()


def test_what_does_not_pay_is_never_exited() -> None:
    """An entry may have accepted thresholds and promise none, if they cost no less than the full model."""
    manifest = build_timed_manifest(speeds=None)
    first, never = manifest.calibrations
    of_none: dict[str, Any] = {"threshold": None, "variant": None, "threshold_by_position": None, "rule": None}
    slow = dataclasses.replace(first, pays=False, layers=manifest.model.layers, risk=0.0, **of_none)
    found = dataclasses.replace(manifest, calibrations=(slow, never))
    assert parse_manifest(manifest_text(found)).calibrations[0].chosen is None
    with pytest.raises(ManifestError, match="pays must be false where path has accepted a threshold that does not"):
        dataclasses.replace(never, pays=False)
    with pytest.raises(ManifestError, match=r"calibrations\[0\]\.pays must be left out without plan"):
        dataclasses.replace(build_variants_manifest(), calibrations=(slow, never))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cost": None}, 'cost must be there exactly if plan.pareto.objective is, which is "latency"'),
        (
            {"speeds": (dataclasses.replace(SPEED, calibrations=(1,)),)},
            r"speeds\[0\]\.calibrations must be places of entries that accepted one, got 1",
        ),
        (
            {"speeds": (dataclasses.replace(SPEED, calibrations=(2,)),)},
            r"speeds\[0\]\.calibrations must be places of entries that accepted one, got 2",
        ),
    ],
)
def test_costs_and_speeds_at_odds_are_refused(changes: dict[str, Any], message: str) -> None:
    """Costs exist exactly if something was chosen by them, and speeds are those of promised thresholds."""
    with pytest.raises(ManifestError, match=message):
        build_timed_manifest(**changes)


def test_speeds_in_words() -> None:
    """Each measured entry has a sentence, and each that does not pay says why it never exits."""
    manifest = build_timed_manifest(speeds=(SPEED, dataclasses.replace(SPEED, batch=64, factor=0.8)))
    first, never = manifest.calibrations
    (said,) = speeds_in_words(manifest)
    assert said.startswith("textual, rouge_l, delta 0.1")
    assert said.endswith(
        ": 1.25 times as fast as the full model on the machine that calibrated (one prompt at a time; 0.80 in batches "
        "of 64), at 3.50 of 6 layers a token."
    )
    of_none: dict[str, Any] = {"threshold": None, "variant": None, "threshold_by_position": None, "rule": None}
    slow = dataclasses.replace(first, pays=False, layers=manifest.model.layers, risk=0.0, **of_none)
    (said,) = speeds_in_words(dataclasses.replace(manifest, calibrations=(slow, never)))
    assert ": never exit, since what was proved was not clearly faster, 1.25 times as fast" in said
    speeds = (dataclasses.replace(SPEED, factor=0.9),)
    (said,) = speeds_in_words(dataclasses.replace(manifest, calibrations=(slow, never), speeds=speeds))
    assert ": never exit, since what was proved was 0.90 times as fast" in said
    (said,) = speeds_in_words(dataclasses.replace(manifest, calibrations=(slow, never), speeds=None))
    assert ": never exit, since nothing that was proved is faster; fine-tuning moves exits down" in said
    assert speeds_in_words(build_planned_manifest()) == ()


def test_what_failed_is_named_where_only_the_full_model_was_proved() -> None:
    """If every proved threshold runs all layers, the sentence names the failed test that came closest."""
    manifest = build_timed_manifest(speeds=None)
    first, never = manifest.calibrations
    depth = manifest.model.layers
    path = tuple(dataclasses.replace(step, layers=depth) if step.rejected else step for step in first.path)
    of_none: dict[str, Any] = {"threshold": None, "variant": None, "threshold_by_position": None, "rule": None}
    full = dataclasses.replace(first, pays=False, layers=depth, risk=0.0, path=path, **of_none)
    (said,) = speeds_in_words(dataclasses.replace(manifest, calibrations=(full, never)))
    closest = min((step for step in path if not step.rejected), key=lambda step: step.p_value)
    assert closest.variant is not None
    level = manifest.level_of(first)
    assert (
        f": never exit, since nothing but the full model was proved: {closest.variant.in_words()}, at threshold "
        f"{closest.threshold:g}, lost {closest.risk:.4f} (p = {closest.p_value:.2g}, tested at {level:.3g}); "
        "fine-tuning"
    ) in said
    assert "forecast" not in said


def test_the_headline_of_a_report_says_the_speed() -> None:
    """The promise ends with its speed; one that does not pay says that nothing faster could be proved."""
    manifest = build_timed_manifest()
    first, never = manifest.calibrations
    said = "".join(promise_in_words(first, manifest))
    assert said.endswith(
        "On the machine that calibrated, it was 1.25 times as fast as the full model, one prompt at a time."
    )
    of_none: dict[str, Any] = {"threshold": None, "variant": None, "threshold_by_position": None, "rule": None}
    slow = dataclasses.replace(first, pays=False, layers=manifest.model.layers, risk=0.0, **of_none)
    found = dataclasses.replace(manifest, calibrations=(slow, never))
    assert "nothing that is faster than the full model could be proved" in "".join(promise_in_words(slow, found))
    assert "On the machine that calibrated" not in "".join(promise_in_words(never, found))
