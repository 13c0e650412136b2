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
    add_options,
    add_request,
    as_usage,
    given_flags,
    parse_flags,
    parse_own_flags,
    request_of,
)
from calm_beam.options.groups import Spread

from .request import DESCRIPTIONS, REQUESTS, Experiment
from .splits import splits_parser
from .splits.request import SplitsRequest

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
    return (splits_parser(), *(_parser(name) for name in REQUESTS))


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    name = _experiment_name(argv)
    if name not in REQUESTS:
        return _main_of_splits(argv)
    parser, kind = _parser(name), REQUESTS[name]
    options = None
    with as_usage((ValueError, OSError)):
        if issubclass(kind, Spread):
            flags, options = parse_flags(parser, argv)
        else:
            flags = parse_own_flags(parser, argv)
        request = request_of(kind, flags, parser=parser)
    # Here, since it loads JAX, and help does without.
    from .command import run_experiment

    return run_experiment(request, options)


def _main_of_splits(argv: Sequence[str]) -> int:
    parser = splits_parser()
    with as_usage((ValueError, OSError)):
        flags, options = parse_flags(parser, argv)
        request = request_of(SplitsRequest, flags, parser=parser)
        request.check_given(given_flags(parser, argv))
    # Here, since it loads Beam, and help does without.
    from .splits.command import evaluate_splits

    return evaluate_splits(request, options)


def _experiment_name(argv: Sequence[str]) -> str:
    """Returns which experiment is asked for: that decides which other flags there are."""
    parser = FlagParser(prog="calm-beam evaluate", add_help=False)
    parser.add_config_flag()
    add_options(parser, Experiment)
    name: str = parser.parse_known_args(list(argv))[0].experiment
    return name


def _parser(name: str) -> FlagParser:
    """Returns the parser of an experiment's flags."""
    description = DESCRIPTIONS[name]
    parser = FlagParser(
        prog="calm-beam evaluate",
        doc=__doc__,
        description=f"{description[:1].upper()}{description[1:]}.",
        essentials=_ESSENTIALS,
    )
    add_request(parser, REQUESTS[name])
    return parser
