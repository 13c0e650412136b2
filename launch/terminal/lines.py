"""What is said on standard output and standard error, where text of others does nothing but be read."""

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from calm_beam.text import printable

_words: contextvars.ContextVar[Callable[[str], str]] = contextvars.ContextVar("_words", default=str)
_shows_details: contextvars.ContextVar[bool] = contextvars.ContextVar("_shows_details", default=False)


def say(text: object) -> None:
    """Prints progress, a warning or an error, to standard error."""
    _print(_words.get()(str(text)), sys.stderr)


def say_detail(text: object) -> None:
    """Prints what few want to know of a run, to standard error, where `show_details` was asked for."""
    if _shows_details.get():
        say(text)


def show_details(shown: bool) -> None:
    """Decides whether `say_detail` prints."""
    _shows_details.set(shown)


@contextlib.contextmanager
def said_as(words: Callable[[str], str]) -> Iterator[None]:
    """Within it, what is said is said in other words: for callers who have no flags."""
    token = _words.set(words)
    try:
        yield
    finally:
        _words.reset(token)


def tell(text: object) -> None:
    """Prints a result, to standard output."""
    _print(text, sys.stdout)


def wrapped(text: str, width: int) -> str:
    r"""Returns a text in lines of at most so many columns, broken at spaces only: words, paths and flags stay whole.

    Lines go on under their own indentation.

    >>> wrapped("a path: /some/long/path", 8)
    'a path:\n/some/long/path'
    """
    return "\n".join(piece for line in text.split("\n") for piece in _pieces(line, width))


def _pieces(line: str, width: int) -> list[str]:
    if cell_len(line) <= width:
        return [line]
    words = line.split(" ")
    indent = " " * next(index for index, word in enumerate(words) if word or index == len(words) - 1)
    pieces = [line[: len(indent)]]
    for word in words[len(indent) :]:
        is_first = not pieces[-1].strip()
        if not is_first and cell_len(pieces[-1]) + 1 + cell_len(word) > width:
            pieces.append(indent + word)
        else:
            pieces[-1] += word if is_first else f" {word}"
    return pieces


def _print(text: object, stream: TextIO) -> None:
    """Prints a text, in lines of a terminal's width if it is one; in logs and files, lines are as long as they are."""
    line = printable(str(text))
    console = Console(file=stream)
    print(wrapped(line, console.width) if console.is_terminal else line, file=stream)


class PlainConsole(Console):
    """Prints tables and texts of which neither control characters nor brackets mean anything."""

    def __init__(self, *, stderr: bool = False, **settings: Any) -> None:
        """Prepares to print on standard output or standard error."""
        # Highlighting takes quadratic time on long words.
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **settings)

    def say(self, text: str) -> None:
        """Prints prose: in lines of the terminal's width if this is one, else in a line as long as it is."""
        self.print(wrapped(text, self.width) if self.is_terminal else text, highlight=False, soft_wrap=True)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Returns what every text that is printed, and every cell of a table, becomes on its way."""
        return super().render_str(printable(text), **settings)
