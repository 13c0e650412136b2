"""Attention of Llama's family: rotary positions, and queries that share keys and values in groups."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from calm_beam.arithmetic import Arithmetic
from calm_beam.model.interface import Arrange, KeysValues, Numbers, OverPath
from calm_beam.model.numerics import MASKED, precision_of

from .config import LlamaConfig
from .norm import RMSNorm
from .rotary import rotated


class Share(NamedTuple):
    """What queries have of a part of their keys; several parts merge into one softmax.

    Attributes:
      mixed: shape (..., heads, head_dim). Sum of the values, each times exp(its logit - the largest).
      largest: shape (..., heads). The largest logit; `MASKED` if no key was seen.
      total: shape (..., heads). Sum of the exponentials; 0 if no key was seen.
    """

    mixed: jax.Array
    largest: jax.Array
    total: jax.Array

    def merged(self, other: "Share") -> jax.Array:
        """Returns what queries attend to of both parts, (..., heads, head_dim); at least one key must be seen."""
        largest = jnp.maximum(self.largest, other.largest)
        mine, theirs = jnp.exp(self.largest - largest), jnp.exp(other.largest - largest)
        total = mine * self.total + theirs * other.total
        mixed = mine[..., None] * self.mixed + theirs[..., None] * other.mixed
        return mixed / total[..., None]


class Attention(nn.Module):
    """Self-attention, whose keys and values can be made apart from its queries.

    Attributes:
      config: Of the model.
      arithmetic: Of its products.
    """

    config: LlamaConfig
    arithmetic: Arithmetic

    def setup(self) -> None:
        """Declares kernels, [in, out], their biases, and the norms of queries and keys."""
        config = self.config
        for name, heads in {
            "query": config.num_heads,
            "key": config.num_kv_heads,
            "value": config.num_kv_heads,
        }.items():
            dense = nn.Dense(
                heads * config.head_dim, use_bias=config.attention_bias, precision=precision_of(self.arithmetic)
            )
            setattr(self, name, dense)
            if config.query_key_norms and name != "value":
                setattr(self, f"{name}_norm", RMSNorm(config))
        self.out = nn.Dense(config.emb_dim, use_bias=False, precision=precision_of(self.arithmetic))

    def queries(self, inputs: jax.Array, positions: Numbers) -> jax.Array:
        """Returns scaled, turned queries, (..., heads, head_dim), of normed states, (..., width), and positions."""
        queries = self._split(self.query(inputs), self.config.num_heads)
        if self.config.query_key_norms:
            queries = self.query_norm(queries)
        return rotated(queries, positions, config=self.config) * np.float32(self.config.head_dim**-0.5)

    def keys_values(self, inputs: jax.Array, positions: Numbers) -> KeysValues:
        """Returns turned keys, and values, each (..., heads of keys, head_dim); arguments as of `queries`."""
        keys, values = (self._split(made, self.config.num_kv_heads) for made in (self.key(inputs), self.value(inputs)))
        if self.config.query_key_norms:
            keys = self.key_norm(keys)
        return rotated(keys, positions, config=self.config), values

    def output(self, mixed: jax.Array) -> jax.Array:
        """Returns what is added to the residual, (..., width), of (..., heads, head_dim)."""
        return self.out(mixed.reshape(*mixed.shape[:-2], -1))

    def attend_in_prompt(self, queries: jax.Array, keys_values: KeysValues, *, is_seen: np.ndarray) -> jax.Array:
        """Returns what every position of prompts attends to.

        Args:
          queries: shape (batch, positions, heads, head_dim).
          keys_values: Each of shape (batch, positions, heads of keys, head_dim).
          is_seen: bool, shape (positions, positions). By position of query and of key.

        Returns:
          Shape of `queries`.
        """
        keys, values = (jnp.moveaxis(part, 1, -2) for part in keys_values)
        # [batch, positions, heads of keys, group, head_dim] -> [batch, heads of keys, group, positions, head_dim]
        grouped = jnp.moveaxis(self._grouped(queries), 1, -2)
        logits = jnp.matmul(grouped, jnp.swapaxes(keys, -1, -2)[:, :, None], precision=precision_of(self.arithmetic))
        weights = jax.nn.softmax(jnp.where(is_seen[None, None, None], logits, MASKED))
        mixed = jnp.matmul(weights, values[:, :, None], precision=precision_of(self.arithmetic))
        return jnp.moveaxis(mixed, -2, 1).reshape(queries.shape)

    def attend_in_lanes(
        self,
        queries: jax.Array,
        own: KeysValues,
        *,
        own_bias: jax.Array,
        source: KeysValues,
        source_bias: jax.Array,
    ) -> jax.Array:
        """Returns what one position of every lane attends to: source and own path under one softmax.

        Args:
          queries: shape (batch, lanes, heads, head_dim).
          own: Each of shape (batch, lanes, heads of keys, steps, head_dim).
          own_bias: shape (batch or 1, 1, 1, 1, steps).
          source: Each of shape (batch, heads of keys, source, head_dim).
          source_bias: shape (batch, 1, 1, source).

        Returns:
          Shape of `queries`.
        """
        grouped = self._grouped(queries)
        batch, lanes, heads, group, _ = grouped.shape
        of_source = self._as_queries_of_sources(grouped)
        by_own = jnp.matmul(grouped, jnp.swapaxes(own[0], -1, -2), precision=precision_of(self.arithmetic)) + own_bias
        by_source = (
            jnp.matmul(of_source, jnp.swapaxes(source[0], -1, -2), precision=precision_of(self.arithmetic))
            + source_bias
        )
        # [batch, heads of keys, lanes * group, source] -> [batch, lanes, heads of keys, group, source]
        by_source = jnp.swapaxes(by_source.reshape(batch, heads, lanes, group, -1), 1, 2)
        weights = jax.nn.softmax(jnp.concatenate([by_source, by_own], axis=-1))
        to_source, to_own = jnp.split(weights, [by_source.shape[-1]], axis=-1)
        mixed = jnp.matmul(self._as_queries_of_sources(to_source), source[1], precision=precision_of(self.arithmetic))
        mixed = jnp.swapaxes(mixed.reshape(batch, heads, lanes, group, -1), 1, 2)
        mixed = mixed + jnp.matmul(to_own, own[1], precision=precision_of(self.arithmetic))
        return mixed.reshape(queries.shape)

    def share_of_path(self, queries: jax.Array, *, is_seen: jax.Array, over_path: OverPath) -> Share:
        """Returns what packed rows, (rows, heads, head_dim), have of their paths; `is_seen` is (rows, length)."""
        return Share(*over_path(self._share_of_gathered, queries, is_seen))

    def share_of_source(
        self, queries: jax.Array, keys_values: KeysValues, *, is_seen: jax.Array, place: Arrange, pick: Arrange
    ) -> Share:
        """Returns what packed rows have of their sources.

        Args:
          queries: shape (rows, heads, head_dim).
          keys_values: Each of shape (places, heads of keys, source, head_dim).
          is_seen: bool, shape (places, ranks or 1, source).
          place: Brings arrays of rows, (rows, n), to their places, (places, ranks, n).
          pick: Brings them back.
        """
        rows, heads, _ = queries.shape
        placed = place(queries.reshape(rows, -1))
        grouped = self._grouped(self._split(placed, heads))
        places, ranks, kv_heads, group, _ = grouped.shape
        logits = jnp.matmul(
            self._as_queries_of_sources(grouped),
            jnp.swapaxes(keys_values[0], -1, -2),
            precision=precision_of(self.arithmetic),
        )
        # [places, heads of keys, ranks, group, source]
        logits = logits.reshape(places, kv_heads, ranks, group, -1)
        seen = is_seen[:, None, :, None]
        largest = jnp.max(jnp.where(seen, logits, MASKED), axis=-1)
        weights = jnp.where(seen, jnp.exp(logits - largest[..., None]), np.float32(0))
        total = jnp.sum(weights, axis=-1)
        mixed = jnp.matmul(
            weights.reshape(places, kv_heads, ranks * group, -1),
            keys_values[1],
            precision=precision_of(self.arithmetic),
        ).reshape(places, kv_heads, ranks, group, -1)

        def of_rows(values: jax.Array) -> jax.Array:
            # [places, heads of keys, ranks, group, ...] -> [rows, heads, ...]
            by_rank = jnp.moveaxis(values, 1, 2)
            return pick(by_rank.reshape(places, ranks, -1)).reshape(rows, heads, *values.shape[4:])

        return Share(of_rows(mixed), of_rows(largest), of_rows(total))

    def _share_of_gathered(
        self, keys: jax.Array, values: jax.Array, queries: jax.Array, is_seen: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the parts of a `Share`, of keys and values that were gathered, (rows, length, heads of keys, ...)."""
        # Matrix products, though of few queries each: see T5's.
        logits = jnp.einsum("rgqd,rtgd->rgqt", self._grouped(queries), keys, precision=precision_of(self.arithmetic))
        seen = is_seen[:, None, None]
        largest = jnp.max(jnp.where(seen, logits, MASKED), axis=-1)
        weights = jnp.where(seen, jnp.exp(logits - largest[..., None]), np.float32(0))
        # What is not seen may be what a broken prompt left: 0 * NaN is NaN.
        values = jnp.where(is_seen[:, :, None, None], values, np.float32(0))
        mixed = jnp.einsum("rgqt,rtgd->rgqd", weights, values, precision=precision_of(self.arithmetic))
        by_head = queries.shape[:-1]
        total = jnp.sum(weights, axis=-1)
        return mixed.reshape(queries.shape), largest.reshape(by_head), total.reshape(by_head)

    def _split(self, projected: jax.Array, heads: int) -> jax.Array:
        return projected.reshape(*projected.shape[:-1], heads, self.config.head_dim)

    def _grouped(self, queries: jax.Array) -> jax.Array:
        """Returns queries by the heads of keys that they share, (..., heads of keys, group, head_dim)."""
        return queries.reshape(*queries.shape[:-2], self.config.num_kv_heads, -1, queries.shape[-1])

    def _as_queries_of_sources(self, grouped: jax.Array) -> jax.Array:
        """Returns (batch, lanes, heads of keys, group, n) as (batch, heads of keys, lanes * group, n)."""
        batch, _, heads, _, size = grouped.shape
        return jnp.swapaxes(grouped, 1, 2).reshape(batch, heads, -1, size)
