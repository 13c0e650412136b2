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

A manifest may name a user's own metric, `module:function`. It is code, and is imported only if `--metric` also names
it.

A manifest of kind settings, which `calm-beam certify` made, is tested on fresh losses, scores or outputs, and needs no
model:

    calm-beam verify --manifest=certification --losses='fresh-*.csv'

`--alpha` is the chance in one run. Of many runs, each on new data, more and more call a promise broken that is kept: at
the boundary, 60 runs at 5 % do so nine times in ten. If you test again and again, pass

    calm-beam verify --manifest=calibration --data='week-32/*.jsonl' --checkpoint=checkpoints/my_t5 --anytime

at every run from the first on. Then `--alpha` is the chance over all of them, however many there are and whatever
decides when to test again. Their findings are stored in `verification.json` next to the manifest (or `--state`). All
use the p-value `signed_mixture`. Each run takes new examples alone: ids that were counted before are refused.

Fresh data are drawn independently of the calibration set. The calibration set itself is refused; prompts that it shares
with the fresh data are counted, with a warning, but only if its generations are still next to the manifest.

With `--runner`, workers elsewhere decode the fresh data into a folder below `--temp_location`, which they and this
machine must see; losses are made of it here, and the folder is removed.

Exit status: 0 no promise broken, 1 failure, 2 bad usage, 3 a promise is broken.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import (
    FlagParser,
    as_usage,
    given_flags,
    parse_flags,
    parse_own_flags,
    request_of,
    request_parser,
)
from calm_beam.launch.flags.requests import with_result

from .request import VerifyRequest

_ESSENTIALS = (
    "--manifest",
    "--data",
    "--checkpoint",
    "--alpha",
    "--metric",
    "--losses",
    "--baseline",
    "--candidates",
    "--outputs",
)


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (with_result(request_parser("verify", VerifyRequest, doc=__doc__, essentials=_ESSENTIALS)),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    flags, _ = parser.parse_known_args(list(argv))
    with as_usage():
        request = request_of(VerifyRequest, flags, parser=parser)
        request.check_given(given_flags(parser, argv))
    if request.is_of_settings:
        # Which refuses what it does not know, Beam's flags among it.
        parse_own_flags(parser, argv)
        # Here, since help does without what reads and tests.
        from .report import tell_settings
        from .settings import verify_certified

        return tell_settings(verify_certified(request))
    with as_usage():
        _, options = parse_flags(parser, argv)
    # Here, since it loads Beam, and the other kind does without, too.
    from .report import tell_thresholds
    from .thresholds import verify_thresholds

    return tell_thresholds(verify_thresholds(request, options))
