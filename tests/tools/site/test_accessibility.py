"""The documentation site in a browser: what axe finds on pages of each kind."""

import pathlib
import subprocess
import sys

import pytest

from tests.calm_beam.report.accessibility import FORMS, violations_now
from tests.calm_beam.report.browser import needs_browser, started_browser

pytestmark = [pytest.mark.slow, *needs_browser]

_ROOT = pathlib.Path(__file__).parents[3]
# The door, code, wide tables, a tree of flags, what docstrings and a schema became, pictures.
_PAGES = (
    "index",
    "tutorials/embedded",
    "commands",
    "measurements",
    "laptop",
    "reference/flags/calibrate",
    "reference/api",
    "reference/manifest",
)


@pytest.mark.timeout(600)
def test_pages_of_the_site(tmp_path: pathlib.Path) -> None:
    """Neither by day nor by night, on a desktop or a phone, does axe find a violation."""
    built = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={tmp_path}"]
    subprocess.run(built, cwd=_ROOT, check=True, timeout=300)
    found: dict[str, list[str]] = {}
    with started_browser() as browser:
        for name in _PAGES:
            for scheme, form in FORMS:
                context = browser.new_context(
                    **{"viewport": {"width": 1280, "height": 900}, **form}, color_scheme=scheme
                )
                page = context.new_page()
                page.goto((tmp_path / f"{name}.html").as_uri())
                found.setdefault(name, []).extend(violations_now(page))
                context.close()
    assert found == {name: [] for name in _PAGES}
