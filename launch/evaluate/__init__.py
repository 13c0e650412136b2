"""`calm-beam evaluate --experiment=NAME`: the paper's experiments.

    calm-beam evaluate --experiment=tradeoff --output=evaluation

The default, `splits`, is about whole sets: see `evaluate.splits`. The others are on a sample of
prompts, with no other flags of the demo data, by the demo model. They write NAME.csv, NAME.json,
NAME.svg and NAME.html into `--output`. A sample is small: its outputs are kept in memory. `propagation` and `tradeoff`
decode in this process, or on the workers that Beam's flags name; `sensitivity` decodes in this process alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from calm_beam.launch.flags import FlagParser, add_request, parsed, parsed_with_beam, request_parser
from calm_beam.launch.flags.requests import with_result

from .request import DESCRIPTIONS, REQUESTS, Experiment, SampleRequest, SplitsRequest, SweptRequest
from .splits import splits_parser

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

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
    return (splits_parser(), *map(_parser, REQUESTS))


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    name = _experiment_name(argv)
    if name not in REQUESTS:
        splits, options = parsed_with_beam(SplitsRequest, argv, parser=splits_parser())
        # Here, and below, since it loads Beam or JAX, and help does without.
        from .splits.command import evaluate_splits

        return evaluate_splits(splits, options)
    kind, parser = REQUESTS[name], _parser(name)
    request: SampleRequest
    of_beam: PipelineOptions | None = None
    if issubclass(kind, SweptRequest):
        request, of_beam = parsed_with_beam(kind, argv, parser=parser)
    else:
        request = parsed(kind, argv, parser=parser)
    from .experiments import run_experiment

    return run_experiment(request, of_beam)


def _experiment_name(argv: Sequence[str]) -> str:
    """Returns which experiment is asked for: that decides which other flags there are."""
    parser = FlagParser(prog="calm-beam evaluate", add_help=False)
    add_request(parser, Experiment)
    name: str = parser.parse_known_args(list(argv))[0].experiment
    return name


def _parser(name: str) -> FlagParser:
    """Returns the parser of an experiment's flags."""
    description = DESCRIPTIONS[name]
    parser = request_parser(
        "evaluate",
        REQUESTS[name],
        doc=__doc__,
        essentials=_ESSENTIALS,
        description=f"{description[:1].upper()}{description[1:]}.",
    )
    return with_result(parser, logged=True)
