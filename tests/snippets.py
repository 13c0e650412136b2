"""Code blocks and commands of pages, for tests that run them."""

import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))


def blocks(page: pathlib.Path, language: str) -> list[str]:
    """Returns the blocks of a language on a page, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: pathlib.Path) -> list[list[str]]:
    """Returns the words of every command in the shell blocks of a page, without comments."""
    text = "".join(blocks(page, "sh") + blocks(page, "bash")).replace("\\\n", " ")
    lines = (line.partition(" # ")[0].strip() for line in text.splitlines())
    return [shlex.split(line, comments=True) for line in lines if line and not line.startswith("#")]


def own_commands(page: pathlib.Path) -> list[list[str]]:
    """Returns the flags of every calm-beam command on a page, the name of the command first."""
    whole = [words[1:] for words in commands(page) if words[0] == "calm-beam"]
    # Up to the place where the shell redirects the output, if it does.
    return [words[: words.index(">")] if ">" in words else words for words in whole]
