"""`calm-beam decode`: the sweep alone, one JSONL row per prompt and threshold.

    calm-beam decode --checkpoint=model/ --data=prompts.jsonl --thresholds=0.9,0.5 --output=outputs.jsonl

Rows come in the order of the data, the full model (threshold null) before the thresholds in descending order. Workers
may be anywhere: with `--runner`, they write shards to a folder next to `--output`, which this machine puts in order and
then removes.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, parsed_with_beam, request_parser

from .request import DecodeRequest

_ESSENTIALS = ("--checkpoint", "--vocabulary", "--data", "--thresholds", "--overwrite", "--output")


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (request_parser("decode", DecodeRequest, doc=__doc__, essentials=_ESSENTIALS),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    request, options = parsed_with_beam(DecodeRequest, argv, parser=parser)
    # Imported here, since it loads Beam, which help does not need.
    from .command import decode

    return decode(request, options)
