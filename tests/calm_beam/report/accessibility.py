"""What axe finds on a page: by both themes, on a desktop and on a phone, with all that is folded opened."""

import importlib.resources
import itertools
import pathlib
from typing import Any

import pytest

from tests.calm_beam.report.browser import PHONE, opened

_OPEN = "() => { for (const each of document.querySelectorAll('details')) each.open = true; }"
_RUN = """async () => (await axe.run()).violations.flatMap((violation) =>
    violation.nodes.map((node) => `${violation.id} at ${node.target}: ${node.failureSummary}`))"""


def violations(browser: Any, page: pathlib.Path) -> list[str]:
    """Returns every violation that axe finds, its best practices among its rules."""
    axe = pytest.importorskip("axe_playwright_python", reason="needs axe: pip install 'calm-beam[dev]'")
    source = importlib.resources.files(axe).joinpath("axe.min.js").read_text(encoding="utf-8")
    found: list[str] = []
    for scheme, form in itertools.product(("light", "dark"), ({}, PHONE)):
        with opened(browser, page, color_scheme=scheme, **form) as seen:
            seen.page.evaluate(_OPEN)
            seen.page.evaluate(source)
            found += seen.page.evaluate(_RUN)
    return found
