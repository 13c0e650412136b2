r"""`calm-beam generate`: answers prompts under a manifest, really skipping layers.

    calm-beam generate --manifest=calibration --consistency=textual --delta=0.05 \
        --prompt='Do they want to repair their car?'
    calm-beam generate --manifest=calibration --consistency=textual --delta=0.05 \
        --input=prompts.jsonl --output=answers.jsonl
    calm-beam generate --manifest=calibration --consistency=textual --delta=0.05 \
        --input='prompts/*.jsonl.gz' --output=answers/

`--consistency`, `--metric`, `--delta` and so on name one entry of the manifest, as far as it has several. The model is
in the folder that the manifest names, unless `--checkpoint` says otherwise.

Without `--prompt` and `--input`, prompts are read from standard input, one a line, and answered as they come. Files
are of the formats that `--data` of `calibrate` takes, told by their suffixes.

Answers go to standard output, one a line; with `--output=FILE`, to a JSONL file with tokens, exit layers and
confidences. Prompts are then read and checked as a whole before anything is decoded.

With `--output=FOLDER/`, which ends in a slash or is there already, they are answered by a Beam pipeline: on workers, if
Beam's own flags say so, into one file a shard. Shards are kept while they are made: when a run fails or is killed, the
same command with `--resume` answers the missing prompts only.

The settings that must equal the calibrated ones (model, vocabulary, precision, lengths) are compared with the manifest
first.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import (
    FlagParser,
    UsageError,
    as_usage,
    given_flags,
    parse_flags,
    parse_own_flags,
    request_of,
    request_parser,
)

from .request import GenerateRequest, option_of_shards

_ESSENTIALS = (
    "--manifest",
    "--checkpoint",
    "--prompt",
    "--input",
    "--output",
    "--overwrite",
    "--show_layers",
    "--delta",
    "--consistency",
    "--metric",
    "--resume",
)


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (request_parser("generate", GenerateRequest, doc=__doc__, essentials=_ESSENTIALS),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    flags, rest = parser.parse_known_args(list(argv))
    request = request_of(GenerateRequest, flags, parser=parser)
    if request.is_in_shards:
        with as_usage():
            _, options = parse_flags(parser, argv)
        # Here, since it loads Beam, which all else does without.
        from .pipeline import answer_all

        return answer_all(request, options)
    of_shards = option_of_shards(given_flags(parser, argv))
    flag = _flag_of_beam(parser, argv, rest=rest) if of_shards is None else f"--{of_shards}"
    if flag is not None:
        raise UsageError(
            f"{flag} belongs to answers in shards. Pass --input, and a folder: --output=answers/ with a slash at its "
            "end."
        )
    parse_own_flags(parser, argv)
    from .here import answer_here

    return answer_here(request)


def _flag_of_beam(parser: FlagParser, argv: Sequence[str], *, rest: Sequence[str]) -> str | None:
    """Returns the first flag of Beam's; None if there is none, or one that nobody knows, or Beam is not here."""
    if not rest:
        return None
    try:
        parse_flags(parser, argv)
    except (UsageError, ModuleNotFoundError):
        return None
    return rest[0].partition("=")[0]
