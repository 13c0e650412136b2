"""Lines, tables and results on standard output and error. Text from others is printed as text, without effect.

`--json` prints the result of a command for other programs; messages for people then go to standard error.
"""

import contextlib
import contextvars
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from calm_beam.text import printable

_COMMAND, _GOES_ON = "calm-beam ", " \\"
# Quoted parts, as `shlex.quote` writes them, belong to the word around them.
_SHELL_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")

_LIBRARIES = {"apache_beam": "Apache Beam", "jax": "JAX"}

_words: contextvars.ContextVar[Callable[[str], str]] = contextvars.ContextVar("_words", default=str)
_shows_details: contextvars.ContextVar[bool] = contextvars.ContextVar("_shows_details", default=False)


def say(text: object) -> None:
    """Prints progress, a warning or an error, to standard error."""
    _print(_words.get()(str(text)), sys.stderr)


def say_loading(*modules: str) -> None:
    """Says on a terminal which libraries are loaded next, since that takes seconds; nothing if all of them are."""
    missing = [_LIBRARIES[module] for module in modules if module not in sys.modules]
    if missing and sys.stderr.isatty():
        say(f"loading {' and '.join(missing)}")


def say_detail(text: object) -> None:
    """Prints what few want to know of a run, to standard error, where `show_details` was asked for."""
    if _shows_details.get():
        say(text)


def show_details(shown: bool) -> None:
    """Decides whether `say_detail` prints."""
    _shows_details.set(shown)


@contextlib.contextmanager
def said_as(words: Callable[[str], str]) -> Iterator[None]:
    """Rewords messages printed within this context, for callers without flags."""
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

    Lines go on under their own indentation. An indented line that begins with `calm-beam` is a command: it is broken
    between words of the shell, with a backslash, so that it runs as pasted.

    >>> wrapped("a path: /some/long/path", 8)
    'a path:\n/some/long/path'
    >>> print(wrapped("  calm-beam generate --prompt='Two words'", 24))
      calm-beam generate \
        --prompt='Two words'
    """
    return "\n".join(piece for line in text.split("\n") for piece in _pieces(line, width))


def _pieces(line: str, width: int) -> list[str]:
    if cell_len(line) <= width:
        return [line]
    if line.startswith("  ") and line.lstrip(" ").startswith(_COMMAND):
        return command_lines(line, width)
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


def command_lines(line: str, width: int, *, hanging: int = 2) -> list[str]:
    """Returns the lines of a command, each but the last with a backslash at its end: a shell takes them for one.

    Args:
      line: The command, indented or not.
      width: Most columns of a line.
      hanging: By how many columns further lines are indented more than the first.
    """
    indent = " " * (len(line) - len(line.lstrip(" ")))
    first, *words = _SHELL_WORD.findall(line)
    pieces = [indent + first]
    for word in words:
        # A space and the backslash have to fit too.
        if cell_len(pieces[-1]) + 1 + cell_len(word) + len(_GOES_ON) > width:
            pieces[-1] += _GOES_ON
            pieces.append(f"{indent}{' ' * hanging}{word}")
        else:
            pieces[-1] += f" {word}"
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


class PlainTable(Table):
    """A table with its title at the left, and no line but one below its head."""

    def __init__(self, title: str, **settings: Any) -> None:
        """Prepares a table without columns; `settings` as of `rich.table.Table`."""
        super().__init__(box=box.SIMPLE_HEAD, pad_edge=False, **settings)
        self._heading = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the title, in lines of the terminal's width and not of the table's, and the table."""
        yield console.render_str(self._heading, style="table.title")
        yield from super().__rich_console__(console, options)

    def add_numbers(self, *names: str) -> None:
        """Adds columns whose cells stand at the right, and are never broken: numbers that are cut would be others."""
        for name in names:
            self.add_column(name, justify="right", no_wrap=True)


@dataclasses.dataclass
class Outcome:
    """The outcome of a command.

    Attributes:
      result: What it found; None if it ended without a result.
      is_proved: Whether anything was proved; None where nothing was to be.
      files: What people look at of what was written; some may not be there.
      status: Exit status, once the command has ended.
      on_step: Called with the numbers of each training step; None if nothing logs them.
    """

    result: Any = None
    is_proved: bool | None = None
    files: Sequence[str] = ()
    status: int = 0
    on_step: Callable[[int, Mapping[str, float]], None] | None = None


_outcome: contextvars.ContextVar[Outcome | None] = contextvars.ContextVar("_outcome", default=None)


@contextlib.contextmanager
def outcome_of_command(*, as_json: bool) -> Iterator[Outcome]:
    """Within it, `give` takes the result of a command.

    Args:
      as_json: Whether the result is printed at the end, and nothing else to standard output.
    """
    outcome = Outcome()
    token = _outcome.set(outcome)
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            yield outcome
    finally:
        _outcome.reset(token)
    if as_json:
        print(json.dumps(_plain(outcome.result), ensure_ascii=False, indent=1))


def give(result: Any, *, is_proved: bool | None = None, files: Sequence[str] = ()) -> None:
    """Records the result of a command for `--json` and trackers; Python functions return theirs.

    Args:
      result: Mappings, lists, dataclasses and numbers.
      is_proved: As in `Outcome`.
      files: As in `Outcome`.
    """
    outcome = _outcome.get()
    if outcome is not None:
        outcome.result, outcome.is_proved, outcome.files = result, is_proved, files


def give_step(step: int, values: Mapping[str, float]) -> None:
    """Passes the numbers of a training step to the experiment tracker, if there is one."""
    outcome = _outcome.get()
    if outcome is not None and outcome.on_step is not None:
        outcome.on_step(step, values)


def _plain(value: Any) -> Any:
    """Returns a value as JSON can hold it: numbers that are not finite become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        # A number of numpy's.
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
