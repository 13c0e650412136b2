"""Attention of Llama's family: norms, rotary positions, and queries that share keys and values in groups.

Rotary positions have frequencies that depend on the model. Queries attend to their keys in several parts, whose
shares merge into one softmax.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from calm_beam.model.interface import Attended, KeysValues, Numbers, Sources
from calm_beam.model.numerics import MASKED, Dense, capped, einsum, matrix_product, parameter, rounded, widened
from calm_beam.precision import FLOAT32, Precision

from .config import LlamaConfig, RopeScaling


class Turning(NamedTuple):
    """The rotation of queries and keys in a layer, by rotary positions.

    Attributes:
      frequencies: float32, shape (turned / 2,). Radians per position of each pair; 0 in layers without rotation.
      factor: float32 scalar. Factor of cosines and sines.
    """

    frequencies: jax.Array | np.ndarray
    factor: jax.Array | np.float32


def turnings(config: LlamaConfig) -> list[Turning]:
    """Returns the rotation of each layer."""
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
    """Returns the radians by which each pair of values turns per position, in layers without a local base.

    A `dynamic` scaling changes nothing here: it only applies beyond `max_positions`, where nothing is decoded.

    Args:
      config: The model's config.

    Returns:
      float32, shape (turned / 2,).

    Source: Su et al. (2021), RoFormer, section 3.2.2; transformers `modeling_rope_utils.py` for the scalings.
    """
    scaling, dim = config.rope_scaling, config.turned
    plain: np.ndarray = config.rope_theta ** -(np.arange(0, dim, 2) / dim)
    if scaling.kind == "linear":
        plain = plain / scaling.factor
    elif scaling.kind == "llama3":
        # 1 where a wave fits into the original context so often that it stays, 0 where it is stretched.
        rotations = scaling.original_max_positions * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        stays = np.clip((rotations - low) / (high - low), 0, 1)
        plain = plain * stays + plain / scaling.factor * (1 - stays)
    elif scaling.kind == "longrope":
        plain = plain / np.array(scaling.pair_factors)
    elif scaling.kind == "yarn":

        def dimension(rotations: float) -> float:
            """Returns the (fractional) pair with so many rotations in the original context."""
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
      values: shape (..., heads, head_dim). Value i of a head is paired with value i + turned / 2; the values after the
        turned ones stay.
      positions: int32, shape (...), from 0.
      turning: The layer's rotation.
    """
    # [..., 1, turned / 2]
    angles = jnp.asarray(positions)[..., None, None].astype(jnp.float32) * _of_rank(turning.frequencies, values.ndim)
    cosines, sines = jnp.cos(angles) * turning.factor, jnp.sin(angles) * turning.factor
    half = turning.frequencies.shape[0]
    first, second, rest = jnp.split(values, (half, 2 * half), axis=-1)
    return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines, rest], axis=-1)


def _of_rank(values: Any, rank: int) -> Any:
    return values.reshape((1,) * (rank - 1) + (-1,))


class Share(NamedTuple):
    """The attention of queries over a part of their keys, before normalisation.

    Attributes:
      mixed: float32, shape (..., heads, head_dim). Sum of the values, each times the exponential of its logit, divided
        by 2 to the power of `largest`.
      largest: float32, shape (..., heads). The least whole number for which no exponential is above 1 after the
        division; far below any other if no key was seen.
      total: float32, shape (..., heads). Sum of the exponentials, divided in the same way; 0 if no key was seen.
    """

    mixed: jax.Array
    largest: jax.Array
    total: jax.Array

    def merged(self, other: "Share") -> jax.Array:
        """Returns the attention output over both parts, (..., heads, head_dim); at least one key must be seen."""
        largest = jnp.maximum(self.largest, other.largest)
        mine, theirs = jnp.exp2(self.largest - largest), jnp.exp2(other.largest - largest)
        total = mine * self.total + theirs * other.total
        mixed = mine[..., None] * self.mixed + theirs[..., None] * other.mixed
        return mixed / total[..., None]


