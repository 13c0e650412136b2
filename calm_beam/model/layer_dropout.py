"""Layer dropout: in training, rows pass decoder layers by, deeper ones more often, so that lower ones learn to do."""

import jax
import jax.numpy as jnp


def layer_dropout_rates(num_layers: int, most: float) -> list[float]:
    """Returns how often a row passes each decoder layer by: never at the first, `most` at the last.

    Args:
      num_layers: Decoder depth, at least 1.
      most: In [0, 1).

    Source: LayerSkip (Elhoushi et al., 2024), section "Layer Dropout": exp(l ln 2 / (L - 1)) - 1 times the maximum.

    >>> [round(rate, 3) for rate in layer_dropout_rates(3, 0.2)]
    [0.0, 0.083, 0.2]
    """
    return [most * (2 ** (layer / max(1, num_layers - 1)) - 1) for layer in range(num_layers)]


def passed_by(before: jax.Array, after: jax.Array, *, rate: float, key: jax.Array) -> jax.Array:
    """Returns a layer's output, (batch, ...), but its input where a row passes it by. Nothing is scaled to make up.

    Args:
      before: Input of the layer.
      after: Its output.
      rate: Chance of a row to pass it by.
      key: Decides which do.
    """
    passes = jax.random.bernoulli(key, rate, before.shape[:1])
    return jnp.where(passes.reshape(-1, *(1,) * (before.ndim - 1)), before, after)
