"""The flags of `calm-beam certify`, and those that name the losses of a sweep, which `verify` takes too."""

import argparse
import math
from collections.abc import Sequence

from calm_beam.calibration.guarantee import MOST_KEPT_LOSSES
from calm_beam.inputs.losses import DIRECTIONS
from calm_beam.launch.flags import FlagParser, UsageError, numbers, paths, share, texts, utf8_text, whole_number
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.stopping import ROUNDS_WITHOUT_GAIN
from calm_beam.text import written_float

_SEQUENTIAL = ("ids", "round_examples", "stop_at_setting", "stop_at_cost", "stop_gain", "next_rounds", "resume")
_ROUND_EXAMPLES = 100
_SOURCES = ("--losses", "--baseline", "--candidates")
_ESSENTIALS = (
    "--losses",
    "--baseline",
    "--candidates",
    "--task",
    "--metric",
    "--direction",
    "--order",
    "--delta",
    "--epsilon",
    "--sequential",
    "--output",
    "--overwrite",
)


def certify_parser(doc: str | None) -> FlagParser:
    """Returns the parser of the command line; its help shows what the docstring says."""
    parser = FlagParser(prog="calm-beam certify", doc=doc, essentials=_ESSENTIALS)
    parser.add_config_flag()
    add_sweep_flags(parser)
    sweep = parser.add_argument_group("order of the settings, declared before any loss is seen")
    sweep.add_argument("--order", type=texts, help="settings in testing order, the safest first, comma-separated")
    sweep.add_argument(
        "--order_by",
        choices=("cost", "cost_ascending"),
        help="the dearest first, or the cheapest; default: --order, or that of --candidates",
    )
    sweep.add_argument("--costs", type=_costs, help="what settings cost, as NAME=NUMBER,...; default: the column cost")
    goal = parser.add_argument_group("guarantee (lists are comma-separated; every combination is one manifest entry)")
    goal.add_argument("--delta", type=numbers, required=True, help="risk tolerances in (0, 1)")
    goal.add_argument(
        "--epsilon", type=numbers, default=(0.05,), help="allowed probabilities of error in (0, 1); default: 0.05"
    )
    goal.add_argument(
        "--tail",
        type=numbers,
        default=(),
        help="losses in [0, 1) that an example may have: besides the mean, the share of examples that lose more is "
        "held to every --delta",
    )
    goal.add_argument(
        "--loss",
        choices=("given", "signed", "relu"),
        help="of --losses: given (in [0, 1], default) or signed (in [-1, 1]); of scores: signed (baseline's minus "
        "candidate's, default) or relu (what is positive of it)",
    )
    goal.add_argument(
        "--group_key", type=utf8_text, help="column that names a group: each gets entries of its own, besides the whole"
    )
    goal.add_argument(
        "--joint", action="store_true", help="let all entries hold together, with probability 1 - epsilon"
    )
    test = parser.add_argument_group("test")
    test.add_argument(
        "--p_value",
        choices=tuple(P_VALUES),
        help="test of one setting; default: signed_mixture with --sequential; else exact_binomial for tails; else "
        f"star_bets for up to {MOST_KEPT_LOSSES:,} losses (examples x settings x entries); else signed_mixture for "
        "signed losses, and hoeffding_bentkus",
    )
    test.add_argument(
        "--procedure", choices=tuple(PROCEDURES), default="fixed_sequence", help="test of the settings together"
    )
    test.add_argument(
        "--cluster_key",
        type=utf8_text,
        help="what names the cluster, where examples are drawn in clusters: a column of --losses or --ids, or a field "
        "of what a log says of an example, such as doc.title or metadata.passage",
    )
    test.add_argument(
        "--seed", type=whole_number(0), default=0, help="of the order of examples, for wsr, star_bets and --sequential"
    )
    _add_sequential_flags(parser)
    parser.add_argument("--output", default="certification", help="directory for manifest, risk table and ids")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result")
    return parser


