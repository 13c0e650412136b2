"""Grids of thresholds."""

import numpy as np
import pytest

from calm_beam.exits.thresholds import descending_grid, uniform_grid


def test_a_grid_descends() -> None:
    """Thresholds in any order, whole numbers included, come back as floats from the highest down."""
    grid = descending_grid([0, 0.25, 1, 0.5])
    assert grid == (1.0, 0.5, 0.25, 0.0)
    assert all(type(threshold) is float for threshold in grid)


@pytest.mark.parametrize(
    ("thresholds", "message"),
    [
        ([], "thresholds must not be empty"),
        ([0.5, 1.5], r"thresholds must be in \[0, 1\], got 1\.5"),
        ([0.5, -0.1], r"thresholds must be in \[0, 1\], got -0\.1"),
        ([0.5, float("nan")], r"thresholds must be in \[0, 1\], got nan"),
        ([float("nan"), 0.5, 0.7], r"thresholds must be in \[0, 1\], got nan"),
        ([0.5, 0.7, 0.5], r"thresholds must be distinct in float32, got 0\.5 and 0\.5"),
        ([0.0, -0.0], "thresholds must be distinct in float32"),
    ],
)
def test_bad_grids_are_refused(thresholds: list[float], message: str) -> None:
    """Grids that are empty, out of range or hold a threshold twice are refused with the value."""
    with pytest.raises(ValueError, match=message):
        descending_grid(thresholds)


def test_thresholds_equal_in_float32_are_refused() -> None:
    """Two thresholds that differ in float64 only would be the same test twice."""
    other = float(np.nextafter(0.9, 1.0))
    assert other != 0.9
    with pytest.raises(ValueError, match=r"distinct in float32, got 0\.9000000000000001 and 0\.9\."):
        descending_grid([0.9, other])
    next_in_float32 = float(np.nextafter(np.float32(0.9), np.float32(1)))
    assert len(descending_grid([0.9, next_in_float32])) == 2


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0.25, (0.75, 0.5, 0.25, 0.0)),
        (0.3, (0.9, 0.6, 0.3, 0.0)),
        (0.7, (0.7, 0.0)),
        (0.1, (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)),
    ],
)
def test_uniform_grids_hold_round_numbers(step: float, expected: tuple[float, ...]) -> None:
    """Multiples of the step are the decimal numbers that a reader expects, without 1."""
    assert uniform_grid(step) == expected


@pytest.mark.parametrize("step", [0.05, 0.01, 0.001, 1 / 3, 1 / 7])
def test_uniform_grids_are_grids(step: float) -> None:
    """A uniform grid starts below 1 in float32, ends at 0, and is accepted as a grid."""
    grid = uniform_grid(step)
    assert descending_grid(grid) == grid
    assert np.float32(grid[0]) < 1
    assert grid[0] + step > 1 - 1e-9
    assert grid[-1] == 0


@pytest.mark.parametrize("step", [0.0, 1.0, -0.1, 5.0, float("nan")])
def test_bad_steps_are_refused(step: float) -> None:
    """A step outside (0, 1) is refused, with the value and an example."""
    with pytest.raises(ValueError, match=rf"grid_step must be in \[0\.001, 1\), got {step}\. .* e\.g\. 0\.05"):
        uniform_grid(step)
