r"""`calm-beam certify`: proves which settings of a sweep made elsewhere lose at most delta.

    calm-beam certify --losses='losses-*.parquet' --order=8bit,6bit,4bit --delta=0.05 --output=certification

reads a table with one row per example and setting. Its columns are `id`, `setting` and `loss`, and optionally `cost`, a
group and a cluster. A setting can be any knob: bits of a quantised model, a thinking budget, an exit threshold of
another stack.

    calm-beam certify --baseline=runs/full --candidates=int8=runs/int8,int4=runs/int4 --task=gsm8k \
        --metric=exact_match,strict-match --delta=0.02

reads the scores of single examples that lm-evaluation-harness (`--log_samples`), lighteval, inspect and HELM log. Where
a task has one metric with one filter, `--metric` may be left out. The loss is how much worse a candidate's score is
than the baseline's. Whether higher or lower scores are better is read from the logs, from files next to them or from
the metric's name; else `--direction` says it. Candidates are tested in the order in which they are listed.

    calm-beam certify --outputs=swept --metric=rouge_l_unicode --delta=0.05

reads the outputs of your own decoder, swept on Beam by `transforms.SweepWith`, and scores them. Losses are relative to
the first setting; the others are tested in their order.

Every example needs one loss under every setting: a missing, extra or repeated one ends the run, by name. The order of
the settings is declared beforehand, the safest first. Plan and order are hashed, and the hash is printed, before a loss
is summed. The command writes `manifest.json`, of kind settings, and `risk_table.csv` into `--output`.

Exit status: 0 done (also when no setting is safe), 1 failure, 2 bad usage, 4 nothing was proved and
`--require_threshold` was given.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, parsed, request_parser
from calm_beam.launch.flags.requests import with_result

from .request import CertifyRequest

_ESSENTIALS = (
    "--losses",
    "--baseline",
    "--candidates",
    "--outputs",
    "--task",
    "--metric",
    "--direction",
    "--costs",
    "--loss",
    "--order",
    "--order_by",
    "--delta",
    "--epsilon",
    "--sequential",
    "--output",
    "--overwrite",
)


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    parser = request_parser("certify", CertifyRequest, doc=__doc__, essentials=_ESSENTIALS)
    return (with_result(parser, proves=True, logged=True),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    request = parsed(CertifyRequest, argv, parser=parser)
    # Imported here, since help does not need the modules that read and test.
    from .run import tell_certification

    return tell_certification(request)
