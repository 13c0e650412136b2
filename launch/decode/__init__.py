"""`calm-beam decode`: the sweep alone, one JSONL row per prompt and threshold.

    calm-beam decode --checkpoint=model/ --data=prompts.jsonl --thresholds=0.9,0.5 --output=outputs.jsonl

Rows come in the order of the data, the full model (threshold null) before the thresholds in descending order. Workers
may be anywhere: with `--runner`, what they decode waits in a folder beside `--output` until this machine has put it in
order, and is then removed.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, add_request, as_usage, parse_flags, request_of

from .request import DecodeRequest

_ESSENTIALS = ("--checkpoint", "--vocabulary", "--data", "--thresholds", "--overwrite", "--output")


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (_parser(),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    with as_usage():
        flags, options = parse_flags(parser, argv)
        request = request_of(DecodeRequest, flags, parser=parser)
    # Here, since it loads Beam, and help does without.
    from .command import decode

    return decode(request, options)


def _parser() -> FlagParser:
    parser = FlagParser(prog="calm-beam decode", doc=__doc__, essentials=_ESSENTIALS)
    add_request(parser, DecodeRequest)
    return parser
