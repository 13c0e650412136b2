"""The reference of all commands' flags, generated from their parsers."""

import argparse
import html
import re

from calm_beam.launch.commands import COMMANDS, flag_parsers
from calm_beam.launch.flags.parser import examples, placeholder

# Commands with several forms, and the special ones: the name of the page, and the flag that selects the form.
_FORMS = {
    "evaluate": {
        name: f"calm-beam evaluate --experiment={name}" for name in ("propagation", "sensitivity", "tradeoff")
    },
}


def pages() -> dict[str, str]:
    """Returns a page of flags for every form of every command, by its name."""
    found = {}
    for command in COMMANDS:
        usual, *others = flag_parsers(command)
        found[command] = _page(usual, examples_of=usual._doc)
        for (name, title), parser in zip(_FORMS.get(command, {}).items(), others, strict=True):
            found[f"{command}-{name}"] = _page(parser, title=title)
    return found


def table() -> str:
    """Returns the table of these pages, as Markdown."""
    rows = [f"| {_link(command)}{_others(command)} | {does} |" for command, does in COMMANDS.items()]
    return "\n".join(["| command | does |", "|---|---|", *rows])


def _others(command: str) -> str:
    links = [_link(f"{command}-{name}", name) for name in _FORMS.get(command, {})]
    return f" ({', '.join(links)})" if links else ""


def _link(page: str, name: str = "") -> str:
    return f"[`{name or page}`](flags/{page}.md)"


def _page(parser: argparse.ArgumentParser, *, title: str = "", examples_of: str = "") -> str:
    """Returns a parser's page: the command's description, and its flags by group.

    Args:
      parser: The command's parser.
      title: Heading of the page; the command's name if empty.
      examples_of: The docstring whose examples the page shows.
    """
    parts = [f"# {title or parser.prog}", _prose(parser.description or "")]
    for said, command in examples(examples_of):
        parts += [said, f"```sh\n{command}\n```"]
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if actions:
            parts.extend(_titled(group.title or ""))
            parts.extend(_described(action, formatter) for action in actions)
    return "\n\n".join(part for part in parts if part) + "\n"


def _titled(title: str) -> list[str]:
    """Returns a heading for a group, followed by the part of its title in brackets."""
    name, _, remark = title.removesuffix(")").partition(" (")
    # argparse's own group names say little.
    name = {"options": "Flags", "positional arguments": "Arguments"}.get(name, name)
    return [f"## {_capital(name)}", *([f"{_capital(_prose(remark))}."] if remark else [])]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _described(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """Returns an entry of a definition list: the flag and its help."""
    required = "required; " if action.required and action.option_strings else ""
    return f"{_names(action)}\n:   {required}{_prose(formatter._expand_help(action))}"


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest.upper()}`"
    value = "" if action.nargs == 0 else f"={placeholder(action)}"
    return ", ".join(f"`{name}{value}`" for name in action.option_strings)


def _prose(text: str) -> str:
    """Returns help as Markdown: flag names as code, and everything else escaped."""
    words = re.sub(r"\s+", " ", text.replace("`", "")).strip()
    marked = re.sub(r"(?<![\w-])(--\w[\w.-]*(?:=[^\s;,()]+)?)", r"`\1`", words)
    # Escapes only outside code.
    pieces = re.split(r"(`[^`]*`)", marked)
    return "".join(piece if piece.startswith("`") else _escaped(piece) for piece in pieces)


def _escaped(text: str) -> str:
    return re.sub(r"([*_\[\]])", r"\\\1", html.escape(text, quote=False))
