"""Static exits: always the same layer."""

from .measure import Measure, Need


def share_of_depth(layer: int, num_layers: int) -> float:
    """Returns i / L at layer i of L, so that threshold m / L exits every token at layer m."""
    return layer / num_layers


STATIC = Measure(
    name="static",
    meaning="i / L at layer i of L: threshold m / L exits every token at layer m",
    needs=Need.LAYER,
    confidence=share_of_depth,
    takes_schedule=False,
)
