"""Flags that are derived from declared options, and requests that are made of flags."""

import argparse
import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from calm_beam.errors import as_usage
from calm_beam.launch.terminal import show_details
from calm_beam.options import OptionError, Options, options_of
from calm_beam.options.option import Option, default_of, own_options_of

from .parser import FlagParser, parse_flags, parse_own_flags

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

_Request = TypeVar("_Request", bound=Options)


def add_request(parser: FlagParser, request: type[Options]) -> None:
    """Adds a flag for every option of a request, in the order in which it lists its groups, and `--config`."""
    parser.request = request
    parser.add_config_flag()
    declared, added = dict(options_of(request)), set()
    groups = [group for group in request.__mro__ if issubclass(group, Options)]
    for group in (*groups[1:], request):
        for name, _ in own_options_of(group):
            if name not in added:
                added.add(name)
                # As the request has it, which may have another default.
                heading, default = group.SECTION, default_of(request, name)
                target = parser if heading is None else parser.section(heading)
                _add_flag(target, name, declared[name], default=default)


def request_parser(
    command: str, request: type[Options], *, doc: str | None, essentials: Collection[str] | None = None, **settings: Any
) -> FlagParser:
    """Returns the parser of a command whose flags are the options of a request.

    Args:
      command: Its name.
      request: What the flags make.
      doc: Docstring of the command, as in `FlagParser`.
      essentials: As there.
      settings: Others as there.
    """
    parser = FlagParser(prog=f"calm-beam {command}", doc=doc, essentials=essentials, **settings)
    add_request(parser, request)
    return parser


def parsed(kind: type[_Request], argv: Sequence[str], *, parser: FlagParser) -> _Request:
    """Returns the request that flags make for a command without Beam.

    Raises:
      UsageError: If a flag is unknown or malformed, or does not go with the others.
    """
    with as_usage():
        return _checked(kind, parse_own_flags(parser, argv), argv, parser=parser)


def parsed_with_beam(
    kind: type[_Request], argv: Sequence[str], *, parser: FlagParser
) -> "tuple[_Request, PipelineOptions]":
    """Returns the request that our flags make, and what Beam's say; errors as in `parsed`."""
    with as_usage():
        flags, options = parse_flags(parser, argv)
        return _checked(kind, flags, argv, parser=parser), options


def _checked(kind: type[_Request], flags: argparse.Namespace, argv: Sequence[str], *, parser: FlagParser) -> _Request:
    request = request_of(kind, flags, parser=parser)
    request.check_given(given_flags(parser, argv))
    return request


def given_flags(parser: FlagParser, argv: Sequence[str]) -> tuple[str, ...]:
    """Returns which options were given, in a file or by flags, with whatever value, by name and in their order."""
    actions = parser._option_string_actions
    return tuple(actions[flag].dest for arg in parser.whole(argv) if (flag := arg.partition("=")[0]) in actions)


def _add_flag(target: argparse._ActionsContainer, name: str, declared: Option, *, default: Any) -> None:
    if default is False:
        target.add_argument(f"--{name}", action="store_true", help=declared.help)
        return
    target.add_argument(
        f"--{name}",
        type=declared.kind,
        default=None if default is dataclasses.MISSING else default,
        required=default is dataclasses.MISSING,
        choices=declared.choices or None,
        metavar=declared.metavar,
        help=declared.help,
    )
    if declared.old_name is not None:
        target.add_argument(
            f"--{declared.old_name}",
            dest=name,
            type=declared.kind,
            default=argparse.SUPPRESS,
            choices=declared.choices or None,
            help=argparse.SUPPRESS,
        )


def request_of(kind: type[_Request], flags: argparse.Namespace, *, parser: FlagParser) -> _Request:
    """Returns the request that flags make, each the option of its name; `--verbose` decides what is said from now on.

    Raises:
      UsageError: If they contradict each other; says where help is.
    """
    show_details(getattr(flags, "verbose", False))
    try:
        return kind(**{name: getattr(flags, name) for name, _ in options_of(kind) if name in flags})
    except OptionError as error:
        parser.error(str(error).removesuffix("."))
