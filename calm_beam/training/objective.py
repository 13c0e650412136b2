"""The layer-weighted loss: the cross-entropy of every decoder layer's prediction, weighted towards the last."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .config import LAYER_WEIGHTS


def layer_weights(num_layers: int, weighting: str = "linear") -> np.ndarray:
    """Returns the share of each decoder layer in the loss.

    Args:
      num_layers: Decoder depth L, at least 1.
      weighting: `linear` (w_i = i / sum_j j, the paper's choice), `uniform` (1 / L) or `exponential` (each layer twice
        the one below).

    Returns:
      float64, shape (num_layers,), not decreasing, with sum 1.

    Raises:
      ValueError: If `num_layers` is below 1, or the weighting is another.

    Source: CALM, section "Training early exit classifiers for local consistency" (weighted sum of layer losses); the
    others are those that the released T5X code offers in addition (`aggregation_weights` 0 and -1).

    >>> layer_weights(4)
    array([0.1, 0.2, 0.3, 0.4])
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}.")
    layers = np.arange(1, num_layers + 1, dtype=np.float64)
    weights: np.ndarray
    if weighting == "linear":
        weights = layers
    elif weighting == "uniform":
        weights = np.ones(num_layers)
    elif weighting == "exponential":
        weights = 2.0 ** (layers - num_layers)
    else:
        raise ValueError(f"layer_weights must be one of {', '.join(LAYER_WEIGHTS)}; got {weighting!r}.")
    normalized: np.ndarray = weights / weights.sum()
    return normalized


def all_layers(num_layers: int, weighting: str = "linear") -> tuple[np.ndarray, np.ndarray]:
    """Returns all layers, counted from 1, and their weights: the loss is then exact."""
    return np.arange(1, num_layers + 1, dtype=np.int32), layer_weights(num_layers, weighting)


