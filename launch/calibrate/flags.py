"""The flags of `calm-beam calibrate`, and what is taken where they are left out."""

import argparse
import itertools

from calm_beam.calibration.guarantee import MOST_KEPT_LOSSES
from calm_beam.calibration.pareto import CHOOSING_SHARE, MOST_BY_THEMSELVES, variants_plan
from calm_beam.demo import embedded
from calm_beam.inputs.set_parts import CALIBRATING, SetPart, salt_of
from calm_beam.launch.flags import (
    FlagParser,
    UsageError,
    add_decode_flags,
    confidences,
    measures_in_words,
    numbers,
    share,
    texts,
    utf8_text,
    whole_number,
    whole_numbers,
)
from calm_beam.launch.flags.accelerators import add_job_flags
from calm_beam.launch.flags.metrics import METRIC_NAMES, add_metric_settings
from calm_beam.launch.terminal import say
from calm_beam.manifest import COUNT_NEAR_TIES, LOSSES_OF, NEAR_TIES, VARIANT_MEASURES, ManifestError, Variant
from calm_beam.metrics.registry import DEFAULT_METRIC
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.stopping import ROUNDS_WITHOUT_GAIN

SEQUENTIAL_FLAGS = ("--round_examples", "--stop_at_threshold", "--stop_at_layers", "--stop_gain")
_ROUND_EXAMPLES = 500


_ESSENTIALS = (
    "--checkpoint",
    "--vocabulary",
    "--data",
    "--task_prefix",
    "--max_decode_length",
    "--thresholds",
    "--consistency",
    "--metric",
    "--delta",
    "--epsilon",
    "--output",
    "--overwrite",
    "--resume",
    "--generations",
)


