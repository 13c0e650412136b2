"""`calm-beam generate`: answers prompts under a manifest, really skipping layers.

    calm-beam generate --manifest=calibration --checkpoint=model --prompt='A cat sits on the mat.'
    calm-beam generate --manifest=calibration --checkpoint=model --input=prompts.jsonl --output=answers.jsonl
    calm-beam generate --manifest=calibration --checkpoint=model --input='prompts/*.jsonl.gz' --output=answers/

Without `--prompt` and `--input`, prompts are read from standard input, one a line, and answered as they come. Files
are of the formats that `--data` of `calibrate` takes, told by their suffixes.

Answers go to standard output, one a line; with `--output=FILE`, to a JSONL file with tokens, exit layers and
confidences. Prompts are then read and checked as a whole before anything is decoded.

With `--output=FOLDER/`, which ends in a slash or is there already, they are answered by a Beam pipeline: on workers, if
Beam's own flags say so, into one file a shard. Shards are kept while they are made: when a run fails or is killed, the
same command with `--resume` answers the missing prompts only.

What must be as it was calibrated (model, vocabulary, precision, lengths) is compared with the manifest first.
"""

import argparse
from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, UsageError, as_usage, naming, parse_flags, parse_own_flags
from calm_beam.storage import is_folder

from .flags import flag_of_folders, generate_parser


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (generate_parser(__doc__),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    flags, rest = parser.parse_known_args(list(argv))
    if _names_folder(flags):
        with as_usage():
            flags, options = parse_flags(parser, argv)
        # Here, since it loads Beam, which all else does without.
        from .pipeline import answer_all

        return answer_all(flags, options)
    flag = flag_of_folders(flags) or _flag_of_beam(parser, argv, rest=rest)
    if flag is not None:
        raise UsageError(
            f"{flag} belongs to answers in shards. Pass --input, and a folder: --output=answers/ with a slash at its "
            "end."
        )
    flags = parse_own_flags(parser, argv)
    from .here import answer_here

    return answer_here(flags)


def _names_folder(flags: argparse.Namespace) -> bool:
    """Returns whether `--output` is a folder."""
    if flags.output is None:
        return False
    with naming("--output"):
        return flags.output.endswith("/") or is_folder(flags.output)


def _flag_of_beam(parser: FlagParser, argv: Sequence[str], *, rest: Sequence[str]) -> str | None:
    """Returns the first flag of Beam's; None if there is none, or one that nobody knows, or Beam is not here."""
    if not rest:
        return None
    try:
        parse_flags(parser, argv)
    except (UsageError, ModuleNotFoundError):
        return None
    return rest[0].partition("=")[0]