def sampled_weights(
    num_layers: int, lower_layers: np.ndarray, *, weighting: str = "linear"
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layers of an estimate of the loss and their weights: some lower layers, and always the last.

    Each lower layer stands for (L - 1) / k of them. When every set of k lower layers is equally likely, the weighted
    sum is an unbiased estimate of the exact loss, and so is its gradient.

    Args:
      num_layers: Decoder depth L.
      lower_layers: shape (k,), k at least 1. Distinct layers in [1, L - 1].
      weighting: As in `layer_weights`.

    Returns:
      Layers, int32, and weights, float64; both of shape (k + 1,), the last layer at the end.

    >>> sampled_weights(4, np.array([1, 3]))
    (array([1, 3, 4], dtype=int32), array([0.15, 0.45, 0.4 ]))
    """
    exact = layer_weights(num_layers, weighting)
    scale = (num_layers - 1) / len(lower_layers)
    layers = np.append(lower_layers, num_layers).astype(np.int32)
    return layers, np.append(exact[lower_layers - 1] * scale, exact[-1])


def sample_layers(
    num_layers: int, *, sampled_layers: int, generator: np.random.Generator, weighting: str = "linear"
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layers whose loss one step computes, and their weights.

    Args:
      num_layers: Decoder depth L.
      sampled_layers: Lower layers to draw, besides the last. 0 means all of them, exactly; so does L - 1 or more.
      generator: Source of the draw; not used when the loss is exact.
      weighting: As in `layer_weights`.

    Returns:
      Layers, int32, counted from 1, and weights, float64, of the same shape.
    """
    if sampled_layers == 0 or sampled_layers >= num_layers - 1:
        return all_layers(num_layers, weighting)
    lower = 1 + generator.choice(num_layers - 1, size=sampled_layers, replace=False)
    return sampled_weights(num_layers, lower, weighting=weighting)


def rotating_layers(
    num_layers: int, *, every: int, step: int, weighting: str = "linear"
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layers whose loss one step computes where they take turns, and their weights.

    A lower layer is one of them in every so many steps, and stands for as many: over these steps, weights add up to
    those of the exact loss. The last layer is always one.

    Args:
      num_layers: Decoder depth L.
      every: R, at least 1: lower layers are R apart.
      step: Number of the step, from 1.
      weighting: As in `layer_weights`.

    Returns:
      As `sample_layers`.

    Source: LayerSkip (Elhoushi et al., 2024), section "Early Exit Loss": the rotational curriculum.

    >>> [rotating_layers(4, every=2, step=step)[0].tolist() for step in (1, 2, 3)]
    [[1, 3, 4], [2, 4], [1, 3, 4]]
    """
    lower = np.arange(1, num_layers, dtype=np.int32)
    lower = lower[(lower - step) % every == 0]
    exact = layer_weights(num_layers, weighting)
    return np.append(lower, np.int32(num_layers)), np.append(exact[lower - 1] * every, exact[-1])


def token_cross_entropy_sums(
    logits: jax.Array, targets: jax.Array, *, is_target: jax.Array, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> jax.Array:
    """Returns the cross-entropy of each layer's predictions, summed over the target tokens that are not padding.

    Args:
      logits: float32, shape (layers, batch, target, vocabulary), at least 2 ids.
      targets: int32, shape (batch, target).
      is_target: bool, shape (batch, target). False where there is padding, whatever ids it has.
      label_smoothing: Probability, in [0, 1), that is taken from the target and spread evenly over all other ids. The
        entropy of that distribution is subtracted, so that the least possible loss is 0.
      z_loss: Adds this times the squared log-normalizer of every token, which keeps logits from drifting.

    Returns:
      float32, shape (layers,), in nats.

    Source: T5X `losses.py` (label smoothing with its normalizing constant, z-loss).
    """
    vocabulary = logits.shape[-1]
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    # Comparing is dearer than picking the entry, but its gradient fuses with that of the softmax; the gradient of
    # picking is a scatter, which on CPU is a slow loop.
    is_its_id = jnp.arange(vocabulary, dtype=targets.dtype)[None, None] == targets[..., None]
    target_logit = jnp.sum(jnp.where(is_its_id[None], logits, np.float32(0)), axis=-1)
    expected_logit, entropy = target_logit, 0.0
    if label_smoothing:
        other = label_smoothing / (vocabulary - 1)
        expected_logit = (1 - label_smoothing - other) * target_logit + other * jnp.sum(logits, axis=-1)
        entropy = -(1 - label_smoothing) * math.log(1 - label_smoothing) - label_smoothing * math.log(other)
    losses = log_normalizer - expected_logit - entropy
    if z_loss:
        losses = losses + z_loss * jnp.square(log_normalizer)
    # [layers, batch, target] -> [layers]
    return jnp.sum(jnp.where(is_target[None], losses, np.float32(0)), axis=(1, 2))


def layer_weighted_loss(
    logits: jax.Array,
    targets: jax.Array,
    *,
    is_target: jax.Array,
    weights: jax.Array,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """Returns the weighted sum over layers of the mean cross-entropy per target token.

    Args:
      logits: float32, shape (layers, batch, target, vocabulary). Of all layers, or of a sample of them.
      targets: int32, shape (batch, target).
      is_target: bool, shape (batch, target). Padding does not count, in the sum or in the number of tokens.
      weights: float32, shape (layers,). From `all_layers` or `sample_layers`.
      label_smoothing: As in `token_cross_entropy_sums`.
      z_loss: As in `token_cross_entropy_sums`.

    Returns:
      float32, a scalar, in nats; 0 if there is no target token.

    Source: CALM, section "Training early exit classifiers for local consistency".
    """
    tokens = jnp.maximum(jnp.sum(is_target, dtype=jnp.int32), 1).astype(jnp.float32)
    sums = token_cross_entropy_sums(
        logits, targets, is_target=is_target, label_smoothing=label_smoothing, z_loss=z_loss
    )
    return jnp.sum(weights * sums) / tokens
