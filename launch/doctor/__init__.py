"""`calm-beam doctor`: reports installed packages, the machine's hardware, and whether a small run works.

    calm-beam doctor

As JSON, for a bug report or for another program:

    calm-beam doctor --json

The small run sweeps a few prompts with the demo model, answers one of them as `generate` would, and compares the
two. The first time it takes about a minute, since everything is compiled.

Exit status: 0 everything is as it should be, 1 something is not (the table marks it), 2 bad usage.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, parse_own_flags
from calm_beam.launch.flags.requests import with_result


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (with_result(FlagParser(prog="calm-beam doctor", doc=__doc__)),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parse_own_flags(flag_parsers()[0], argv)
    # Imported here, since help does not need it.
    from .command import examine

    return examine()
