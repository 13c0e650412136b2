"""The stored thresholds of all positions are those of the schedule, as decoders compute them."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.exits.rule import ExitRule
from calm_beam.exits.schedules import SCHEDULES
from calm_beam.exits.thresholds import scheduled_thresholds
from calm_beam.manifest import Manifest, ManifestError, manifest_text, parse_manifest
from tests.calm_beam.manifest.builders import (
    build_calibration,
    build_manifest,
    build_never_exit,
    build_path_entry,
    build_positions,
)


def _manifest(threshold: float, schedule: str, tau: float | None, steps: int, positions: tuple[float, ...]) -> Manifest:
    early = build_manifest()
    entry = build_calibration(
        threshold=threshold,
        threshold_by_position=positions,
        risk=0.0125,
        layers=5.5,
        path=(build_path_entry(threshold=threshold),),
    )
    decode = dataclasses.replace(early.decode, schedule=schedule, tau=tau, max_decode_length=steps)
    return dataclasses.replace(early, decode=decode, calibrations=(entry,))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    threshold=st.floats(0, 1),
    schedule=st.sampled_from(tuple(SCHEDULES)),
    tau=st.floats(0, 1e300),
    steps=st.integers(1, 70),
)
def test_the_decoders_thresholds_are_accepted(threshold: float, schedule: str, tau: float, steps: int) -> None:
    """For any settings, the reader computes numpy's thresholds, and they read back from the text."""
    given_tau = None if schedule == "constant" else tau
    rule = ExitRule(schedule=schedule, tau=given_tau)
    positions = scheduled_thresholds(rule, (threshold,), max_decode_length=steps)[:, 0]
    manifest = _manifest(threshold, schedule, given_tau, steps, tuple(positions.tolist()))
    (entry,) = parse_manifest(manifest_text(manifest)).calibrations
    assert entry.threshold_by_position is not None
    assert np.array_equal(np.array(entry.threshold_by_position, np.float32), positions)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    threshold=st.floats(0.05, 0.95),
    schedule=st.sampled_from(tuple(SCHEDULES)),
    position=st.integers(0, 11),
    is_up=st.booleans(),
    units=st.integers(2, 5),
)
def test_other_thresholds_are_refused(threshold: float, schedule: str, position: int, is_up: bool, units: int) -> None:
    """A few units in the last place of float32, at any position, are refused."""
    tau = None if schedule == "constant" else 4.0
    positions = scheduled_thresholds(ExitRule(schedule=schedule, tau=tau), (threshold,), max_decode_length=12)[:, 0]
    for _ in range(units):
        positions[position] = np.nextafter(positions[position], np.float32(2 * is_up))
    with pytest.raises(ManifestError, match=rf"^calibrations\[0\].threshold_by_position\[{position}\] must be "):
        _manifest(threshold, schedule, tau, 12, tuple(positions.tolist()))


@pytest.mark.parametrize(("schedule", "tau"), [("constant", None), ("decay", 4.0), ("decay_t5x", 0.5)])
def test_values_written_by_hand_are_accepted(schedule: str, tau: float | None) -> None:
    """The formulas of the paper and of the released code, in plain Python and rounded by numpy, are accepted."""
    by_hand = {
        "constant": lambda t: 0.7,
        "decay": lambda t: 0.9 * 0.7 + 0.1 * math.exp(-4 * t / 12),
        "decay_t5x": lambda t: 0.7 * (0.9 + 0.1 * math.exp(-0.5 * t / 12)),
    }[schedule]
    _manifest(0.7, schedule, tau, 12, tuple(float(np.float32(by_hand(t))) for t in range(12)))


_POSITIONS = build_positions(0.8)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (
            _POSITIONS[:-1],
            "calibrations[0].threshold_by_position must have decode.max_decode_length entries, which is ",
        ),
        ((0.8200000001, *_POSITIONS[1:]), "threshold_by_position[0] must be 0.8199999928474426, which schedule decay "),
        ((0.82, *_POSITIONS[1:]), "of threshold 0.8 in float32, got 0.82"),
        ((True, *_POSITIONS[1:]), "threshold_by_position[0] must be a number in [0, 1], got true"),
        ([*_POSITIONS], "threshold_by_position must be a tuple"),
    ],
)
def test_what_is_wrong_is_said(positions: Any, message: str) -> None:
    """The message has the key, the expected and the given value; numbers that are no float32 are refused too."""
    with pytest.raises(ManifestError, match=re.escape(message)):
        build_manifest(calibrations=(build_calibration(threshold_by_position=positions),))


def test_never_exit_has_no_thresholds() -> None:
    """Never exit has no thresholds."""
    with pytest.raises(ManifestError, match="threshold_by_position must be left out when threshold is null"):
        build_never_exit(threshold_by_position=_POSITIONS)


def test_early_manifests_have_none() -> None:
    """An early manifest without them is read with the same digest."""
    early = build_manifest()
    assert "threshold_by_position" not in manifest_text(early)
    read = parse_manifest(manifest_text(early))
    assert read == early
    assert read.digest == early.digest
    assert [entry.threshold_by_position for entry in read.calibrations] == [None, None]
