"""What flags say of a model that its arrays do not show."""

import argparse
from typing import TYPE_CHECKING

from calm_beam.options.groups import ModelFacts

if TYPE_CHECKING:
    from calm_beam.checkpoints import Declared


def declared(flags: argparse.Namespace | ModelFacts) -> "Declared":
    """Returns what the user says of the model."""
    # Here, since it needs JAX.
    from calm_beam.checkpoints import Declared

    return Declared(activation=flags.activation, relative_max_distance=flags.relative_max_distance)
