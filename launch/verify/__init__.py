"""`calm-beam verify`: tests the promises of a manifest on fresh data.

    calm-beam verify --manifest=calibration --data='fresh-*.jsonl' --checkpoint=checkpoints/my_t5

decodes the fresh data at the thresholds of the manifest alone, as the calibration did, and says of every entry whether

* it is BROKEN: the fresh losses prove that the risk exceeds delta. Over all entries together, the chance of calling one
  broken that is kept is at most `--alpha`. Exit status 3.
* it is proved again: the fresh examples alone would have accepted the threshold at the entry's epsilon.
* it is not contradicted: neither. Nothing was found out; more data may tell. Exit status 0, like the one before.

Both use the entry's own p-value. An output that failed counts with loss 1 when a promise is to be proved again, and
with the lowest loss there is when it is to be called broken. (In losses of your own nobody says which failed: one that
is written as 1 counts as 1 for both.) A threshold that was wrongly accepted, which happens with probability epsilon at
most, is found out here too; a status of 3 alone does not say that the distribution has changed.

A manifest may name a metric of somebody's own, `module:function`. That is code, and is imported only if `--metric` also
names it.

A manifest of kind settings, which `calm-beam certify` made, is tested on fresh losses or scores, and needs no model:

    calm-beam verify --manifest=certification --losses='fresh-*.csv'

`--alpha` is the chance in one run. Of many runs, each on new data, more and more call a promise broken that is kept: at
the boundary, 60 runs at 5 % do so nine times in ten. If you test again and again, pass

    calm-beam verify --manifest=calibration --data='week-32/*.jsonl' --checkpoint=checkpoints/my_t5 --anytime

at every run from the first on. Then `--alpha` is the chance over all of them, however many there are and whatever
decides when to test again. What they have found is kept in `verification.json` beside the manifest (or `--state`). All
use the p-value `signed_mixture`. Each run takes new examples alone: ids that were counted before are refused.

Fresh data are drawn independently of the calibration set. The calibration set itself is refused; prompts that it shares
with the fresh data are counted and warned of where its generations still stand beside the manifest, and only there.

With `--runner`, workers elsewhere decode the fresh data into a folder below `--temp_location`, which they and this
machine must see; losses are made of it here, and the folder is removed.

Exit status: 0 no promise broken, 1 failure, 2 bad usage, 3 a promise is broken.
"""

from collections.abc import Sequence

from calm_beam.launch.certify.options import SweepSource
from calm_beam.launch.flags import (
    FlagParser,
    add_data_flags,
    add_exit_head_flag,
    add_memory_flags,
    add_model_flags,
    add_options,
    add_worker_flags,
    as_usage,
    parse_flags,
    texts,
)
from calm_beam.launch.flags.accelerators import add_job_flags
from calm_beam.launch.flags.manifest import add_confidence_flag, add_precision_flags
from calm_beam.launch.flags.metrics import add_metric_settings

from .carried import add_anytime_flags

_SOURCES = ("--losses", "--baseline", "--candidates")
_ESSENTIALS = ("--manifest", "--data", "--checkpoint", "--alpha", "--metric", "--losses")


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command: of a model's manifest, and of one of kind settings."""
    from .external import external_parser

    return (_parser(), external_parser(__doc__))


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    if any(argument.split("=")[0] in _SOURCES for argument in argv):
        from .external import verify_external

        return verify_external(argv, doc=__doc__)
    with as_usage():
        flags, options = parse_flags(_parser(), argv)
    # Here, since it loads Beam, and help does without.
    from .command import verify_manifest

    return verify_manifest(flags, options)


def _parser() -> FlagParser:
    parser = FlagParser(prog="calm-beam verify", doc=__doc__, essentials=_ESSENTIALS)
    parser.add_argument("--manifest", required=True, help="a manifest, or the calibration directory that holds one")
    add_data_flags(parser, kind="fresh examples")
    parser.add_argument("--checkpoint", help="model folder; default: where the manifest says that it was")
    add_model_flags(parser)
    add_confidence_flag(parser)
    add_precision_flags(parser)
    parser.add_argument("--vocabulary", help="SentencePiece model; default: in or beside the checkpoint")
    parser.add_argument(
        "--alpha", type=float, default=0.05, help="chance of calling any promise broken that is kept, in (0, 1)"
    )
    add_anytime_flags(parser)
    parser.add_argument(
        "--metric",
        type=texts,
        help="test the entries of these metrics alone, comma-separated; a metric of your own, module:function, is "
        "imported only if it is named here",
    )
    add_metric_settings(parser)
    add_memory_flags(parser)
    add_exit_head_flag(parser)
    add_worker_flags(parser)
    add_job_flags(parser)
    add_options(parser, SweepSource)
    return parser
