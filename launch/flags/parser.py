"""The parser of flags: ours next to Beam's, every unknown one refused, with a config file and the text of `--help`.

`--config=FILE` reads options from a file, each by its name; flags given besides win.

`--help` prints the flags a newcomer needs, with examples; `--help-all` prints all of them. Both are made of the flags
of the parser and of the docstring of the command's module: its first paragraph says what the command does, and its
indented blocks are examples, each below the paragraph that explains it.
"""

import argparse
import difflib
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from calm_beam.errors import UsageError, os_error_in_words
from calm_beam.launch.terminal import command_lines, say_loading
from calm_beam.options.kinds import Kind
from calm_beam.storage import open_input
from calm_beam.storage.strict_json import StrictJSONError, loads
from calm_beam.text import written_float, written_int

if TYPE_CHECKING:
    pass
    from apache_beam.options.pipeline_options import PipelineOptions

    from calm_beam.options import Options


CONFIG_HELP = (
    "YAML or JSON file with options, each by its name, such as delta: [0.05, 0.1]; or a manifest, whose outputs are "
    "then decoded in the same way; flags that are given besides win"
)
_OF_THE_COMMAND_LINE = ("--config", "--json", "--require_threshold", "--log_to")
# Decoding settings in manifests that have no flag, or that may differ on another machine.
_NOT_OPTIONS = ("confidence_source", "engine")


class OptionOfFile(str):
    """A flag read from a config file; errors about it name the file and the key.

    Attributes:
      place: The file, and the key in it.
    """

    place: str

    @classmethod
    def of(cls, name: str, value: str | None, *, path: str) -> "OptionOfFile":
        """Returns the flag of an option; without a value where it takes none."""
        flag = cls(f"--{name}" if value is None else f"--{name}={value}")
        flag.place = f"{path}: {name}"
        return flag


def with_config(parser: "FlagParser", argv: Sequence[str]) -> list[str]:
    """Returns flags after those of the file that `--config` names, so that what is given wins.

    Raises:
      UsageError: If the file cannot be read, or has a value that its option does not take; names file and key.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    try:
        found, rest = finder.parse_known_args(list(argv))
    except SystemExit:
        # Without a value, which the parser itself says.
        return list(argv)
    path = found.config
    if path is None or not path.strip():
        return list(argv)
    return [*_flags_of(parser, _read(path), path=path), *rest]


def _read(path: str) -> Mapping[str, Any]:
    """Returns the options of a file, by name."""
    try:
        with open_input(path) as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"--config {os_error_in_words(error)}") from error
    try:
        content = loads(text) if text.lstrip().startswith(b"{") else _loads_yaml(text.decode("utf-8-sig"), path=path)
    except (StrictJSONError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: {error}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UsageError(f"--config {path}: expected options by name, such as delta: 0.1.")
    if str(content.get("schema", "")).startswith("calm-beam/manifest/"):
        decode = content.get("decode", {})
        return {name: value for name, value in decode.items() if name not in _NOT_OPTIONS}
    return content


def _loads_yaml(text: str, *, path: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(f"--config {path}: YAML needs pyyaml (pip install pyyaml). JSON does without.") from error

    # Refuses a key that is there twice, of which one would be lost.
    loader: Any = type("Loader", (yaml.SafeLoader,), {})

    def mapping(reader: Any, node: Any) -> dict[Any, Any]:
        pairs = reader.construct_pairs(node, deep=True)
        content = dict(pairs)
        if len(content) < len(pairs):
            raise UsageError(f"--config {path}: a key is there twice.")
        return content

    loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, loader)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--config {path}: not YAML: {' '.join(str(error).split())}.") from error


def _flags_of(parser: "FlagParser", content: Mapping[str, Any], *, path: str) -> Iterator[OptionOfFile]:
    """Yields the flags for the options of a file; an option whose value is null is left out."""
    for name, value in content.items():
        if f"--{name}" in _OF_THE_COMMAND_LINE:
            raise UsageError(f"{path}: {name} is given on the command line, and not in a file.")
        action = parser._option_string_actions.get(f"--{name}")
        if value is None or (action is not None and action.nargs == 0 and value is False):
            continue
        if action is not None and action.nargs == 0:
            if value is not True:
                raise UsageError(f"{path}: {name}: expected true or false, got {json.dumps(value, default=str)}.")
            yield OptionOfFile.of(name, None, path=path)
            continue
        if isinstance(value, bool) and action is not None:
            raise UsageError(f"{path}: {name}: expected a value, got {str(value).lower()}; quote it if it is a text.")
        # Beam's flags take several values by being given several times.
        values = value if isinstance(value, list) and action is None else [value]
        for each in values:
            written = None if each is True else _written(each, action, place=f"{path}: {name}")
            if action is not None and written is not None:
                _check(parser, action, written, place=f"{path}: {name}")
            yield OptionOfFile.of(name, written, path=path)


def _written(value: Any, action: argparse.Action | None, *, place: str) -> str:
    """Returns a value as the command line has it."""
    kind = action.type if action is not None and isinstance(action.type, Kind) else None
    if isinstance(value, dict):
        if kind is None or not kind.is_mapping:
            raise UsageError(f"{place}: expected a value or a list of values, got a mapping.")
        value = [f"{name}={each}" for name, each in value.items()]
    if not isinstance(value, list):
        return str(value)
    if kind is not None and kind.is_json:
        return kind.written(value)
    takes_list = kind is not None and kind.is_list
    if not takes_list or not value:
        raise UsageError(f"{place}: expected {'one or more values' if takes_list else 'one value'}, got {value!r:.60}.")
    parts = [str(each) for each in value]
    if any("," in part for part in parts):
        raise UsageError(f"{place}: a value in a list must have no comma, got {value!r:.60}.")
    return ",".join(parts)


def _check(parser: "FlagParser", action: argparse.Action, written: str, *, place: str) -> None:
    """Refuses a value that an option does not take."""
    try:
        parser._get_values(action, [written])
    except argparse.ArgumentError as error:
        raise UsageError(f"{place}: {error.message}.") from error
    if not written.strip() and action.default != "":
        raise UsageError(f"{place} is empty; leave it out, or give it a value.")


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
        wholes = command.replace("\\\n", " ").splitlines()
        lines = [line for whole in wholes for line in command_lines(f"    {whole}", columns(), hanging=4)]
        if intro:
            lines.insert(0, _filled(intro, indent="  "))
        yield "\n".join(lines)


class ShowAll(argparse.Action):
    """`--help-all`."""

    def __init__(self, option_strings: Any, dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Prints the page, and ends the process as `--help` does."""
        parser._print_message(parser.format_help_all(), sys.stdout)
        parser.exit()


