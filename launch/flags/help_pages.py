"""What `--help` prints: the flags a newcomer needs, with examples; and `--help-all`, all of them.

Both are made of what stands elsewhere: the flags of the parser, and the docstring of the command's module, whose first
paragraph says what the command does, and whose indented blocks are examples, each below the paragraph that explains it.
"""

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

# Lines much longer than those of a book are hard to read.
_MOST_COLUMNS = 100
_LEAST_COLUMNS = 40
_LONGEST_CHOICES = 28
_PLACEHOLDERS = {"int": "N", "float": "X"}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Writes flags as they are typed, `--flag=VALUE`, and names defaults where the text does not."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=columns())

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        if text and action.choices is not None and _has_long_choices(action):
            # Some texts explain every choice.
            missing = [str(choice) for choice in action.choices if str(choice) not in text]
            text += f"; of {', '.join(map(str, action.choices))}" if missing else ""
        if text is None or action.default in (None, "", False, ()) or "default" in text:
            return text
        if isinstance(action.default, tuple):
            return f"{text} (default: {','.join(map(str, action.default))})"
        return f"{text} (default: %(default)s)"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _filled(" ".join(text.split()), width=width).splitlines()

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        return names if action.nargs == 0 else f"{names}={placeholder(action)}"


def whole_help(action: argparse.Action) -> str:
    """Returns what the help says of a flag, with nothing left to fill in."""
    if action.option_strings[:1] == ["-h"]:
        return "show the usual flags, and examples"
    if isinstance(action, ShowAll):
        return "show all flags"
    return (action.help or "") % {**vars(action), "prog": ""}


def columns() -> int:
    """Returns how wide a page of help is: as the terminal, within limits."""
    return max(_LEAST_COLUMNS, min(shutil.get_terminal_size().columns - 1, _MOST_COLUMNS))


def placeholder(action: argparse.Action) -> str:
    """Returns what stands for the value of a flag."""
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None and not _has_long_choices(action):
        return f"{{{','.join(map(str, action.choices))}}}"
    of_kind = getattr(action.type, "placeholder", None) or _PLACEHOLDERS.get(getattr(action.type, "__name__", ""))
    return of_kind or action.dest.rpartition("_")[2].upper()


def _has_long_choices(action: argparse.Action) -> bool:
    return len(",".join(map(str, action.choices or ()))) > _LONGEST_CHOICES


def summary(doc: str) -> str:
    r"""Returns what a docstring says first, without the name of the command.

    >>> summary("`calm-beam decode`: the sweep alone.\n\nRows come in the order of the data.")
    'The sweep alone.'
    """
    first = re.sub(r"\A`[^`]*`: ", "", doc.strip().split("\n\n")[0])
    return first[:1].upper() + first[1:].replace("\n", " ")


def examples(doc: str) -> tuple[tuple[str, str], ...]:
    r"""Returns the commands in a docstring, each with the paragraph before it if that ends in a colon.

    >>> examples("What it does.\n\nOn this machine:\n\n    calm-beam decode\n\nThat was it.")
    (('On this machine:', 'calm-beam decode'),)
    """
    found = []
    intro = ""
    for block in doc.split("\n\n"):
        if block.startswith("    calm-beam "):
            found.append((intro, textwrap.dedent(block).strip()))
            intro = ""
        else:
            text = " ".join(block.split())
            intro = text if text.endswith(":") else ""
    return tuple(found)


def help_page(parser: argparse.ArgumentParser, *, doc: str, shown: Collection[str] | None) -> str:
    """Returns a page of help.

    Args:
      parser: Knows the flags, in groups.
      doc: Docstring of the command.
      shown: Flags that are listed; None lists all.
    """
    formatter = parser._get_formatter()
    left_out = 0
    for group in parser._action_groups:
        listed = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        kept = [action for action in listed if shown is None or _is_shown(action, shown)]
        left_out += len(listed) - len(kept)
        if kept:
            formatter.start_section(_filled(group.title or ""))
            formatter.add_arguments(kept)
            formatter.end_section()
    parts = [f"usage: {parser.prog} {_arguments(parser)}", *_paragraphs(parser.description), formatter.format_help()]
    if commands := tuple(_example_lines(examples(doc))):
        parts.append("examples:\n" + "\n\n".join(commands))
    if left_out:
        parts.append(f"{left_out} more flags: {parser.prog} --help-all")
    parts.extend(_paragraphs(parser.epilog))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _is_shown(action: argparse.Action, shown: Collection[str]) -> bool:
    return not action.option_strings or action.required or any(name in shown for name in action.option_strings)


def _arguments(parser: argparse.ArgumentParser) -> str:
    positional = [str(action.metavar or action.dest.upper()) for action in parser._get_positional_actions()]
    return " ".join([*positional, "[flags]"])


def _paragraphs(text: str | None) -> Iterator[str]:
    if text:
        yield _filled(text)


def _filled(text: str, *, indent: str = "", width: int | None = None) -> str:
    """Returns a text in lines of a page, broken at spaces only: flags and hyphened words stay whole."""
    return textwrap.fill(
        text, width=width or columns(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _example_lines(commands: tuple[tuple[str, str], ...]) -> Iterator[str]:
    for intro, command in commands:
        lines = [_wrapped(line) for line in command.replace("\\\n", " ").splitlines()]
        if intro:
            lines.insert(0, _filled(intro, indent="  "))
        yield "\n".join(lines)


def _wrapped(command: str) -> str:
    """Returns a command on lines as long as the page's, which a shell takes for one."""
    lines = [" " * 4]
    for word in re.findall(r"(?:'[^']*'|\S)+", command):
        if lines[-1].strip() and len(lines[-1]) + len(word) + 3 > columns():
            lines.append(" " * 8)
        lines[-1] += word if not lines[-1].strip() else f" {word}"
    return " \\\n".join(lines)


class ShowAll(argparse.Action):
    """`--help-all`."""

    def __init__(self, option_strings: Any, dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Prints the page, and ends the process as `--help` does."""
        parser._print_message(parser.format_help_all(), sys.stdout)
        parser.exit()
