"""Patience: how many layers in turn have predicted the same token."""

from typing import Any

from .measure import Measure, Need


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
