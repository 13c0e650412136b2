"""Measures of what layers hold and predict, which need no probabilities.

Hidden-state saturation is how little a layer changed the state, and the exit classifier is trained on states. Patience
is how many layers in turn have predicted the same token. The oracle is whether a layer already predicts what the last
one would, and `static` is always the same layer.
"""

from typing import TYPE_CHECKING, Any

from .measure import Measure, Need

if TYPE_CHECKING:
    import jax


def hidden_state_saturation(state: "jax.Array", below: "jax.Array") -> "jax.Array":
    """Returns the cosine similarity of a layer's output and the output of the layer below it.

    Defined from layer 2 on; layer 1 has confidence 0 by definition, so it exits at threshold 0 only.

    Args:
      state: shape (..., width). Output of layer i, without the final norm.
      below: shape (..., width). Output of layer i - 1.

    Returns:
      Shape (...), in [-1, 1].

    Source: CALM, "Local confidence measures" (hidden-state saturation).
    """
    import jax.numpy as jnp

    norms = jnp.linalg.norm(state, axis=-1) * jnp.linalg.norm(below, axis=-1)
    cosines: jax.Array = jnp.sum(state * below, axis=-1) / norms
    return cosines


def _saturation(state: "jax.Array", below: "jax.Array", layer: "jax.Array | int") -> "jax.Array":
    import jax.numpy as jnp

    # Layer 1 has nothing below that it could be close to: CALM lets it exit at threshold 0 only.
    return jnp.where(layer > 1, hidden_state_saturation(state, below), jnp.float32(0))


STATE = Measure(
    name="state",
    meaning="cosine similarity of a layer's output to the one below",
    needs=Need.STATES,
    confidence=_saturation,
)


def _score(score: "jax.Array") -> "jax.Array":
    return score


CLASSIFIER = Measure(
    name="classifier",
    meaning="probability by the trained exit classifier that the layer predicts what the last one would",
    needs=Need.CLASSIFIER,
    confidence=_score,
)
"""CALM, "Local confidence measures" (early exit classifier); the network itself is the model's `exit_score`."""


def share_in_agreement(token: Any, earlier: Any) -> Any:
    """Returns which share of the last k layers that may exit predict this token, this layer included.

    Layers that are not there count as ones that disagree: a token does not leave at threshold 1 before k layers in a
    row have agreed.

    Args:
      token: int32, shape (...). Predicted here.
      earlier: int32, shape (..., k - 1). Predicted at the k - 1 layers below that may exit; -1 where there are fewer.

    Returns:
      float32, shape (...): 1/k, 2/k, ..., or 1.

    Source: Zhou et al. (2020), "BERT Loses Patience", where an exit takes as many agreeing layers in a row; as a share,
    so that a threshold can be calibrated.
    """
    import numpy as np

    k = earlier.shape[-1] + 1
    agreeing = (earlier == token[..., None]).sum(axis=-1)
    # Looked up: a compiler may divide by a constant in a way of its own, and a threshold may be such a share.
    shares = (np.arange(1, k + 1) / k).astype(np.float32)
    if isinstance(token, np.ndarray):
        return shares[agreeing]
    import jax.numpy as jnp

    return jnp.asarray(shares)[agreeing]


PATIENCE = Measure(
    name="patience",
    meaning="share of the last layers that may exit, --patience of them, which predict the same token",
    needs=Need.TOKENS,
    confidence=share_in_agreement,
)


def agreement(token: Any, last_token: Any) -> Any:
    """Returns 1 where both tokens are the same, else 0.

    Not a confidence measure that can be served, since it needs the last layer: the bound that measures are compared to.

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
