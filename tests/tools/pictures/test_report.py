"""The picture of the report."""

import pathlib

from calm_beam.report import StoredOutputs, build_page, read_calibrated
from tests.calm_beam.report.browser import needs_browser
from tests.calm_beam.report.builders import random_generations, write_calibration
from tools.pictures.report import find_browser, photographed

pytestmark = needs_browser


def test_the_report_is_photographed(tmp_path: pathlib.Path) -> None:
    """The picture is a WebP of twice the width that a README has, small enough for a page."""
    folder = write_calibration(tmp_path / "out", random_generations(10))
    calibrated = read_calibrated(str(folder))
    (stored,) = folder.glob("generations/*")
    outputs = StoredOutputs.read(str(stored), calibrated.manifest)
    report = folder / "report.html"
    report.write_text(
        build_page(calibrated, outputs, vocabulary=None, sizes=None, most_examples=10, seed=0), encoding="utf-8"
    )
    picture = photographed(report, consistency="textual", delta=0.6, browser=find_browser())
    assert (picture[:4], picture[8:12]) == (b"RIFF", b"WEBP")
    assert len(picture) < 150_000
