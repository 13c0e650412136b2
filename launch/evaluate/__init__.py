"""`calm-beam evaluate --experiment=NAME`: the paper's experiments.

    calm-beam evaluate --experiment=tradeoff --output=evaluation

The default, `splits`, is about whole sets: see `evaluate.splits`. The others are on a sample of
prompts, with no other flags of the embedded data, by the embedded model. They write NAME.csv, NAME.json,
NAME.svg and NAME.html into `--output`. A sample is small: its outputs are kept in memory. `propagation` and `tradeoff`
decode in this process, or on the workers that Beam's flags name; `sensitivity` decodes in this process alone.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import (
    FlagParser,
    add_task_flags,
    add_worker_flags,
    as_usage,
    parse_flags,
    parse_own_flags,
    whole_number,
)
from calm_beam.launch.flags.accelerators import add_job_flags
from calm_beam.launch.flags.metrics import METRIC_NAMES, add_metric_settings
from calm_beam.metrics.registry import DEFAULT_METRIC

from . import splits
from .flags import OFFERED

_ESSENTIALS = (
    "--experiment",
    "--checkpoint",
    "--data",
    "--metric",
    "--max_examples",
    "--output",
    "--overwrite",
    # Of one or two experiments each.
    "--thresholds",
    "--grid_step",
    "--positions",
)


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all experiments, that of `splits` first."""
    return (splits.splits_parser(_add_experiment_flag), *(_parser(name) for name in OFFERED))


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    with as_usage():
        name = _experiment_name(argv)
    if name == "splits":
        return splits.main(argv, add_experiment_flag=_add_experiment_flag)
    options = None
    with as_usage((ValueError, OSError)):
        if OFFERED[name].has_sweeps:
            flags, options = parse_flags(_parser(name), argv)
        else:
            flags = parse_own_flags(_parser(name), argv)
    # Here, since it loads JAX, and help does without.
    from .command import run_experiment

    return run_experiment(name, flags=flags, options=options)


def _experiment_name(argv: Sequence[str]) -> str:
    """Returns which experiment is asked for: that decides which other flags there are."""
    parser = FlagParser(prog="calm-beam evaluate", add_help=False)
    _add_experiment_flag(parser)
    name: str = parser.parse_known_args(list(argv))[0].experiment
    return name


def _add_experiment_flag(parser: FlagParser) -> None:
    descriptions = {"splits": splits.DESCRIPTION}
    descriptions |= {name: experiment.description for name, experiment in OFFERED.items()}
    described = "; ".join(f"{name}: {description}" for name, description in descriptions.items())
    parser.add_argument("--experiment", choices=tuple(descriptions), default="splits", help=described)


def _parser(name: str) -> FlagParser:
    """Returns the parser of an experiment's flags."""
    description = OFFERED[name].description
    parser = FlagParser(
        prog="calm-beam evaluate",
        doc=__doc__,
        description=f"{description[:1].upper()}{description[1:]}.",
        essentials=_ESSENTIALS,
    )
    _add_experiment_flag(parser)
    add_task_flags(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--metric", help=f"{METRIC_NAMES}; default: {DEFAULT_METRIC}")
    add_metric_settings(run)
    parser.only_with("--bleurt_checkpoint", "--metric=bleurt")
    run.add_argument(
        "--max_examples", type=whole_number(1), default=200, help="size of the sample, drawn by a hash of the ids"
    )
    run.add_argument("--output", default="evaluation", help="directory for table, plot and page")
    run.add_argument("--overwrite", action="store_true", help="replace an earlier result of this experiment")
    OFFERED[name].add_flags(parser)
    if OFFERED[name].has_sweeps:
        workers = parser.add_argument_group("workers (Beam's own flags, such as --runner, may be added)")
        add_worker_flags(workers)
        add_job_flags(parser)
    return parser
