"""Rotary positions: the frequencies of a model, and what they make of queries and keys."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.model.interface import Numbers

from .config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Returns by how many radians each pair of values is turned per position.

    A `dynamic` scaling changes nothing here: it only sets in beyond `max_positions`, where nothing is decoded.

    Args:
      config: Of the model.

    Returns:
      float32, shape (turned / 2,).

    Source: Su et al. (2021), RoFormer, section 3.2.2; transformers `modeling_rope_utils.py` for the scalings.
    """
    scaling, dim = config.rope_scaling, config.turned
    plain: np.ndarray = config.rope_theta ** -(np.arange(0, dim, 2) / dim)
    if scaling.kind == "linear":
        plain = plain / scaling.factor
    elif scaling.kind == "llama3":
        # 1 where a wave fits so often into what the model was first trained on that it stays, 0 where it is stretched.
        rotations = scaling.original_max_positions * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        stays = np.clip((rotations - low) / (high - low), 0, 1)
        plain = plain * stays + plain / scaling.factor * (1 - stays)
    elif scaling.kind == "longrope":
        plain = plain / np.array(scaling.pair_factors)
    elif scaling.kind == "yarn":

        def dimension(rotations: float) -> float:
            """Returns the (fractional) pair that turns so often in what the model was first trained on."""
            wave = scaling.original_max_positions / (rotations * 2 * math.pi)
            return dim * math.log(wave) / (2 * math.log(config.rope_theta))

        first = max(math.floor(dimension(scaling.beta_fast)), 0)
        last = min(math.ceil(dimension(scaling.beta_slow)), dim - 1)
        stays = 1 - np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0, 1)
        plain = plain * stays + plain / scaling.factor * (1 - stays)
    return plain.astype(np.float32)


def rotated(values: jax.Array, positions: Numbers, *, config: LlamaConfig) -> jax.Array:
    """Returns queries or keys turned by their positions.

    Args:
      values: shape (..., heads, head_dim). Of those that are turned, value i of a head is paired with value
        i + turned / 2; the others come behind them and stay.
      positions: int32, shape (...), from 0.
      config: Of the model.
    """
    # [..., 1, turned / 2]
    angles = jnp.asarray(positions)[..., None, None].astype(jnp.float32) * _of_rank(
        inverse_frequencies(config), values.ndim
    )
    factor = np.float32(config.rope_scaling.attention_factor)
    cosines, sines = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    half = config.turned // 2
    first, second, rest = jnp.split(values, (half, 2 * half), axis=-1)
    return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines, rest], axis=-1)


def _of_rank(values: np.ndarray, rank: int) -> np.ndarray:
    return values.reshape((1,) * (rank - 1) + (-1,))