def _add_sequential_flags(parser: FlagParser) -> None:
    rounds = parser.add_argument_group("sequential (stop evaluating when enough is proved)")
    rounds.add_argument(
        "--sequential",
        action="store_true",
        help="look at the tests after every round of examples that --losses holds whole, and stop by the first of the "
        "following rules, or when nothing is left to prove; otherwise say which examples to evaluate next",
    )
    rounds.add_argument(
        "--ids",
        type=paths,
        help="all examples that may be evaluated, declared beforehand: globs of .txt (an id a line), .csv, .jsonl or "
        ".parquet with the column id, and those that --group_key and --cluster_key name",
    )
    rounds.add_argument(
        "--round_examples",
        type=whole_number(1),
        help=f"a round ends with the example or cluster that makes it so many examples; default: {_ROUND_EXAMPLES}",
    )
    rounds.add_argument(
        "--stop_at_setting", metavar="NAME", help="stop once every entry has accepted this setting, or a later one"
    )
    rounds.add_argument(
        "--stop_at_cost", type=float, metavar="X", help="stop once no entry's setting costs more than this"
    )
    rounds.add_argument(
        "--stop_gain",
        type=share,
        metavar="SHARE",
        help=f"stop after {ROUNDS_WITHOUT_GAIN} rounds in a row in which no entry saved this share of its cost, such "
        "as 2%%; entries without a setting go on",
    )
    rounds.add_argument("--next_rounds", type=whole_number(1), help="of how many rounds ids are named next; default: 1")
    rounds.add_argument(
        "--resume", action="store_true", help="go on with a certification that stopped, by another rule"
    )


def fill_in_sequential(flags: argparse.Namespace) -> None:
    """Sets what the user left open of the flags for rounds; refuses them where they cannot be.

    Raises:
      UsageError: If they are there without `--sequential`, or what that needs is missing.
    """
    if not flags.sequential:
        if given := next((name for name in _SEQUENTIAL if getattr(flags, name)), None):
            raise UsageError(f"--{given} belongs to --sequential, which is missing.")
        return
    flags.round_examples = flags.round_examples or _ROUND_EXAMPLES
    flags.next_rounds = flags.next_rounds or 1
    for name in ("baseline", "candidates", "task", "metric", "direction"):
        if getattr(flags, name) is not None:
            raise UsageError(
                f"--{name} names logs of a whole evaluation, and --sequential takes losses as they come: write them to "
                "a table, for --losses."
            )
    if flags.ids is None:
        raise UsageError(
            "--ids is missing: all examples that may be evaluated. Their order, and with it what is evaluated first, "
            "is settled before any loss is seen."
        )
    if flags.order_by is not None and flags.costs is None:
        raise UsageError(
            f"--order_by={flags.order_by} needs --costs here: the order is settled before there are losses. Or give "
            "the order itself (--order)."
        )
    if flags.stop_at_cost is not None and not 0 <= flags.stop_at_cost < math.inf:
        raise UsageError(f"--stop_at_cost must be a finite number of at least 0, got {flags.stop_at_cost:g}.")


def add_sweep_flags(parser: FlagParser) -> None:
    """Adds the flags that name the losses of a sweep."""
    add_source_flags(parser)
    which = parser.add_argument_group("which of the scores in a log")
    which.add_argument("--task", help="task whose log is meant, where a folder has several")
    which.add_argument("--metric", help="metric of the log, such as exact_match or exact_match,strict-match")
    which.add_argument(
        "--direction",
        choices=DIRECTIONS,
        help="which score is better; needed where neither the logs, nor files beside them, nor the metric's name says "
        "it",
    )


def add_source_flags(parser: FlagParser) -> None:
    """Adds those that name files and folders."""
    source = parser.add_argument_group("losses of a sweep, or scores that make them")
    source.add_argument(
        "--losses", type=paths, help="tables with id, setting and loss: globs of .csv, .jsonl or .parquet"
    )
    source.add_argument("--baseline", metavar="RUN", help="scores that others are compared with: a log, or its folder")
    source.add_argument("--candidates", type=texts, metavar="RUN,...", help="scores of the settings: RUN or NAME=RUN")


def names_sweep(argv: Sequence[str]) -> bool:
    """Returns whether one of the flags that name losses or scores is there."""
    return any(argument.split("=")[0] in _SOURCES for argument in argv)


def _costs(value: str) -> dict[str, float]:
    """Returns what settings cost."""
    costs: dict[str, float] = {}
    for part in texts(value):
        name, sign, number = part.rpartition("=")
        try:
            cost = written_float(number)
        except ValueError:
            cost = math.nan
        if not (sign and name and math.isfinite(cost) and cost >= 0) or name in costs:
            raise argparse.ArgumentTypeError(f"expected NAME=NUMBER for every setting, each once, got {part!r}")
        costs[name] = cost
    return costs
