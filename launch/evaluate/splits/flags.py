"""The flags of `calm-beam evaluate --experiment=splits`, and what they ask for."""

import argparse
from collections.abc import Callable, Sequence

from calm_beam.calibration.guarantee import all_specs
from calm_beam.launch.calibrate.flags import add_tail_flag
from calm_beam.launch.flags import FlagParser, UsageError, add_decode_flags, numbers, paths, texts, whole_number
from calm_beam.launch.flags.accelerators import add_job_flags
from calm_beam.launch.flags.metrics import METRIC_NAMES, add_metric_settings, checked_metrics, metric_settings
from calm_beam.manifest import LOSSES_OF, PlannedTest
from calm_beam.metrics.registry import DEFAULT_METRIC
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES

_CURVE = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
# Of those that `add_decode_flags` adds, what means something for stored generations too.
ALSO_OF_STORED = (
    "--checkpoint",
    "--activation",
    "--relative_max_distance",
    "--vocabulary",
    "--on_error",
    "--max_failures",
    "--overwrite",
)


_ESSENTIALS = (
    "--experiment",
    "--generations",
    "--checkpoint",
    "--data",
    "--consistency",
    "--metric",
    "--delta",
    "--trials",
    "--speedup",
    "--output",
    "--overwrite",
)


def split_parser(add_experiment_flag: Callable[[FlagParser], None], *, doc: str | None) -> FlagParser:
    """Returns the parser of all flags, those of sweeps that are made first included.

    Args:
      add_experiment_flag: Adds `--experiment`, which names all experiments of the command.
      doc: What its help shows.
    """
    parser = FlagParser(
        prog="calm-beam evaluate",
        doc=doc,
        essentials=_ESSENTIALS,
        epilog="With --experiment=NAME, --help lists the flags of that experiment.",
    )
    add_experiment_flag(parser)
    add_own_flags(parser)
    # For sweeps that are made first.
    add_decode_flags(parser, default_grid_step=0.05)
    add_job_flags(parser)
    add_flags_of_both(parser)
    return parser


def add_own_flags(parser: FlagParser) -> None:
    """Adds the flags that say nothing about how to decode."""
    parser.add_argument(
        "--generations",
        type=paths,
        help="output directories of calibrations, or folders of generations, comma-separated: one for each confidence "
        "measure, of the same model and data; without it, --checkpoint and --data are swept first",
    )
    splits = parser.add_argument_group("splits")
    splits.add_argument("--trials", type=whole_number(1, 10_000), default=50, help="number of random splits")
    splits.add_argument(
        "--calibration_share", type=float, default=0.8, help="expected share of the calibration part, in (0, 1)"
    )
    splits.add_argument("--seed", type=whole_number(0), default=0, help="decides the splits")
    goal = parser.add_argument_group("guarantee (lists are comma-separated; every combination is tried)")
    goal.add_argument("--consistency", type=texts, help="textual, risk; default: both if there are references")
    goal.add_argument("--metric", type=texts, help=f"{METRIC_NAMES}; default: {DEFAULT_METRIC}")
    add_metric_settings(goal)
    parser.only_with("--bleurt_checkpoint", "--metric=bleurt")
    goal.add_argument("--delta", type=numbers, default=(0.02, 0.05, 0.1, 0.25), help="risk tolerances of the table")
    goal.add_argument("--curve_delta", type=numbers, default=_CURVE, help="risk tolerances of the curves")
    goal.add_argument("--epsilon", type=numbers, default=(0.05,), help="allowed probabilities of error")
    add_tail_flag(goal)
    goal.add_argument("--risk_loss", choices=LOSSES_OF["risk"], help="for risk consistency; relu is the paper's")
    goal.add_argument(
        "--p_value",
        type=texts,
        help="tests of one threshold, made of sums; default: exact_binomial for tails and exact_match, else "
        "signed_mixture for signed losses, and hoeffding_bentkus",
    )
    goal.add_argument("--procedure", type=texts, default=("fixed_sequence",), help=f"of {', '.join(PROCEDURES)}")
    speed = parser.add_argument_group("speedup")
    speed.add_argument(
        "--speedup",
        action="store_true",
        help="measure the served decoder against the full model, one prompt at a time, at the thresholds of the table",
    )
    speed.add_argument("--speedup_prompts", type=whole_number(1), default=200, help="prompts timed, the same for all")
    parser.only_with("--speedup_prompts", "--speedup")


def add_flags_of_both(parser: FlagParser) -> None:
    """Adds flags that sweeps have too, with another meaning."""
    parser.add_argument(
        "--confidence",
        dest="confidences",
        type=texts,
        help="confidence measures to sweep; default: softmax, state, and classifier if the model has one",
    )
    parser.add_argument("--output", default="evaluation", help="directory for tables, figures, page and sweeps")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result of this experiment")


def fill_in_metric(flags: argparse.Namespace) -> None:
    """Sets the metric that the user left open."""
    flags.metric = flags.metric or (DEFAULT_METRIC,)


def asked_specs(
    flags: argparse.Namespace, consistencies: Sequence[str], *, is_clustered: bool = False
) -> tuple[tuple[PlannedTest, ...], tuple[PlannedTest, ...]]:
    """Returns the specs of the table, and those of the curves.

    Args:
      flags: Of `split_parser`, with a metric.
      consistencies: Kinds of consistency, which the user may leave to the data.
      is_clustered: Whether losses are means over clusters.

    Raises:
      ValueError: If a value or a combination is not allowed.
      MetricError: If a metric does not work.
    """
    if flags.risk_loss is not None and "risk" not in consistencies:
        raise UsageError("--risk_loss belongs to --consistency=risk, which is missing.")
    metrics = checked_metrics(flags.metric, metric_settings(flags))
    for name in flags.p_value or ():
        if name in P_VALUES and P_VALUES[name].needs_table:
            raise UsageError(
                f"--p_value={name} needs every single loss in an order of its own, and splits keep sums alone. Take "
                "one that is made of sums, such as signed_mixture."
            )

    def specs(deltas: Sequence[float]) -> tuple[PlannedTest, ...]:
        found = [
            spec
            for p_value in flags.p_value or (None,)
            for procedure in flags.procedure
            for spec in all_specs(
                consistencies=consistencies,
                metrics=metrics,
                deltas=deltas,
                epsilons=flags.epsilon,
                tails=flags.tail,
                risk_loss=flags.risk_loss,
                p_value=p_value,
                procedure=procedure,
                is_clustered=is_clustered,
            )
        ]
        return tuple(dict.fromkeys(found))

    return specs(flags.delta), specs(flags.curve_delta)
