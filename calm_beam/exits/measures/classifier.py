"""The trained exit classifier."""

from typing import TYPE_CHECKING

from .measure import Measure, Need

if TYPE_CHECKING:
    import jax


def _score(score: "jax.Array") -> "jax.Array":
    return score


CLASSIFIER = Measure(
    name="classifier",
    meaning="probability by the trained exit classifier that the layer predicts what the last one would",
    needs=Need.CLASSIFIER,
    confidence=_score,
)
"""CALM, "Local confidence measures" (early exit classifier); the network itself is the model's `exit_score`."""
