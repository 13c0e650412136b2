"""MkDocs hooks, named in mkdocs.yml: generated pages, pages from other folders, and the links to them.

Pages under docs/ link to files of the repository as GitHub shows them. On the site, such a link leads to the page made
from the file, or to a copy of the file.
"""

import os
import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from calm_beam import __version__
from tools.site import flags, schema

_ROOT = pathlib.Path(__file__).parents[2]
# The environment variable with the repository's address, for builds that will be published.
_REPOSITORY = "REPOSITORY_URL"

# Pages of the site from outside docs/.
_ELSEWHERE = {
    "ARCHITECTURE.md": "architecture.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "examples/web_service/README.md": "examples/web_service.md",
}
_SOURCES = {page: source for source, page in _ELSEWHERE.items()}

_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_README_PART = re.compile(r"<!-- README: (.+) -->")
# The part before README's commands for a checkout, without the heading.
_BEGINNING = "its beginning"
_AFTER_BEGINNING = "Try it"
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> None:
    """Adds to every page's footer the site's version, and the address of the sources if it is known."""
    config.copyright = f"calm-beam {__version__}. {config.copyright}"
    if repository := os.environ.get(_REPOSITORY):
        # In the footer: Material's header link asks a server for the number of stars.
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": repository, "name": "Repository"}]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds generated pages, pages from other folders, and copies of linked files."""
    for source, page in _ELSEWHERE.items():
        if page != "index.md":
            files.append(File.generated(config, page, content=(_ROOT / source).read_text(encoding="utf-8")))
    for name, text in flags.pages().items():
        files.append(File.generated(config, f"reference/flags/{name}.md", content=text))
    linked = {target for file in files.documentation_pages() for target in _copies(file)}
    for path in sorted(linked):
        files.append(File.generated(config, f"files/{path}", content=(_ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the text of a page with its generated parts, and with links of the site."""
    if page.file.src_uri == "index.md":
        markdown = _README_PART.sub(lambda found: part_of_readme(found[1]), markdown)
        markdown = markdown.replace("<!-- version -->", f"Version {__version__}.")
    if page.file.src_uri == "reference/flags.md":
        markdown = markdown.replace("<!-- commands -->", flags.table())
    if page.file.src_uri == "reference/manifest.md":
        markdown = markdown.replace("<!-- keys -->", schema.tables())
    return with_links_of_the_site(markdown, page.file.src_uri)


def part_of_readme(name: str) -> str:
    """Returns a part of README for the home page: its beginning up to "Try it", or a section with its heading.

    Raises:
      ValueError: If there is no such section.
    """
    beginning, *sections = re.split(r"^(?=## )", (_ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    titles = [section.partition("\n")[0].removeprefix("## ") for section in sections]
    if name == _BEGINNING:
        before = sections[: titles.index(_AFTER_BEGINNING)]
        return "".join([beginning.partition("\n")[2], *before]).strip()
    return sections[titles.index(name)].strip()


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the HTML of a page; marks a table's empty corner as no heading, for screen readers."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def with_links_of_the_site(markdown: str, page: str) -> str:
    """Returns the text of a page with links to repository files replaced by links of the site.

    Args:
      markdown: The text in the repository.
      page: The page's name on the site.
    """
    parts = _FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda found: _on_the_site(found[1], page), part)
        for part in parts
    )


def _on_the_site(link: str, page: str) -> str:
    target, sign, anchor = link.partition("#")
    path = _path_in_repository(target, page)
    if path is None:
        return link
    place = _page_of(path) or f"files/{_file_of(path)}"
    return posixpath.relpath(place, posixpath.dirname(page) or ".") + sign + anchor


def _path_in_repository(target: str, page: str) -> str | None:
    """Returns the file or folder of the repository that a link means; None if there is no such file."""
    if not target or re.match(r"\w+:", target):
        return None
    source = _SOURCES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return path if not path.startswith("..") and (_ROOT / path).exists() else None


def _page_of(path: str) -> str | None:
    """Returns the page, or the picture in docs/, for a path of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return _ELSEWHERE.get(_file_of(path))


def _file_of(path: str) -> str:
    """Returns the path of a file; for a folder, that of the file that describes it."""
    return f"{path}/README.md" if (_ROOT / path).is_dir() else path


def _copies(file: File) -> list[str]:
    """Returns the files that a page links to and that are not pages of the site."""
    text = _FENCE.sub("", file.content_string)
    paths = [_path_in_repository(link.partition("#")[0], file.src_uri) for link in _LINK.findall(text)]
    return [_file_of(path) for path in paths if path is not None and _page_of(path) is None]
