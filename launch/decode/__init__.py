"""`calm-beam decode`: the sweep alone, one JSONL row per prompt and threshold.

Rows come in the order of the data, the full model (threshold null) before the thresholds in descending order. Workers
may be anywhere: with `--runner`, what they decode waits in a folder beside `--output` until this machine has put it in
order, and is then removed.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, add_decode_flags, as_usage, parse_flags
from calm_beam.launch.flags.accelerators import add_job_flags


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = FlagParser(prog="calm-beam decode", description=(__doc__ or "").split("\n\n")[0])
    add_decode_flags(parser, default_grid_step=None)
    add_job_flags(parser)
    # What is printed is looked at, and compared.
    parser.set_defaults(exit_head="exact")
    parser.add_argument("--output", help="JSONL file to write")
    with as_usage():
        flags, options = parse_flags(parser, argv)
    # Here, since it loads Beam, and help does without.
    from .command import decode

    return decode(flags, options)
