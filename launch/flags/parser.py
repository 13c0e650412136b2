"""Flags: ours next to Beam's, with every unknown one refused."""

import argparse
import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from calm_beam.errors import UsageError
from calm_beam.text import written_float, written_int

from .config import CONFIG_HELP, OptionOfFile, with_config
from .help_pages import HelpFormatter, ShowAll, help_page, summary

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

    from calm_beam.options import Options


# Shares of letters that two names have in common.
_ALIKE = 0.6
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
        """Takes what `argparse.ArgumentParser` does, and more.

        Args:
          doc: Docstring of the command: says what it does, and holds examples.
          essentials: Flags that `--help` lists, besides those that must be given; None for all. `--help-all` lists
            every flag.
          heading: Of the flags that are in no group.
          add_help: Whether there are `--help` and `--help-all`.
          kwargs: As there.
        """
        super().__init__(
            allow_abbrev=False, conflict_handler="resolve", formatter_class=HelpFormatter, add_help=False, **kwargs
        )
        # Whatever flag asks for a number: Python's own functions read more than anybody means.
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

    # The base class has overloads for namespaces of one's own, of which there are none here.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """Returns flags and unknown arguments; raises `UsageError` for an empty value."""
        flags, unknown = super().parse_known_args(args if args is None else self.whole(args), namespace)
        for action in self._actions:
            value = getattr(flags, action.dest, None)
            if isinstance(value, str) and not value.strip() and action.default != "":
                name = next(iter(action.option_strings), action.metavar or action.dest)
                self.error(f"{name} is empty; leave it out, or give it a value")
        return flags, unknown

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


def _nearest(flag: str, *, ours: Iterable[str], beams: Iterable[str]) -> str | None:
    """Returns the flag that was probably meant: one of ours unless one of Beam's is much more like it, or None.

    Whoever abbreviates one of ours means that one.
    """
    meant = [name for name in ours if name.startswith(flag) and len(flag) >= _LEAST_ABBREVIATION]
    if meant:
        return max(meant, key=lambda name: _likeness(flag, name))
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
