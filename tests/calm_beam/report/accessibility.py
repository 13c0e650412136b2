"""Axe's findings on a page in both themes, on a desktop and on a phone, with all folded parts opened."""

import importlib.resources
import itertools
import pathlib
from typing import Any

import pytest

from tests.calm_beam.report.browser import PHONE, opened

FORMS: tuple[tuple[str, dict[str, Any]], ...] = tuple(itertools.product(("light", "dark"), ({}, PHONE)))
_OPEN = "() => { for (const each of document.querySelectorAll('details')) each.open = true; }"
_RUN = """async () => (await axe.run()).violations.flatMap((violation) =>
    violation.nodes.map((node) => `${violation.id} at ${node.target}: ${node.failureSummary}`))"""


def violations(browser: Any, page: pathlib.Path) -> list[str]:
    """Returns every violation that axe finds, best practices included."""
    found: list[str] = []
    for scheme, form in FORMS:
        with opened(browser, page, color_scheme=scheme, **form) as seen:
            found += violations_now(seen.page)
    return found


def violations_now(page: Any) -> list[str]:
    """Returns axe's findings on an open page of the browser, with folded parts opened."""
    axe = pytest.importorskip("axe_playwright_python", reason="needs axe: pip install 'calm-beam[dev]'")
    page.evaluate(_OPEN)
    page.evaluate(importlib.resources.files(axe).joinpath("axe.min.js").read_text(encoding="utf-8"))
    found: list[str] = page.evaluate(_RUN)
    return found
