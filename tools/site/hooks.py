"""Hooks of MkDocs, named in mkdocs.yml: pages that are made or lie elsewhere, and the links to them.

Pages under docs/ link to files of the repository as GitHub shows them. On the site, such a link leads to the page
that the file has become, or to a copy of the file.
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
# Its address, for who builds the site to be published.
_REPOSITORY = "REPOSITORY_URL"

# Pages of the site that lie outside of docs/.
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
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> None:
    """Says at the foot of every page which version the site is about, and where its sources are if that is known."""
    config.copyright = f"calm-beam {__version__}. {config.copyright}"
    if repository := os.environ.get(_REPOSITORY):
        # At the foot: what Material puts at the head asks a server for stars.
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": repository, "name": "Repository"}]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made, those that lie elsewhere, and copies of what is linked to."""
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
    """Returns the text of a page with what is made for it, and with the links of the site."""
    if page.file.src_uri == "index.md":
        markdown = markdown.replace("<!-- version -->", f"Version {__version__}.")
    if page.file.src_uri == "reference/flags.md":
        markdown = markdown.replace("<!-- commands -->", flags.table())
    if page.file.src_uri == "reference/manifest.md":
        markdown = markdown.replace("<!-- keys -->", schema.tables())
    return with_links_of_the_site(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the HTML of a page; an empty corner of a table is no heading to screen readers."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def with_links_of_the_site(markdown: str, page: str) -> str:
    """Returns the text of a page with links to files of the repository made links to what they are on the site.

    Args:
      markdown: As in the repository.
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
    """Returns which file or folder of the repository a link means; None for what is none that is there."""
    if not target or re.match(r"\w+:", target):
        return None
    source = _SOURCES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return path if not path.startswith("..") and (_ROOT / path).exists() else None


def _page_of(path: str) -> str | None:
    """Returns the page, or the picture in docs/, that a path of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return _ELSEWHERE.get(_file_of(path))


def _file_of(path: str) -> str:
    """Returns the path of a file; of a folder, that of what says what is in it."""
    return f"{path}/README.md" if (_ROOT / path).is_dir() else path


def _copies(file: File) -> list[str]:
    """Returns the files that a page links to and that are no pages of the site."""
    text = _FENCE.sub("", file.content_string)
    paths = [_path_in_repository(link.partition("#")[0], file.src_uri) for link in _LINK.findall(text)]
    return [_file_of(path) for path in paths if path is not None and _page_of(path) is None]
