"""The documentation site in a browser: axe on pages of each kind, and search without a server."""

import pathlib
import subprocess
import sys

import pytest

from calm_beam import __version__
from tests.calm_beam.report.accessibility import FORMS, violations_now
from tests.calm_beam.report.browser import SeenPage, needs_browser, started_browser

pytestmark = needs_browser

_ROOT = pathlib.Path(__file__).parents[3]
# README, code, wide tables, a tree of flags, docstrings, a schema, and pictures.
_PAGES = (
    "index",
    "tutorials/demo",
    "commands",
    "measurements",
    "laptop",
    "reference/flags/calibrate",
    "reference/api",
    "reference/manifest",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    built = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={folder}"]
    subprocess.run(built, cwd=_ROOT, check=True, timeout=300)
    return folder


# Axe takes minutes for the largest pages on a busy machine.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _PAGES)
def test_pages_of_the_site(site: pathlib.Path, name: str) -> None:
    """Axe finds no violation in light or dark mode, on a desktop or a phone."""
    found: list[str] = []
    with started_browser() as browser:
        for scheme, form in FORMS:
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **form}, color_scheme=scheme)
            page = context.new_page()
            page.goto((site / f"{name}.html").as_uri())
            found.extend(violations_now(page))
            context.close()
    assert found == []


@pytest.mark.timeout(600)
def test_search_works_from_a_disk(site: pathlib.Path) -> None:
    """From the disk, without the network, a search finds pages of the site without an error."""
    with started_browser() as browser:
        seen = SeenPage(browser.new_page(viewport={"width": 1280, "height": 900}))
        seen.page.goto((site / "reference/flags/calibrate.html").as_uri())
        seen.page.locator("input.md-search__input").click()
        seen.page.keyboard.type("threshold")
        first = seen.page.locator("a.md-search-result__link").first
        first.wait_for()
        assert str(first.get_attribute("href")).startswith(site.as_uri())
        assert seen.messages == []
        assert [request for request in seen.requests if not request.startswith("file:")] == []


@pytest.mark.timeout(600)
def test_pages_stay_in_their_box(site: pathlib.Path) -> None:
    """On a desktop and on a phone no page of flags is wider than the window, and its foot has the version."""
    with started_browser() as browser:
        for width in (390, 1280):
            page = browser.new_page(viewport={"width": width, "height": 900})
            for path in sorted((site / "reference/flags").glob("*.html")):
                page.goto(path.as_uri())
                assert page.evaluate("() => document.documentElement.scrollWidth") == width, path.name
            assert __version__ in page.locator(".md-copyright").inner_text()
