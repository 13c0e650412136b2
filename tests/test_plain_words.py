"""Pages, docstrings, comments and messages use the words of the field: tests/plain_words.toml lists idioms."""

import ast
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_LIST = tomllib.loads((_ROOT / "tests" / "plain_words.toml").read_text(encoding="utf-8"))
_PAGES = [*sorted(_ROOT.glob("*.md")), *sorted(_ROOT.glob("docs/**/*.md")), *sorted(_ROOT.glob("examples/*/*.md"))]
_SOURCES = ("benchmarks", "calm_beam", "examples", "launch", "tests", "tools", "transforms")
_TURNS = [(re.compile(rf"\b(?:{each['turn']})\b", re.IGNORECASE), each["plain"]) for each in _LIST["turns"]]
# Headings and labels may begin with a pronoun.
_TURNS_OF_MESSAGES = [turn for turn in _TURNS if turn[1] != "begin with the noun"]
# As ruff formats them: on a line of their own, or after two spaces.
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_COMMENT = re.compile(r"(?:^\s*|  )# (.+)")


def _findings(texts: list[str], turns: Sequence[tuple[re.Pattern[str], str]] = _TURNS) -> list[str]:
    """Returns every listed idiom in some texts, with its context and its replacement."""
    found = []
    for text in texts:
        # Code is quoted unchanged, and a link's target is an address.
        words = " ".join(re.sub(r"`[^`]*`|(?<=\])\([^)]*\)", "X", text).split())
        for turn, plain in turns:
            for match in turn.finditer(words):
                around = words[max(0, match.start() - 40) : match.end() + 30]
                found.append(f"...{around}...: for {match[0]!r}, {plain}")
    return found


def _paragraphs(page: pathlib.Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.split(r"\n\s*\n", text)


def _docstrings_and_comments(source: str) -> list[str]:
    """Returns the docstrings and comments of a module; comments on consecutive lines are one."""
    docstrings = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, _DOCUMENTED)]
    comments: list[str] = []
    last = -1
    for number, line in enumerate(source.splitlines()):
        if comment := _COMMENT.search(line):
            if number == last + 1 and comments:
                comments[-1] += f" {comment[1]}"
            else:
                comments.append(comment[1])
            last = number
    return [text for text in docstrings if text] + comments


def _messages(source: str) -> list[str]:
    """Returns the texts in a module's code that have several words; values in them are an X."""
    tree = ast.parse(source)
    documented = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)}
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {part for node in formatted for part in node.values}
    plain = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts
    ]
    texts = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        for node in formatted
    ]
    return [text for text in plain + texts if " " in text and text not in documented]


def _findings_of_sources(
    tops: Iterable[str], read: Callable[[str], list[str]], turns: Sequence[tuple[re.Pattern[str], str]] = _TURNS
) -> list[str]:
    """Returns the findings in the texts that are read of every module below some folders, each with its file."""
    return [
        f"{path.relative_to(_ROOT)}: {line}"
        for top in tops
        for path in sorted((_ROOT / top).rglob("*.py"))
        for line in _findings(read(path.read_text(encoding="utf-8")), turns)
    ]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_pages_use_plain_words(page: pathlib.Path) -> None:
    """No page has a listed idiom."""
    assert _findings(_paragraphs(page)) == []


def test_docstrings_and_comments_use_plain_words() -> None:
    """No docstring and no comment has a listed idiom."""
    assert _findings_of_sources(_SOURCES, _docstrings_and_comments) == []


def test_messages_use_plain_words() -> None:
    """No error, help or other text of the package has a listed idiom; a heading may begin with a pronoun."""
    assert _findings_of_sources(("calm_beam", "launch", "transforms"), _messages, _TURNS_OF_MESSAGES) == []


def test_turns_are_found() -> None:
    """Idioms are found across lines, in docstrings and comments, and not in code, links or questions."""
    source = '"""As\nthere. `whoever`"""\nx = "whoever"  # Told\n# from it.\n'
    assert len(_findings(_docstrings_and_comments(source))) == 2
    assert len(_findings(["Rows end. What leaves is kept. What leaves? A row."])) == 1
    assert _messages('"""A b."""\nf("c d", f"{x} e {y}", "e")') == ["c d", "X e X"]
    assert _findings(["[a](whoever.md), as there is one; it stands in for another"]) == []
