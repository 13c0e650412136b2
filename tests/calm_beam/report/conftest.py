"""A browser, and a report to open in it."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from calm_beam.outputs import Generation
from calm_beam.report import StoredOutputs, build_page, read_calibrated
from tests.calm_beam.report.browser import EVIL, started_browser
from tests.calm_beam.report.builders import random_generations, write_calibration


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser."""
    with started_browser() as started:
        yield started


@pytest.fixture(scope="module")
def generations() -> list[Generation]:
    """Thirty examples; one has markup in all its texts, one failed."""
    items = random_generations(30)
    example = dataclasses.replace(items[3].example, id="evil", input=EVIL, references=(EVIL,))
    items[3] = dataclasses.replace(items[3], example=example)
    items[5] = dataclasses.replace(items[5], outputs=(), failure="lost")
    return items


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, generations: list[Generation]) -> pathlib.Path:
    """Their report."""
    folder = write_calibration(tmp_path_factory.mktemp("browser") / "out", generations)
    calibrated = read_calibrated(str(folder))
    (stored,) = folder.glob("generations/*")
    page = build_page(
        calibrated,
        StoredOutputs.read(str(stored), calibrated.manifest),
        vocabulary=None,
        sizes=None,
        most_examples=500,
        seed=0,
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path
