"""Accessible pages: axe, keyboards, paper, and readers who switch motion off."""

import pathlib
from typing import Any

import pytest

from calm_beam.report.document import Document, Section, details, file_text, number, table
from tests.calm_beam.report.accessibility import violations
from tests.calm_beam.report.browser import needs_browser, opened

pytestmark = needs_browser

_ROWS = [("b", number(10, "d")), ("a10", number(9, "d")), ("a9", number(None))]


@pytest.fixture
def document(tmp_path: pathlib.Path) -> pathlib.Path:
    """A page with a table."""
    made = Document(
        kind="test",
        title="a page",
        made="now",
        heading="Heading",
        opening="",
        sections=[
            Section(title="Table", content=table(("name", "number"), _ROWS, label="Table of it")),
            Section(title="More", content=details("All of it", '<p id="folded">folded</p>')),
        ],
        about="Facts",
        facts=[("Name", "value")],
        fewer="",
    ).text()
    path = tmp_path / "page.html"
    path.write_text(made, encoding="utf-8")
    return path


def test_axe_finds_what_is_wrong(browser: Any, document: pathlib.Path) -> None:
    """A page has no violations, and one without a language has, so the test would notice."""
    assert violations(browser, document) == []
    text = document.read_text(encoding="utf-8")
    document.write_text(text.replace('<html lang="en">', "<html>"), encoding="utf-8")
    assert any(found.startswith("html-has-lang at html") for found in violations(browser, document))


def test_the_report_has_no_violations(browser: Any, report: pathlib.Path) -> None:
    """The report of a calibration with outputs has no violations."""
    assert violations(browser, report) == []


def test_heads_sort(browser: Any, document: pathlib.Path) -> None:
    """Heads sort by keyboard: numbers as numbers, names naturally, empty cells last; the order is announced."""
    with opened(browser, document) as seen:
        names = seen.page.locator("tbody th")
        head = seen.page.get_by_role("button", name="number")
        head.focus()
        for sorted_by, expected in (("ascending", ["a10", "b", "a9"]), ("descending", ["b", "a10", "a9"])):
            seen.page.keyboard.press("Enter")
            assert names.all_text_contents() == expected
            assert seen.page.locator(f'th[aria-sort="{sorted_by}"]').text_content() == "number"
        seen.page.get_by_role("button", name="name").click()
        assert names.all_text_contents() == ["a9", "a10", "b"]
        assert seen.page.locator("th[aria-sort]").count() == 1


def test_the_switch_of_themes(browser: Any, document: pathlib.Path) -> None:
    """The switch exists if scripts run, and overrides the system's theme."""
    background = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, document, color_scheme="dark") as seen:
        before = seen.page.evaluate(background)
        seen.page.get_by_role("button", name="Switch between light and dark").click()
        assert seen.page.evaluate(background) != before
    assert 'aria-label="Switch between light and dark" hidden>' in document.read_text(encoding="utf-8")


def test_paper_has_everything(browser: Any, document: pathlib.Path) -> None:
    """A printed page is light, without switches, and nothing is folded or scrolled away."""
    shown = "(each) => each.checkVisibility({ contentVisibilityAuto: true }) && each.getBoundingClientRect().height > 0"
    with opened(browser, document, color_scheme="dark") as seen:
        assert not seen.page.locator("#folded").evaluate(shown)
        seen.page.emulate_media(media="print")
        assert seen.page.locator("#folded").evaluate(shown)
        assert seen.page.evaluate("getComputedStyle(document.body).colorScheme") == "light"
        assert not seen.page.locator("#theme").is_visible()
        assert seen.page.locator(".scroll").evaluate("(each) => getComputedStyle(each).overflow") == "visible"


def test_nothing_moves() -> None:
    """No page has motion that a reader would have to switch off."""
    style = file_text("report.css")
    assert "transition" not in style
    assert "animation" not in style
    assert "scroll-behavior" not in style
