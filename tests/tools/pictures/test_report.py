"""The picture of the report."""

import pathlib
from typing import get_args

import pytest

from calm_beam.report import StoredOutputs, build_page, read_calibrated
from tests.calm_beam.report.browser import needs_browser
from tests.calm_beam.report.builders import random_generations, write_calibration
from tools.pictures.report import Scheme, find_browser, photographed, photographed_section

pytestmark = needs_browser

_SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


@pytest.fixture
def report(tmp_path: pathlib.Path) -> pathlib.Path:
    """A report of ten examples."""
    folder = write_calibration(tmp_path / "out", random_generations(10))
    calibrated = read_calibrated(str(folder))
    (stored,) = folder.glob("generations/*")
    outputs = StoredOutputs.read(str(stored), calibrated.manifest)
    path = folder / "report.html"
    path.write_text(
        build_page(calibrated, outputs, vocabulary=None, sizes=None, most_examples=10, seed=0), encoding="utf-8"
    )
    return path


def test_the_report_is_photographed(report: pathlib.Path) -> None:
    """The picture is a WebP twice as wide as README, small enough for a page; the dark one differs."""
    pictures = [
        photographed(report, consistency="textual", delta=0.6, browser=find_browser(), scheme=scheme)
        for scheme in _SCHEMES
    ]
    for picture in pictures:
        assert (picture[:4], picture[8:12]) == (b"RIFF", b"WEBP")
        assert len(picture) < 150_000
    assert pictures[0] != pictures[1]


def test_a_section_is_photographed(report: pathlib.Path) -> None:
    """The named heading's section, about the chosen promise, is photographed."""
    heading = "Risk at every threshold"
    pictures = [
        photographed_section(report, heading=heading, browser=find_browser(), promise=("textual", delta))
        for delta in (0.05, 0.6)
    ]
    for picture in pictures:
        assert (picture[:4], picture[8:12]) == (b"RIFF", b"WEBP")
        assert len(picture) < 150_000
    assert pictures[0] != pictures[1]
