"""Rotary positions: the frequencies of a model, and what they make of queries and keys."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.model.interface import Numbers

from .config import LlamaConfig, RopeScaling


class Turning(NamedTuple):
    """How a layer turns queries and keys.

    Attributes:
      frequencies: float32, shape (turned / 2,). Radians per position of each pair; 0 if it does not turn.
      factor: float32 scalar. What cosines and sines are multiplied by.
    """

    frequencies: jax.Array | np.ndarray
    factor: jax.Array | np.float32


def turnings(config: LlamaConfig) -> list[Turning]:
    """Returns how each layer turns."""
    plain = RopeScaling()
    still = Turning(np.zeros(config.turned // 2, np.float32), np.float32(1))
    usual = Turning(inverse_frequencies(config), np.float32(config.rope_scaling.attention_factor))
    local = usual
    if config.local_rope_theta is not None:
        of_windows = dataclasses.replace(
            config, rope_theta=config.local_rope_theta, local_rope_theta=None, rope_scaling=plain
        )
        local = Turning(inverse_frequencies(of_windows), np.float32(plain.attention_factor))
    return [
        still if index in config.unturned_layers else local if index in config.windowed_layers else usual
        for index in range(config.num_decoder_layers)
    ]


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Returns by how many radians each pair of values is turned per position, in layers that turn as most do.

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


def rotated(values: jax.Array, positions: Numbers, *, turning: Turning) -> jax.Array:
    """Returns queries or keys turned by their positions.

    Args:
      values: shape (..., heads, head_dim). Of those that are turned, value i of a head is paired with value
        i + turned / 2; the others come behind them and stay.
      positions: int32, shape (...), from 0.
      turning: Of the layer.
    """
    # [..., 1, turned / 2]
    angles = jnp.asarray(positions)[..., None, None].astype(jnp.float32) * _of_rank(turning.frequencies, values.ndim)
    cosines, sines = jnp.cos(angles) * turning.factor, jnp.sin(angles) * turning.factor
    half = turning.frequencies.shape[0]
    first, second, rest = jnp.split(values, (half, 2 * half), axis=-1)
    return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines, rest], axis=-1)


def _of_rank(values: Any, rank: int) -> Any:
    return values.reshape((1,) * (rank - 1) + (-1,))