def calibrate_parser(doc: str | None = None) -> FlagParser:
    """Returns the parser of the command line; its help shows what the docstring says."""
    parser = FlagParser(prog="calm-beam calibrate", doc=doc, essentials=_ESSENTIALS)
    add_decode_flags(parser, default_grid_step=0.05)
    add_job_flags(parser)
    goal = parser.add_argument_group("guarantee (lists are comma-separated; every combination is one manifest entry)")
    goal.add_argument("--consistency", type=texts, help="textual, risk; default: textual (embedded model: both)")
    goal.add_argument("--metric", type=texts, help=f"{METRIC_NAMES}; default: {DEFAULT_METRIC}")
    add_metric_settings(goal)
    parser.only_with("--bleurt_checkpoint", "--metric=bleurt")
    goal.add_argument("--delta", type=numbers, help="risk tolerances in (0, 1); default: 0.1")
    goal.add_argument(
        "--epsilon", type=numbers, default=(0.05,), help="allowed probabilities of error in (0, 1); default: 0.05"
    )
    add_tail_flag(goal)
    goal.add_argument(
        "--joint", action="store_true", help="let all entries hold together, with probability 1 - epsilon"
    )
    goal.add_argument(
        "--serve",
        metavar="ENTRY",
        help="the entry that will be served, settled before any loss is seen, such as textual,0.05: its consistency, "
        "delta, metric or loss, or NAME=VALUE, as far as they tell it from the others",
    )
    test = parser.add_argument_group("test")
    test.add_argument(
        "--risk_loss",
        choices=LOSSES_OF["risk"],
        help="for risk consistency; relu is the paper's; default: signed, or relu if --p_value needs losses in [0, 1]",
    )
    test.add_argument(
        "--p_value",
        choices=tuple(P_VALUES),
        help="test of one threshold; default: signed_mixture with --sequential; else exact_binomial for tails and "
        "exact_match; else star_bets, if every single loss can be kept: without groups and --choosing_share, up to "
        f"{MOST_KEPT_LOSSES:,} (examples x thresholds x variants x entries); else signed_mixture for signed losses, "
        "and hoeffding_bentkus",
    )
    test.add_argument(
        "--procedure",
        choices=tuple(PROCEDURES),
        help="test of the grid of thresholds; default: fixed_sequence; several variants have procedures of their own",
    )
    test.add_argument(
        "--cluster_key",
        type=utf8_text,
        help="key of a row that names its cluster, where examples are drawn in clusters",
    )
    goal.add_argument(
        "--group_key",
        type=utf8_text,
        help="key of a row that names its group, such as its language: besides the entries about all prompts, each "
        "group has entries of its own",
    )
    test.add_argument(
        "--seed",
        type=whole_number(0),
        default=0,
        help="of the order of examples, for wsr, star_bets and --sequential, and of which of them choose among "
        "variants, or confirm",
    )
    goal.add_argument("--output", default="calibration", help="directory for manifest, risk table and generations")
    test.add_argument(
        "--sweep",
        choices=("full", "lazy"),
        default="full",
        help="lazy decodes the grid in blocks from the top, until no guarantee's test goes on: the same manifest "
        "entries for less work, with generations of the upper thresholds only",
    )
    test.add_argument(
        "--near_ties",
        choices=NEAR_TIES,
        default=COUNT_NEAR_TIES,
        help="outputs that hang on a decision within rounding, which another engine may make otherwise: count them, or "
        "worst_case, which gives them loss 1 (default: %(default)s)",
    )
    test.add_argument(
        "--confirm_share",
        type=share,
        metavar="SHARE",
        help="share of the examples, such as 0.3, that choose nothing: they are decoded at the chosen thresholds, and "
        "at two that are safer, by the decoder that serves, and only thresholds that they prove again are promised",
    )
    variants = parser.add_argument_group(
        "variants (lists are comma-separated; every combination is swept; each is tested by itself, or some of the "
        "examples choose what the others test)"
    )
    variants.add_argument(
        "--confidence", type=confidences, default=("softmax",), help=f"confidence measures: {measures_in_words()}"
    )
    variants.add_argument("--tau", type=numbers, help="temperatures of a decaying schedule")
    variants.add_argument(
        "--min_exit_layer", type=whole_numbers(1), default=(1,), help="lowest layers that may exit; default: 1"
    )
    variants.add_argument(
        "--exit_interval", type=whole_numbers(1), default=(1,), help="distances of layers that may exit; default: 1"
    )
    variants.add_argument(
        "--choosing_share",
        type=share,
        metavar="SHARE",
        help="share of the examples that choose, and test nothing; default: none where there are up to "
        f"{MOST_BY_THEMSELVES} variants, each of which is then tested by itself at an equal share of epsilon, and "
        f"{CHOOSING_SHARE:g} where there are more",
    )
    rounds = parser.add_argument_group("sequential (stop decoding when enough is proved)")
    rounds.add_argument(
        "--sequential",
        action="store_true",
        help="decode in rounds, look at the tests after each, and stop by the first of the following rules, or when "
        "nothing is left to prove; tests by signed_mixture, which holds at any time",
    )
    rounds.add_argument(
        "--round_examples",
        type=whole_number(1),
        help=f"a round has as many shards as hold about so many examples; default: {_ROUND_EXAMPLES}",
    )
    rounds.add_argument(
        "--stop_at_threshold", type=float, metavar="L", help="stop once every entry has accepted this threshold"
    )
    rounds.add_argument(
        "--stop_at_layers", type=float, metavar="X", help="stop once every entry uses at most so many mean layers"
    )
    rounds.add_argument(
        "--stop_gain",
        type=share,
        metavar="SHARE",
        help=f"stop after {ROUNDS_WITHOUT_GAIN} rounds in a row in which no entry saved this share of its layers, such "
        "as 2%%; entries without a threshold go on",
    )
    again = parser.add_argument_group("going on")
    again.add_argument(
        "--resume",
        action="store_true",
        help="go on with a run that was killed or failed: decode the missing shards only; or with a sequential one "
        "that stopped, by another rule",
    )
    again.add_argument(
        "--generations",
        metavar="DIR",
        help="calibrate the generations of an earlier run, its --output or a folder below generations/, and decode "
        "nothing; --thresholds or --grid_step may take a part of its grid. Every plan is listed beside them, and only "
        "the first is sure to have been settled before its results were seen",
    )
    return parser


def add_tail_flag(group: argparse._ActionsContainer) -> None:
    """Adds the flag that asks for guarantees of tails."""
    group.add_argument(
        "--tail",
        type=numbers,
        default=(),
        help="losses in [0, 1) that an output may have: besides the mean, the share of outputs that lose more is held "
        "to every --delta, by the exact binomial test",
    )


