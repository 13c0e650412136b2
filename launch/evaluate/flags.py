"""The flags of the experiments of `calm-beam evaluate` on a sample of prompts."""

import argparse
import dataclasses
from collections.abc import Callable

from calm_beam.exits.measures import COMPARABLE
from calm_beam.launch.flags import FlagParser, add_exit_flags, numbers, texts, whole_number
from calm_beam.text import written_int

DEFAULT_POSITIONS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offered:
    """How the command line offers an experiment.

    Attributes:
      description: What it finds out, in one line.
      add_flags: Adds the flags that it has beside those of the task.
      has_sweeps: Whether it takes flags of workers.
    """

    description: str
    add_flags: Callable[[FlagParser], None]
    has_sweeps: bool


def _add_propagation_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group(
        "propagation: the noisy cache, in which exits are real but tokens the last layer's"
    )
    group.add_argument("--confidence", choices=COMPARABLE, default="softmax", help="its confidence measure")
    group.add_argument(
        "--thresholds",
        type=numbers,
        default=(0.9, 0.5, 0.0),
        help="its thresholds, comma-separated; default: 0.9,0.5,0",
    )


def _add_sensitivity_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("sensitivity")
    group.add_argument(
        "--positions",
        type=_positions,
        help=f"positions of the token to replace, from 0, as in 0-9,15,20; default: the first {DEFAULT_POSITIONS}",
    )
    group.add_argument("--rank", type=whole_number(1), default=10, help="rank of the token that replaces in `sampling`")


_LAST_POSITION = 1_000_000


def _positions(value: str) -> tuple[int, ...]:
    """Returns the whole numbers of a list of numbers and ranges."""
    found: list[int] = []
    for part in texts(value):
        first, dash, last = part.partition("-")
        try:
            start = written_int(first)
            end = written_int(last) if dash else start
        except ValueError:
            start = end = -1
        # No output has so many, and a list of a billion would not fit in memory.
        if not 0 <= start <= end <= _LAST_POSITION:
            raise argparse.ArgumentTypeError(f"expected positions from 0, as in 0-9,15,20; got {part!r}")
        found += range(start, end + 1)
    return tuple(found)


def _add_tradeoff_flags(parser: FlagParser) -> None:
    add_exit_flags(parser, default_grid_step=0.05)
    parser.add_argument(
        "--confidence",
        dest="confidences",
        type=texts,
        help=f"confidence measures, comma-separated, of {', '.join(COMPARABLE)}; default: all that the checkpoint has",
    )


OFFERED = {
    "propagation": Offered(
        description="what the cache of skipped layers does to outputs whose tokens are right",
        add_flags=_add_propagation_flags,
        has_sweeps=True,
    ),
    "sensitivity": Offered(
        description="what one wrong token does to the whole output, by its position",
        add_flags=_add_sensitivity_flags,
        has_sweeps=False,
    ),
    "tradeoff": Offered(
        description="layers per token against quality, for every confidence measure over the grid",
        add_flags=_add_tradeoff_flags,
        has_sweeps=True,
    ),
}
