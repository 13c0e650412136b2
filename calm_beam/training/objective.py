"""The layer-weighted loss: the cross-entropy of every decoder layer's prediction, weighted towards the last."""

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.model.network import PAD_ID


def layer_weights(num_layers: int) -> np.ndarray:
    """Returns the share of each decoder layer in the loss: w_i = i / sum_j j, so that the last layer counts most.

    Args:
      num_layers: Decoder depth L, at least 1.

    Returns:
      float64, shape (num_layers,), increasing, with sum 1.

    Raises:
      ValueError: If `num_layers` is below 1.

    Source: CALM, section "Training early exit classifiers for local consistency" (weighted sum of layer losses).

    >>> layer_weights(4)
    array([0.1, 0.2, 0.3, 0.4])
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}.")
    layers = np.arange(1, num_layers + 1, dtype=np.float64)
    return layers / layers.sum()


def all_layers(num_layers: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns all layers, counted from 1, and their weights: the loss is then exact."""
    return np.arange(1, num_layers + 1, dtype=np.int32), layer_weights(num_layers)


def sampled_weights(num_layers: int, lower_layers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layers of an estimate of the loss and their weights: some lower layers, and always the last.

    Each lower layer stands for (L - 1) / k of them. When every set of k lower layers is equally likely, the weighted
    sum is an unbiased estimate of the exact loss, and so is its gradient.

    Args:
      num_layers: Decoder depth L.
      lower_layers: shape (k,), k at least 1. Distinct layers in [1, L - 1].

    Returns:
      Layers, int32, and weights, float64; both of shape (k + 1,), the last layer at the end.

    >>> sampled_weights(4, np.array([1, 3]))
    (array([1, 3, 4], dtype=int32), array([0.15, 0.45, 0.4 ]))
    """
    exact = layer_weights(num_layers)
    scale = (num_layers - 1) / len(lower_layers)
    layers = np.append(lower_layers, num_layers).astype(np.int32)
    return layers, np.append(exact[lower_layers - 1] * scale, exact[-1])


def sample_layers(
    num_layers: int, *, sampled_layers: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layers whose loss one step computes, and their weights.

    Args:
      num_layers: Decoder depth L.
      sampled_layers: Lower layers to draw, beside the last. 0 means all of them, exactly; so does L - 1 or more.
      generator: Source of the draw; not used when the loss is exact.

    Returns:
      Layers, int32, counted from 1, and weights, float64, of the same shape.
    """
    if sampled_layers == 0 or sampled_layers >= num_layers - 1:
        return all_layers(num_layers)
    return sampled_weights(num_layers, 1 + generator.choice(num_layers - 1, size=sampled_layers, replace=False))


def token_cross_entropy_sums(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the cross-entropy of each layer's predictions, summed over the target tokens that are not padding.

    Args:
      logits: float32, shape (layers, batch, target, vocabulary).
      targets: int32, shape (batch, target), 0-padded.

    Returns:
      float32, shape (layers,), in nats.
    """
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    # Comparing is dearer than picking the entry, but its gradient fuses with that of the softmax; the gradient of
    # picking is a scatter, which on CPU is a slow loop.
    is_target = jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None] == targets[..., None]
    target_logit = jnp.sum(jnp.where(is_target[None], logits, np.float32(0)), axis=-1)
    # [layers, batch, target] -> [layers]
    losses = jnp.where((targets != PAD_ID)[None], log_normalizer - target_logit, np.float32(0))
    return jnp.sum(losses, axis=(1, 2))


def count_target_tokens(targets: jax.Array) -> jax.Array:
    """Returns how many target tokens are not padding: int32, a scalar."""
    return jnp.sum(targets != PAD_ID, dtype=jnp.int32)


def layer_weighted_loss(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the weighted sum over layers of the mean cross-entropy per target token.

    Args:
      logits: float32, shape (layers, batch, target, vocabulary). Of all layers, or of a sample of them.
      targets: int32, shape (batch, target), 0-padded. Padding does not count, in the sum or in the number of tokens.
      weights: float32, shape (layers,). From `all_layers` or `sample_layers`.

    Returns:
      float32, a scalar, in nats; 0 if there is no target token.

    Source: CALM, section "Training early exit classifiers for local consistency".
    """
    tokens = jnp.maximum(count_target_tokens(targets), 1).astype(jnp.float32)
    return jnp.sum(weights * token_cross_entropy_sums(logits, targets)) / tokens
