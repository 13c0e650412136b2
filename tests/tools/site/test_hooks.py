"""Links of pages on the site."""

import re

import pytest
from mkdocs.config.defaults import MkDocsConfig

from calm_beam import __version__
from tests.snippets import ROOT
from tools.site.doctests import with_blocks
from tools.site.hooks import on_config, part_of_readme, with_links_of_the_site


def test_links_of_the_repository_become_links_of_the_site() -> None:
    """A link leads to the page made from a file, or to its copy; other links, and code, are unchanged."""
    text = "[a](../BENCHMARKS.md#losses) [b](../examples/web_service) [c](../setup.py) "
    same = "[d](data.md) [e](https://example.org) [f](#g)"
    assert with_links_of_the_site(text + same, "faq.md") == (
        f"[a](benchmarks.md#losses) [b](examples/web_service.md) [c](files/setup.py) {same}"
    )
    assert with_links_of_the_site("```\n[a](../setup.py)\n```", "faq.md") == "```\n[a](../setup.py)\n```"


def test_links_of_pages_that_lie_elsewhere() -> None:
    """Links in ARCHITECTURE.md and in examples are resolved from the folders of these files."""
    assert with_links_of_the_site("[a](docs/data.md)", "architecture.md") == "[a](data.md)"
    assert with_links_of_the_site("[a](../../docs/data.md)", "examples/web_service.md") == "[a](../data.md)"
    assert with_links_of_the_site("[a](../../examples/calibrate.ipynb)", "how-to/x.md") == (
        "[a](../files/examples/calibrate.ipynb)"
    )


def test_links_to_nothing_are_left_for_mkdocs_to_refuse() -> None:
    """A link to a missing file is left unchanged, so that the strict build names it."""
    assert with_links_of_the_site("[a](../none.md)", "faq.md") == "[a](../none.md)"


def test_examples_in_docstrings_become_blocks() -> None:
    """Example lines in docstrings, and their output, become code; the text around them does not."""
    assert with_blocks("Adds.\n\n>>> add(1, 2)\n3\n\nMore.") == "Adds.\n\n```pycon\n>>> add(1, 2)\n3\n```\n\nMore."
    assert with_blocks("Nothing to show.") == "Nothing to show."


def test_the_version_is_at_the_foot_and_sources_where_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is at the foot of pages; the sources' address is too if the build names it."""
    for address in ("", "https://example.org/calm-beam"):
        monkeypatch.setenv("REPOSITORY_URL", address)
        config = MkDocsConfig()
        config.load_dict({"site_name": "calm-beam", "copyright": "Apache-2.0", "extra": {}})
        on_config(config)
        assert config.copyright == f"calm-beam {__version__}. Apache-2.0"
        assert [each["link"] for each in config.extra.get("social", ())] == ([address] if address else [])


def test_nothing_comes_from_elsewhere() -> None:
    """The site fetches no font, script or style from a server."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "\n  font: false\n" in text
    assert not re.search(r"https?://", text)


def test_the_home_page_has_parts_of_readme() -> None:
    """The home page names README's parts, all of which exist; another name is refused."""
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    names = re.findall(r"<!-- README: (.+) -->", home)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(names) == 2
    for name in names:
        part = part_of_readme(name)
        assert len(part) > 500
        assert part in readme
    with pytest.raises(ValueError, match="is not in list"):
        part_of_readme("Nothing of the kind")
