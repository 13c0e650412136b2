"""The risk of settings as a drawing."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest

from calm_beam.calibration.certification import SettingRow
from calm_beam.report.plain import setting_chart


def _rows(risks: Sequence[float], *, delta: float) -> list[SettingRow]:
    return [
        SettingRow(
            group="",
            loss="given",
            tail=None,
            delta=delta,
            epsilon=0.05,
            setting=f"s{place}",
            n=100,
            loss_sum=0,
            risk=risk,
            p_value=0.01,
            tested=True,
            rejected=True,
            cost=None,
        )
        for place, risk in enumerate(risks)
    ]


@pytest.mark.parametrize(
    ("risks", "is_at_the_end"), [((0.0, 0.02, 0.06, 0.11), False), ((0.09, 0.02, 0.01, 0.0), True), ((0.0,), False)]
)
def test_the_tolerance_is_named_where_no_risk_is_near(risks: Sequence[float], is_at_the_end: bool) -> None:
    """The tolerance's name is at the end of its line that is farther from the curve, so that they do not overlap."""
    drawn = setting_chart(_rows(risks, delta=0.1), chosen=None, width=320, height=170, is_large=False)
    (name,) = re.findall(r'<text class="delta-name"[^>]*>', drawn)
    assert ('text-anchor="end"' in name) is is_at_the_end


def test_no_line_joins_two_sequences_of_tests() -> None:
    """Variants that were tested by themselves have curves of their own, with all points and no line between them."""
    rows = _rows((0.01, 0.12, 0.02, 0.03, 0.04), delta=0.1)
    settings: dict[str, Any] = {"chosen": None, "width": 320, "height": 170, "is_large": False}
    curves = [
        [len(points.split()) for points in re.findall(r'<polyline class="path" points="([^"]*)"', drawn)]
        for drawn in (setting_chart(rows, **settings), setting_chart(rows, **settings, begins=(0, 2)))
    ]
    assert curves == [[5], [2, 3]]


def test_long_names_take_two_lines() -> None:
    """A name that is too long for a line is complete in two, and what is below the chart moves down."""
    rows = [
        dataclasses.replace(row, setting=f"0.9{place} softmax ≥{place} /2", cost=1.0)
        for place, row in enumerate(_rows((0.01, 0.02), delta=0.1))
    ]
    short = setting_chart(_rows((0.01, 0.02), delta=0.1), chosen=None, width=600, height=170, is_large=True)
    drawn = setting_chart(rows, chosen=None, width=600, height=170, is_large=True)
    names = re.findall(r'<text class="tick"[^>]*y="([0-9.]+)" text-anchor="middle">(.*?)</text>', drawn)
    lines = [text.strip("\u2068\u2069") for _, text in names]
    assert lines == ["0.90 softmax", "≥0 /2", "0.91 softmax", "≥1 /2"]
    heights = [float(height) for height, _ in names]
    assert heights[0] == heights[2] < heights[1] == heights[3]
    # Bars of costs begin below the second line.
    bars = [float(height) for height in re.findall(r'<rect class="strip"[^>]* y="([0-9.]+)"', drawn)]
    assert min(bars) > heights[1]
    assert "…" not in drawn + short