def fill_in_defaults(flags: argparse.Namespace) -> None:
    """Sets what the user left open: the embedded task where neither model nor data were named."""
    if flags.generations is None and flags.checkpoint is None and flags.data is None:
        say("no --checkpoint and no --data: calibrating the embedded model on the embedded data")
        flags.checkpoint = str(embedded.MODEL)
        flags.data = (str(embedded.CALIBRATION_SET),)
        if flags.grid_step is None:
            flags.thresholds = flags.thresholds or embedded.THRESHOLDS
        flags.consistency = flags.consistency or embedded.CONSISTENCIES
        flags.metric = flags.metric or embedded.METRICS
        flags.delta = flags.delta or embedded.DELTAS
    _take_variants(flags)
    if flags.sequential:
        flags.round_examples = flags.round_examples or _ROUND_EXAMPLES
        # The only one that may be watched.
        flags.p_value = flags.p_value or "signed_mixture"
    elif given := next((name for name in SEQUENTIAL_FLAGS if getattr(flags, name[2:]) is not None), None):
        raise UsageError(f"{given} belongs to --sequential, which is missing.")
    flags.order = salt_of(flags.seed) if flags.sequential else None
    flags.part = None
    if flags.confirm_share is not None:
        flags.part = SetPart(name=CALIBRATING, confirm_share=flags.confirm_share, salt=salt_of(flags.seed))
    flags.consistency = flags.consistency or ("textual",)
    if flags.risk_loss is not None and "risk" not in flags.consistency:
        raise UsageError("--risk_loss belongs to --consistency=risk, which is missing.")
    flags.metric = flags.metric or (DEFAULT_METRIC,)
    flags.delta = flags.delta or (0.1,)


def _take_variants(flags: argparse.Namespace) -> None:
    """Sets the variants and what tests them: none where there is one of each; then the flags are the first."""
    lists = {
        "confidence": flags.confidence,
        "tau": flags.tau or (None,),
        "min_exit_layer": flags.min_exit_layer,
        "exit_interval": flags.exit_interval,
    }
    for name, values in lists.items():
        if repeated := next((value for value in values if values.count(value) > 1), None):
            shown = repeated if isinstance(repeated, str) else f"{repeated:g}"
            raise UsageError(f"--{name} lists {shown} twice. Give every value once.")
    combinations = list(itertools.product(*lists.values()))
    flags.confidence, flags.tau, flags.min_exit_layer, flags.exit_interval = combinations[0]
    flags.variants = ()
    if len(combinations) == 1:
        if flags.choosing_share is not None:
            raise UsageError(
                f"--choosing_share belongs to lists of {' or '.join(f'--{name}' for name in lists)}, and there is none."
            )
        flags.procedure = flags.procedure or "fixed_sequence"
        return
    _check_variants(flags, count=len(combinations))
    # What all variants have in common is not named by each.
    has_measures, has_intervals = len(lists["confidence"]) > 1, len(lists["exit_interval"]) > 1
    if has_measures and (other := next((name for name in lists["confidence"] if name not in VARIANT_MEASURES), None)):
        raise UsageError(
            f"--confidence lists {other}, which has to be calibrated by itself. Lists take "
            f"{', '.join(VARIANT_MEASURES)}."
        )
    try:
        flags.variants = tuple(
            Variant(
                tau=tau,
                min_exit_layer=layer,
                confidence=measure if has_measures else None,
                exit_interval=interval if has_intervals else None,
            )
            for measure, tau, layer, interval in combinations
        )
    except ManifestError as error:
        raise UsageError(f"--{error}.") from error
    pareto = variants_plan(flags.variants, choosing_share=flags.choosing_share)
    flags.procedure, flags.choosing_share = pareto.procedure, pareto.choosing_share
    _check_choosing(flags, count=len(combinations))


def _check_variants(flags: argparse.Namespace, *, count: int) -> None:
    """Refuses what several variants do not go together with."""
    lists = f"--confidence, --tau, --min_exit_layer and --exit_interval give {count} variants, "
    one = "Give one value of each, or leave"
    if flags.sequential:
        raise UsageError(f"{lists}and --sequential goes through one grid in rounds. {one} --sequential out.")
    if flags.sweep == "lazy":
        raise UsageError(f"{lists}and --sweep=lazy goes down one grid as far as its test does. {one} --sweep out.")
    if flags.group_key is not None:
        raise UsageError(f"{lists}and --group_key gives groups entries of their own. {one} --group_key out.")
    if flags.procedure is not None:
        raise UsageError(
            f"{lists}which are tested in a way of their own; --procedure={flags.procedure} tests the grid of one. "
            f"{one} --procedure out."
        )


def _check_choosing(flags: argparse.Namespace, *, count: int) -> None:
    """Refuses what does not go together with a part of the examples that chooses."""
    if flags.choosing_share is not None and flags.p_value is not None and P_VALUES[flags.p_value].needs_table:
        raise UsageError(
            f"of {count} variants, among which a part of the examples chooses, losses are only summed, and "
            f"--p_value={flags.p_value} needs every single one. Take another p-value, or at most {MOST_BY_THEMSELVES} "
            "variants without --choosing_share."
        )
