"""`calm-beam decode`: the sweep alone, one JSONL row per prompt and threshold.

    calm-beam decode --checkpoint=model/ --data=prompts.jsonl --thresholds=0.9,0.5 --output=outputs.jsonl

Rows come in the order of the data, the full model (threshold null) before the thresholds in descending order. Workers
may be anywhere: with `--runner`, what they decode waits in a folder beside `--output` until this machine has put it in
order, and is then removed.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, add_decode_flags, as_usage, parse_flags
from calm_beam.launch.flags.accelerators import add_job_flags

_ESSENTIALS = ("--checkpoint", "--vocabulary", "--data", "--thresholds", "--overwrite", "--output")


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (_parser(),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    with as_usage():
        flags, options = parse_flags(_parser(), argv)
    # Here, since it loads Beam, and help does without.
    from .command import decode

    return decode(flags, options)


def _parser() -> FlagParser:
    parser = FlagParser(prog="calm-beam decode", doc=__doc__, essentials=_ESSENTIALS)
    add_decode_flags(parser, default_grid_step=None)
    add_job_flags(parser)
    # What is printed is looked at, and compared.
    parser.set_defaults(exit_head="exact")
    parser.add_argument("--output", help="JSONL file to write")
    return parser