class RMSNorm(nn.Module):
    """Scales every vector to unit root mean square; no mean is subtracted and no bias added.

    Attributes:
      config: The model's config, with the epsilon, and whether to add 1 to the scale.
      precision: Its type is that of the normed inputs; they are float32 until then.
    """

    config: LlamaConfig
    precision: Precision = FLOAT32

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the normed inputs, shape (..., width)."""
        scale = parameter(self, "scale", nn.initializers.ones, (inputs.shape[-1],))
        if self.config.unit_offset_norms:
            scale = scale + np.float32(1)
        wide = widened(inputs)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + np.float32(self.config.norm_epsilon))
        return rounded(normed * scale.reshape((1,) * (inputs.ndim - 1) + (-1,)), self.precision)


_LOG_2 = np.float32(np.log(2))


class Attention(nn.Module):
    """Self-attention, whose keys and values can be computed separately from its queries.

    Attributes:
      config: The model's config.
      precision: Precision of its products.
    """

    config: LlamaConfig
    precision: Precision

    def setup(self) -> None:
        """Declares kernels, [in, out], their biases, and the norms of queries and keys."""
        config = self.config
        for name, heads in {
            "query": config.num_heads,
            "key": config.num_kv_heads,
            "value": config.num_kv_heads,
        }.items():
            setattr(self, name, Dense(heads * config.head_dim, self.precision, use_bias=config.attention_bias))
            if config.query_key_norms and name != "value":
                setattr(self, f"{name}_norm", RMSNorm(config))
        self.out = Dense(config.emb_dim, self.precision)

    def queries(self, inputs: jax.Array, positions: Numbers, *, turning: Turning) -> jax.Array:
        """Returns scaled, turned queries, (..., heads, head_dim), of normed states, (..., width), and positions."""
        config = self.config
        queries = self._normed("query", self.query(inputs), config.num_heads)
        factor = config.head_dim**-0.5 if config.query_factor is None else config.query_factor
        return self._rounded(rotated(queries, positions, turning=turning) * np.float32(factor))

    def keys_values(self, inputs: jax.Array, positions: Numbers, *, turning: Turning) -> KeysValues:
        """Returns turned keys, and values, each (..., heads of keys, head_dim); for the arguments see `queries`."""
        keys = self._normed("key", self.key(inputs), self.config.num_kv_heads)
        values = self._split(self.value(inputs), self.config.num_kv_heads)
        return self._rounded(rotated(keys, positions, turning=turning)), self._rounded(values)

    def output(self, mixed: jax.Array) -> jax.Array:
        """Returns the projected output, float32, (..., width), of float32 (..., heads, head_dim)."""
        return self.out(self._rounded(mixed.reshape(*mixed.shape[:-2], -1)))

    def attend_in_prompt(self, queries: jax.Array, keys_values: KeysValues, *, is_seen: jax.Array) -> jax.Array:
        """Returns the attention output at positions of prompts, as float32.

        Args:
          queries: shape (batch, positions, heads, head_dim).
          keys_values: Each of shape (batch, heads of keys, source, head_dim).
          is_seen: bool, shape (positions, source). By position of query and of key; each query sees a key.

        Returns:
          Shape of `queries`.
        """
        keys, values = keys_values
        # [batch, positions, heads of keys, group, head_dim] -> [batch, heads of keys, group, positions, head_dim]
        grouped = jnp.moveaxis(self._grouped(queries), 1, -2)
        logits = self._logits(grouped, jnp.swapaxes(keys, -1, -2)[:, :, None])
        exponentials, _ = _exponentials(jnp.where(is_seen[None, None, None], logits, MASKED))
        mixed = self._product(self._rounded(exponentials), values[:, :, None])
        return jnp.moveaxis(mixed / jnp.sum(exponentials, axis=-1, keepdims=True), -2, 1).reshape(queries.shape)

    def attend_in_branches(
        self,
        queries: jax.Array,
        own: KeysValues,
        *,
        own_bias: jax.Array,
        source: KeysValues,
        source_bias: jax.Array,
    ) -> jax.Array:
        """Returns the attention output of one position of every branch, as float32.

        Source and own path are under one softmax.

        Args:
          queries: shape (batch, branches, heads, head_dim).
          own: Each of shape (batch, branches, heads of keys, steps, head_dim).
          own_bias: shape (batch or 1, 1, 1, 1, steps).
          source: Each of shape (batch, heads of keys, source, head_dim).
          source_bias: shape (batch, 1, 1, source).

        Returns:
          Shape of `queries`.
        """
        grouped = self._grouped(queries)
        batch, num_branches, heads, group, _ = grouped.shape
        of_source = self._as_queries_of_sources(grouped)
        by_own = self._logits(grouped, jnp.swapaxes(own[0], -1, -2)) + own_bias
        by_source = self._logits(of_source, jnp.swapaxes(source[0], -1, -2)) + source_bias
        # [batch, heads of keys, branches * group, source] -> [batch, branches, heads of keys, group, source]
        by_source = jnp.swapaxes(by_source.reshape(batch, heads, num_branches, group, -1), 1, 2)
        exponentials, _ = _exponentials(jnp.concatenate([by_source, by_own], axis=-1))
        to_source, to_own = jnp.split(self._rounded(exponentials), [by_source.shape[-1]], axis=-1)
        mixed = self._product(self._as_queries_of_sources(to_source), source[1])
        mixed = jnp.swapaxes(mixed.reshape(batch, heads, num_branches, group, -1), 1, 2)
        mixed = mixed + self._product(to_own, own[1])
        return (mixed / jnp.sum(exponentials, axis=-1, keepdims=True)).reshape(queries.shape)

    def share_of_path(self, queries: jax.Array, *, steps: Numbers, window: Numbers, path: Attended) -> Share:
        """Returns the attention of packed rows over their paths.

        Args:
          queries: shape (rows, heads, head_dim).
          steps: shape (rows,). Steps of the queries.
          window: int32 scalar. How many keys a position sees, its own included.
          path: See `PackedLayer`.
        """
        # Skip the first step: its token is the prompt's last, whose keys and values the source has from prefill.
        first = 1
        places = jnp.arange(path.positions)[None]
        age = steps[:, None] - places
        # [rows, 1, 1, positions]
        is_seen = ((places >= first) & (age >= 0) & (age < window))[:, None, None]
        grouped = self._grouped(queries)
        # Matrix products, though with few queries each: see T5's attention for the reason.
        logits = path.logits(lambda keys: self._capped(einsum("rgqd,rtgd->rgqt", grouped, keys, self.precision)))
        exponentials, largest = _exponentials_of_seen(logits, is_seen)

        def of_values(values: jax.Array, factors: jax.Array, is_seen: jax.Array) -> jax.Array:
            # Zero the values that are not seen: a broken prompt may have left NaN there, and 0 * NaN is NaN.
            values = jnp.where(is_seen[:, 0, 0, :, None, None], values, jnp.zeros((), values.dtype))
            return einsum("rgqt,rtgd->rgqd", factors, values, self.precision)

        mixed = path.mixed(of_values, self._rounded(exponentials), is_seen)
        by_head = queries.shape[:-1]
        return Share(mixed.reshape(queries.shape), largest.reshape(by_head), path.total(exponentials).reshape(by_head))

    def share_of_source(self, queries: jax.Array, *, positions: jax.Array, window: Numbers, sources: Sources) -> Share:
        """Returns the attention of packed rows over their sources.

        Args:
          queries: shape (rows, heads, head_dim).
          positions: int32, shape (rows,). Positions of the queries.
          window: See `share_of_path`.
          sources: See `PackedLayer`.
        """
        rows, heads, _ = queries.shape

        def attend(
            source: Attended, is_token: jax.Array, placed: jax.Array, positions: jax.Array
        ) -> tuple[jax.Array, ...]:
            # [groups, ranks, positions]
            age = positions - jnp.arange(source.positions)[None, None]
            is_seen = is_token[:, None] & (age < window)
            grouped = self._grouped(self._split(placed, heads))
            groups, ranks, kv_heads, group, _ = grouped.shape
            of_source = self._as_queries_of_sources(grouped)
            logits = source.logits(lambda keys: self._logits(of_source, jnp.swapaxes(keys, -1, -2)))
            # [groups, heads of keys, ranks, group, positions]
            logits = logits.reshape(groups, kv_heads, ranks, group, -1)
            exponentials, largest = _exponentials_of_seen(logits, is_seen[:, None, :, None])
            factors = self._rounded(exponentials).reshape(groups, kv_heads, ranks * group, -1)
            mixed = source.mixed(lambda values, factors: self._product(factors, values), factors)
            mixed = mixed.reshape(groups, kv_heads, ranks, group, -1)
            # [groups, heads of keys, ranks, group, ...] -> [groups, ranks, ...]
            return tuple(
                jnp.moveaxis(values, 1, 2).reshape(groups, ranks, -1)
                for values in (mixed, largest, source.total(exponentials))
            )

        made = sources.each(attend, sources.place(queries.reshape(rows, -1)), sources.place(positions[:, None]))
        mixed, largest, total = map(sources.pick, made)
        return Share(mixed.reshape(queries.shape), largest, total)

    def _logits(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        return self._capped(self._product(queries, keys))

    def _capped(self, logits: jax.Array) -> jax.Array:
        return capped(logits, self.config.attention_cap)

    def _product(self, left: jax.Array, right: jax.Array) -> jax.Array:
        return matrix_product(left, right, self.precision)

    def _rounded(self, values: jax.Array) -> jax.Array:
        return rounded(values, self.precision)

    def _normed(self, name: str, projected: jax.Array, heads: int) -> jax.Array:
        """Returns queries or keys by head, normed if the model has such norms: in each head, or over all heads."""
        if not self.config.query_key_norms:
            return self._split(projected, heads)
        norm = getattr(self, f"{name}_norm")
        if self.config.whole_norms:
            return self._split(norm(projected), heads)
        normed: jax.Array = norm(self._split(projected, heads))
        return normed

    def _split(self, projected: jax.Array, heads: int) -> jax.Array:
        return projected.reshape(*projected.shape[:-1], heads, self.config.head_dim)

    def _grouped(self, queries: jax.Array) -> jax.Array:
        """Returns queries by the heads of keys that they share, (..., heads of keys, group, head_dim)."""
        return queries.reshape(*queries.shape[:-2], self.config.num_kv_heads, -1, queries.shape[-1])

    def _as_queries_of_sources(self, grouped: jax.Array) -> jax.Array:
        """Returns (batch, branches, heads of keys, group, n) as (batch, heads of keys, branches * group, n)."""
        batch, _, heads, _, size = grouped.shape
        return jnp.swapaxes(grouped, 1, 2).reshape(batch, heads, -1, size)


def _exponentials(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the softmax's exponentials of logits, divided by a power of 2, and the exponent of this power.

    The exponent is the least whole number for which no exponential is above 1. So rounding has the same relative error,
    whether or not the keys are cut into parts.

    Args:
      logits: float32, shape (..., keys).

    Returns:
      Shapes (..., keys) and (...).
    """
    largest = jax.lax.stop_gradient(jnp.ceil(jnp.max(logits, axis=-1) / _LOG_2))
    # Not exp2 of scaled logits: on CPU, XLA (jaxlib 0.10.2) would make an array as large as the logits for each factor.
    return jnp.exp(logits - (largest * _LOG_2)[..., None]), largest


def _exponentials_of_seen(logits: jax.Array, is_seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `_exponentials`, with 0 for keys that are not seen, which may be all."""
    exponentials, largest = _exponentials(jnp.where(is_seen, logits, MASKED))
    return jnp.where(is_seen, exponentials, np.float32(0)), largest