# Shares of letters that two names have in common.
_ALIKE = 0.75
_MUCH_MORE_ALIKE = 0.15
# With its dashes; shorter ones begin too many names.
_LEAST_ABBREVIATION = 5


class HelpShown(SystemExit):
    """`--help` was asked for and shown; nothing else may end the process with success before its work is done."""


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` instead of ending the process, and takes no abbreviations.

    A flag that is given must have a value, unless no text at all is what it has by default: an empty path would be the
    current folder, and an empty name that of nothing. Scripts whose variables are not set write such flags.

    Attributes:
      request: What its flags make; None where none are options.
    """

    request: "type[Options] | None" = None

    def __init__(
        self,
        *,
        doc: str | None = None,
        essentials: Collection[str] | None = None,
        heading: str = "flags",
        add_help: bool = True,
        **kwargs: Any,
    ) -> None:
        """Makes a parser with the arguments of `argparse.ArgumentParser`, and more.

        Args:
          doc: Docstring of the command: says what it does, and holds examples.
          essentials: Flags that `--help` lists, besides those that must be given; None for all. `--help-all` lists
            every flag.
          heading: Of the flags that are in no group.
          add_help: Whether there are `--help` and `--help-all`.
          kwargs: Other arguments of `argparse.ArgumentParser`.
        """
        super().__init__(
            allow_abbrev=False, conflict_handler="resolve", formatter_class=HelpFormatter, add_help=False, **kwargs
        )
        # For every flag with a number: Python's `int` and `float` accept forms that users do not mean.
        self.register("type", float, written_float)
        self.register("type", int, written_int)
        self._doc, self._essentials = doc or "", essentials
        self.description = self.description or summary(self._doc)
        self._optionals.title = heading
        if add_help:
            self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
            self.add_argument("--help-all", action=ShowAll, help=argparse.SUPPRESS)

    def format_help(self) -> str:
        """Returns what `--help` prints."""
        return help_page(self, doc=self._doc, shown=self._essentials)

    def format_help_all(self) -> str:
        """Returns what `--help-all` prints."""
        return help_page(self, doc=self._doc, shown=None)

    # The base class has overloads for custom namespaces, which are not used here.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """Returns flags and unknown arguments; raises `UsageError` for an empty value."""
        args = self.whole(sys.argv[1:] if args is None else args)
        self._refuse_misspelt(args)
        flags, unknown = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(flags, action.dest, None)
            if isinstance(value, str) and not value.strip() and action.default != "":
                name = next(iter(action.option_strings), action.metavar or action.dest)
                self.error(f"{name} is empty; leave it out, or give it a value")
        return flags, unknown

    def _refuse_misspelt(self, args: Sequence[str]) -> None:
        """Raises `UsageError` for a misspelt flag that is required; the base class would only call it missing."""
        given = {text.split("=")[0]: text for text in args if text.startswith("--")}
        missing = [
            name
            for action in self._actions
            if action.required and given.keys().isdisjoint(action.option_strings)
            for name in action.option_strings
        ]
        for name, text in given.items():
            if name not in self._option_string_actions and _nearest(name, ours=missing, beams=()):
                _refuse_unknown([text], self)

    def add_config_flag(self) -> None:
        """Adds `--config`, the flag that names a file with others."""
        self.add_argument("--config", metavar="FILE", help=CONFIG_HELP)

    def whole(self, argv: Sequence[str]) -> list[str]:
        """Returns flags with those of a file before them, where `--config` is a flag and names one."""
        return with_config(self, argv) if "--config" in self._option_string_actions else list(argv)

    def section(self, title: str) -> argparse._ArgumentGroup:
        """Returns the group of flags below a heading, which is made if there is none."""
        found = (group for group in self._action_groups if group.title == title)
        return next(found, None) or self.add_argument_group(title)

    def error(self, message: str) -> NoReturn:
        """Raises `UsageError`."""
        raise UsageError(f"{message}. See {self.prog} --help.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raises `HelpShown`: only `--help` ends here, since errors do not."""
        raise HelpShown(status)

    def add_value_provider_argument(self, *args: Any, **kwargs: Any) -> None:
        """Adds a flag; part of the interface by which Beam's option classes declare theirs."""
        self.add_argument(*args, **kwargs)


def is_listed(action: argparse.Action) -> bool:
    """Returns whether completion and hints name a flag: old names of options are for old scripts alone."""
    return action.help != argparse.SUPPRESS or action.nargs == 0


def parse_own_flags(parser: FlagParser, argv: Sequence[str]) -> argparse.Namespace:
    """Returns the flags of a command that runs without Beam.

    Raises:
      UsageError: If a flag is unknown; names the nearest that is known.
    """
    flags, unknown = parser.parse_known_args(list(argv))
    _refuse_unknown(unknown, parser)
    return flags


def parse_flags(parser: FlagParser, argv: Sequence[str]) -> "tuple[argparse.Namespace, PipelineOptions]":
    """Returns our flags and Beam's.

    Args:
      parser: Knows our flags.
      argv: All flags, mixed freely.

    Raises:
      UsageError: If a flag is known to neither; names the nearest that is. Beam alone would log it and go on.
    """
    ours, rest = parser.parse_known_args(list(argv))
    # Here, since importing Beam takes seconds, and help and what is wrong with our own flags need none of it.
    say_loading("apache_beam", "jax")
    from apache_beam.options.pipeline_options import PipelineOptions

    beam_parser = FlagParser(prog=parser.prog, add_help=False)
    for options_class in _all_subclasses(PipelineOptions):
        if "_add_argparse_args" in vars(options_class):
            vars(options_class)["_add_argparse_args"].__get__(None, options_class)(beam_parser)
    _, unknown = beam_parser.parse_known_args(rest)
    _refuse_unknown(unknown, parser, beams=beam_parser._option_string_actions)
    return ours, PipelineOptions(rest)


def _refuse_unknown(unknown: Sequence[str], parser: FlagParser, *, beams: Iterable[str] = ()) -> None:
    if unknown:
        flag = unknown[0].split("=")[0]
        listed = [name for name, action in parser._option_string_actions.items() if is_listed(action)]
        nearest = _nearest(flag, ours=listed, beams=beams)
        if isinstance(unknown[0], OptionOfFile):
            hint = f" Did you mean {nearest.lstrip('-')}?" if nearest else ""
            raise UsageError(f"{unknown[0].place} is no option.{hint} See {parser.prog} --help.")
        hint = f" Did you mean {nearest}?" if nearest else ""
        kind = "flag" if flag.startswith("-") else "argument"
        raise UsageError(f"unknown {kind} {flag}.{hint} See {parser.prog} --help.")


def _nearest(flag: str, *, ours: Collection[str], beams: Iterable[str]) -> str | None:
    """Returns the flag that was probably meant, or None: a calm-beam flag unless one of Beam's is much more similar.

    An abbreviation of a calm-beam flag means that flag, unless another one of these is much more similar.
    """
    meant = [name for name in ours if name.startswith(flag) and len(flag) >= _LEAST_ABBREVIATION]
    if meant:
        closest, nearest = (max((_likeness(flag, name), name) for name in names) for names in (meant, ours))
        return nearest[1] if nearest[0] > closest[0] + _MUCH_MORE_ALIKE else closest[1]
    best_of_ours, best_of_beams = (
        max(((_likeness(flag, name), name) for name in names), default=(0.0, "")) for names in (ours, beams)
    )
    best = best_of_ours if best_of_ours[0] >= _ALIKE else best_of_beams
    if best_of_beams[0] > best[0] + _MUCH_MORE_ALIKE:
        best = best_of_beams
    return best[1] if best[0] >= _ALIKE else None


def _likeness(flag: str, name: str) -> float:
    """Returns how alike two flags are, from 0 to 1, the dashes before them apart."""
    return difflib.SequenceMatcher(None, flag.lstrip("-"), name.lstrip("-")).ratio()


def _all_subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return [*direct, *(below for subclass in direct for below in _all_subclasses(subclass))]
