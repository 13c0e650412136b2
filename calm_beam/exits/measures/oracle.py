"""The oracle: whether a layer already predicts what the last one would."""

from typing import Any

from .measure import Measure, Need


def agreement(token: Any, last_token: Any) -> Any:
    """Returns 1 where both tokens are the same, else 0.

    It cannot be served, since it needs the last layer: it is the bound that other measures are compared to.

    Args:
      token: int32, shape (...). Predicted at any layer.
      last_token: int32, same shape. Predicted at layer L.

    Returns:
      float32, shape (...).

    Source: CALM, "State propagation" (oracle confidence measure).
    """
    return (token == last_token).astype("float32")


ORACLE = Measure(
    name="oracle",
    meaning="1 where a layer predicts the token that the last one would, else 0; for analysis",
    needs=Need.LAST_TOKEN,
    confidence=agreement,
    takes_schedule=False,
)
