"""Patience: how many layers in a row have predicted the same token."""

from typing import Any

from .measure import Measure, Need


def share_in_agreement(token: Any, earlier: Any) -> Any:
    """Returns the share of the last k exit layers that predict this token, this layer included.

    Missing layers count as disagreeing: at threshold 1, a token does not exit before k layers in a row have agreed.

    Args:
      token: int32, shape (...). Prediction at this layer.
      earlier: int32, shape (..., k - 1). Predictions at the k - 1 exit layers below; -1 where there are fewer.

    Returns:
      float32, shape (...): 1/k, 2/k, ..., or 1.

    Source: Zhou et al. (2020), "BERT Loses Patience", where an exit takes a number of agreeing layers in a row; a share
    here, so that a threshold can be calibrated.
    """
    import numpy as np

    k = earlier.shape[-1] + 1
    agreeing = (earlier == token[..., None]).sum(axis=-1)
    # Look shares up instead of dividing: a compiler may round the division differently, and a threshold may be a share.
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
