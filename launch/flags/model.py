"""The flags that say of a model what its arrays do not show."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calm_beam.checkpoints import Declared

# As in `calm_beam.model`, which needs JAX.
_ACTIVATIONS = ("gelu", "silu", "relu")


def add_model_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags that go with `--checkpoint`."""
    group.add_argument(
        "--activation",
        choices=_ACTIVATIONS,
        help="of the feed-forward layers, where a T5X checkpoint comes without the config.gin that says it; silu is "
        "also called swish; default: T5's",
    )
    group.add_argument(
        "--relative_max_distance",
        type=int,
        help="distance from which positions share a bucket, in the same case; default: T5's, 128",
    )


def declared(flags: argparse.Namespace) -> "Declared":
    """Returns what the user says of the model."""
    # Here, since it needs JAX.
    from calm_beam.checkpoints import Declared

    return Declared(activation=flags.activation, relative_max_distance=flags.relative_max_distance)
