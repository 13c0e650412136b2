"""The flags of `calm-beam certify`, and those that name the losses of a sweep, which `verify` takes too."""

import argparse
import math
from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, numbers, paths, texts, whole_number
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES

_SOURCES = ("--losses", "--baseline", "--candidates")


def certify_parser(description: str) -> FlagParser:
    """Returns the parser of the command line."""
    parser = FlagParser(prog="calm-beam certify", description=description)
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
    goal.add_argument("--group_key", help="column that names a group: each gets entries of its own, besides the whole")
    goal.add_argument(
        "--joint", action="store_true", help="let all entries hold together, with probability 1 - epsilon"
    )
    test = parser.add_argument_group("test")
    test.add_argument(
        "--p_value",
        choices=tuple(P_VALUES),
        help="test of one setting; default: signed_mixture for signed losses, exact_binomial for tails, else "
        "hoeffding_bentkus",
    )
    test.add_argument(
        "--procedure", choices=tuple(PROCEDURES), default="fixed_sequence", help="test of the settings together"
    )
    test.add_argument("--cluster_key", help="column that names the cluster, where examples are drawn in clusters")
    test.add_argument("--seed", type=whole_number(0), default=0, help="of the order in which wsr bets on examples")
    parser.add_argument("--output", default="certification", help="directory for manifest and risk table")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result")
    return parser


def add_sweep_flags(parser: FlagParser) -> None:
    """Adds the flags that name the losses of a sweep."""
    add_source_flags(parser)
    which = parser.add_argument_group("which of the scores in a log")
    which.add_argument("--task", help="task whose log is meant, where a folder has several")
    which.add_argument("--metric", help="metric of the log, such as exact_match or exact_match,strict-match")


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
            cost = float(number)
        except ValueError:
            cost = math.nan
        if not (sign and name and math.isfinite(cost) and cost >= 0) or name in costs:
            raise argparse.ArgumentTypeError(f"expected NAME=NUMBER for every setting, each once, got {part!r}")
        costs[name] = cost
    return costs
