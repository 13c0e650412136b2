"""`--json` and `--require_threshold`: what a command does with its result, which is the command line's alone."""

from collections.abc import Iterable, Sequence

from .parser import FlagParser

JSON, REQUIRED = "--json", "--require_threshold"
UNPROVED = 4
"""Exit status of a command with `--require_threshold` that proved nothing."""


def with_result(parser: FlagParser, *, proves: bool = False) -> FlagParser:
    """Returns a parser of a command that has a result, with the flags about it.

    Args:
      parser: To which they are added.
      proves: Whether the command is to prove something.
    """
    parser.add_argument(
        JSON,
        action="store_true",
        help="print the result as JSON to standard output, and what is said to people to standard error",
    )
    if proves:
        parser.add_argument(REQUIRED, action="store_true", help=f"exit status {UNPROVED} if nothing was proved safe")
    return parser


def without_result_flags(argv: Sequence[str], parsers: Iterable[FlagParser]) -> tuple[list[str], set[str]]:
    """Returns the other flags of a command, and which of these were given; those that it does not have stay."""
    known = {name for parser in parsers for name in parser._option_string_actions}
    given = {flag for flag in argv if flag in (JSON, REQUIRED)} & known
    return [flag for flag in argv if flag not in given], given
