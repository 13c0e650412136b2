"""`--json`, `--require_threshold` and `--log_to`: what a command does with its result, the command line's alone."""

from collections.abc import Iterable, Sequence

from .parser import FlagParser

JSON, REQUIRED, LOG_TO = "--json", "--require_threshold", "--log_to"
TRACKERS = ("mlflow", "wandb", "tensorboard")
"""What `--log_to` names."""
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
        help="print the result as JSON to standard output, and what is said to people to standard error",
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
