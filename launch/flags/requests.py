"""Requests made of flags or of arguments: flags derived from declared options, and what a command does with its result.

A function of Python that does what a command does takes the same options as arguments, and its messages call
them so. `--json`, `--require_threshold` and `--log_to` say what a command does with its result; only the command line
has them.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from calm_beam.errors import as_usage
from calm_beam.launch.terminal import said_as, show_details
from calm_beam.options import OptionError, Options, options_of
from calm_beam.options.option import Option, default_of, in_python, own_options_of, taking

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
    """Returns the parser for a command whose flags are the options of a request.

    Args:
      command: Its name.
      request: What the flags make.
      doc: Docstring of the command: says what it does, and holds examples.
      essentials: Flags that `--help` lists, in addition to required ones; None for all.
      settings: Other arguments of `FlagParser`.
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
    """Returns the request that flags make, each the option of its name; `--verbose` applies from now on.

    Raises:
      UsageError: If they contradict each other; says where help is.
    """
    show_details(getattr(flags, "verbose", False))
    try:
        return kind(**{name: getattr(flags, name) for name, _ in options_of(kind) if name in flags})
    except OptionError as error:
        parser.error(str(error).removesuffix("."))


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def calling(
    request: Callable[_Arguments, _Request],
) -> Callable[[Callable[[_Request], _Result]], Callable[_Arguments, _Result]]:
    """Gives a function of a request its arguments, as `taking`; what it says while it runs calls options as those.

    Args:
      request: The class of requests.
    """
    kind: Any = request
    named = dict(options_of(kind))

    def decorate(run: Callable[[_Request], _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(run)
        def saying(made: _Request) -> _Result:
            show_details(getattr(made, "verbose", False))
            with said_as(lambda text: in_python(text, named)):
                return run(made)

        return taking(request)(saying)

    return decorate


JSON, REQUIRED, LOG_TO = "--json", "--require_threshold", "--log_to"
TRACKERS = ("mlflow", "wandb", "tensorboard")
"""The trackers that `--log_to` names."""
UNPROVED = 4
"""Exit status of a command with `--require_threshold` that proved nothing."""


def with_result(parser: FlagParser, *, proves: bool = False, logged: bool = False) -> FlagParser:
    """Returns a parser of a command that has a result, with the flags about it.

    Args:
      parser: To which they are added.
      proves: Whether the command is to prove something.
      logged: Whether an experiment tracker has a use for it.
    """
    parser.add_argument(
        JSON,
        action="store_true",
        help="print the result as JSON to standard output, and messages for people to standard error",
    )
    if proves:
        parser.add_argument(REQUIRED, action="store_true", help=f"exit status {UNPROVED} if nothing was proved safe")
    if logged:
        parser.add_argument(
            LOG_TO,
            choices=TRACKERS,
            metavar="TRACKER",
            help=f"log flags, numbers, tables and pages to {', '.join(TRACKERS[:-1])} or {TRACKERS[-1]}; each is an "
            "extra of that name",
        )
    return parser


def without_result_flags(argv: Sequence[str], parsers: Iterable[FlagParser]) -> tuple[list[str], dict[str, str]]:
    """Returns the other flags of a command, and these with their values; those that it does not have stay."""
    known = {name for parser in parsers for name in parser._option_string_actions}
    rest, given, flags = list[str](), dict[str, str](), iter(argv)
    for flag in flags:
        name, has_value, value = flag.partition("=")
        if name not in known or not (name == LOG_TO or flag in (JSON, REQUIRED)):
            rest.append(flag)
        elif name == LOG_TO and not has_value:
            given[name] = next(flags, "")
        else:
            given[name] = value
    return rest, given
