"""What a user says of a model that its arrays do not show."""

from typing import TYPE_CHECKING

from calm_beam.options.groups import ModelFacts

if TYPE_CHECKING:
    from calm_beam.checkpoints import Declared


def declared(facts: ModelFacts) -> "Declared":
    """Returns what the user says of the model."""
    # Here, since it needs JAX.
    from calm_beam.checkpoints import Declared

    return Declared(activation=facts.activation, relative_max_distance=facts.relative_max_distance)
