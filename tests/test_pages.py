"""README and the other pages: links have targets, named paths exist, and README stays short."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGES = [*sorted(_ROOT.glob("*.md")), *sorted(_ROOT.glob("docs/**/*.md")), *sorted(_ROOT.glob("examples/*/*.md"))]
_ARCHITECTURE = (_ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
_DECISIONS = sorted((_ROOT / "docs" / "decisions").glob("[0-9]*.md"))

_THEMES = ("gh-light-mode-only", "gh-dark-mode-only")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PICTURES = [
    _ROOT / target for target in re.findall(r"!\[[^]]+\]\(([^)]+)\)", (_ROOT / "README.md").read_text("utf-8"))
]
# In backticks or in a column of their own: a folder or a module.
_PATH = re.compile(r"(?<![\w/.-])((?:[\w-]+/)+(?:[\w-]+\.\w+)?|\w+\.py)(?![\w/])")
# Folders whose names are left out where the context is clear.
_ROOMS = (
    "",
    "calm_beam",
    "calm_beam/decoding",
    "calm_beam/model",
    "calm_beam/generations",
    "calm_beam/report",
    "launch",
    "launch/evaluate",
    "tools",
)


def _text_without_code(page: pathlib.Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def _anchors(page: pathlib.Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _text_without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken_links(page: pathlib.Path) -> list[str]:
    broken = []
    for link in _LINK.findall(_text_without_code(page)):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        # The theme decides which of two pictures a reader sees.
        anchor = "" if anchor in _THEMES else anchor
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    return broken


def _missing_paths(text: str) -> list[str]:
    return [path for path in _PATH.findall(text) if not any((_ROOT / room / path).exists() for room in _ROOMS)]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    """Every link to a file, and to a heading in one, has its target."""
    assert _broken_links(page) == []


def test_broken_links_are_found(tmp_path: pathlib.Path) -> None:
    """A link to a missing file, or to a missing heading, is found."""
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[one](#a-heading) [two](#none) [three](none.md) [four](page.md#a-heading)\n")
    assert _broken_links(page) == ["#none", "none.md"]


def test_paths_of_the_architecture_exist() -> None:
    """Every folder and module that ARCHITECTURE.md and the decisions name exists."""
    named = "".join([_ARCHITECTURE, *(page.read_text(encoding="utf-8") for page in _DECISIONS)])
    assert len(_PATH.findall(named)) > 100
    assert _missing_paths(named) == []
    assert _missing_paths("`risk/no_such.py`, `no_room/` and no_such.py") == [
        "risk/no_such.py",
        "no_room/",
        "no_such.py",
    ]


def test_every_room_is_in_the_architecture() -> None:
    """ARCHITECTURE.md names every package of the core and of the launcher."""
    rooms = {
        f"{folder.name}/"
        for floor in ("calm_beam", "launch")
        for folder in (_ROOT / floor).iterdir()
        if (folder / "__init__.py").is_file() and not folder.is_symlink()
    }
    assert {room for room in rooms if f"`{room}" not in _ARCHITECTURE} == set()


def test_decisions_are_numbered_and_dated() -> None:
    """Every decision has its file's number, a date, what and why; the list has each once, in order."""
    pages = {page.name: page.read_text(encoding="utf-8") for page in _DECISIONS}
    assert [int(name.partition("-")[0]) for name in pages] == list(range(1, len(pages) + 1))
    parts = r"# (\d+)\. (.+)\n\n\*(\d{4}-\d\d-\d\d)\*\n\n\*\*What\.\*\* [^\0]+\n\n\*\*Why\.\*\* "
    lines = []
    for name, text in pages.items():
        number, title, date = re.match(parts, text).groups()  # type: ignore[union-attr]
        lines.append(f"| [{number}]({name}) | {title} | {date} |")
    index = (_ROOT / "docs" / "decisions" / "index.md").read_text(encoding="utf-8")
    assert [line for line in index.splitlines() if line.startswith("| [")] == lines


def test_the_door_is_small() -> None:
    """README has at most 1,200 words, and two small pictures besides badges; ARCHITECTURE.md has at most 700 words."""
    assert len((_ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1200
    assert len(_ARCHITECTURE.split()) <= 700
    assert len([picture for picture in _PICTURES if not picture.name.startswith("badge-")]) == 2
    pictures = [*_PICTURES, *(_ROOT / "docs" / "pictures").iterdir()]
    assert all(picture.stat().st_size < 150_000 for picture in pictures)
