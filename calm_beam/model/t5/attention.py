"""T5 attention: no scaling of the logits, no biases, and a relative position bias of a stack or of each layer."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from calm_beam.model.interface import Attended, KeysValues, Position, Sources
from calm_beam.model.numerics import MASKED, Dense, einsum, matrix_product, parameter, rounded
from calm_beam.precision import FLOAT32, Precision

from .config import T5Config


class Attention(nn.Module):
    """Multi-head attention whose keys and values can be computed separately from its queries.

    Attributes:
      config: Sizes of the model.
      dropout_rate: Dropout on the attention weights, used only with `deterministic=False`.
      precision: Precision in which it computes.
    """

    config: T5Config
    dropout_rate: float = 0.0
    precision: Precision = FLOAT32

    def setup(self) -> None:
        """Declares the four kernels, each [in, out]."""
        inner = self.config.num_heads * self.config.head_dim
        self.query = Dense(inner, self.precision)
        self.key = Dense(inner, self.precision)
        self.value = Dense(inner, self.precision)
        self.out = Dense(self.config.emb_dim, self.precision)
        self.dropout = nn.Dropout(self.dropout_rate)

    def attend(
        self,
        inputs: jax.Array,
        keys_values: KeysValues,
        *,
        bias: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Returns the attention output of every query as float32, before the residual is added.

        Args:
          inputs: shape (..., queries, width).
          keys_values: Each of shape (..., heads, positions, head_dim).
          bias: Added to the logits; broadcastable to (..., heads, queries, positions), of the same rank.
          deterministic: Whether dropout is off.

        Returns:
          Shape of `inputs`.
        """
        queries = self._split(self._rounded(self.query(inputs)))
        return self.out(self._mixed(queries, keys_values, bias=bias, deterministic=deterministic))

    def _mixed(
        self, queries: jax.Array, keys_values: KeysValues, *, bias: jax.Array, deterministic: bool = True
    ) -> jax.Array:
        """Returns the values that queries, (..., heads, queries, head_dim), attend to, (..., queries, inner)."""
        keys, values = keys_values
        # [..., heads, queries, head_dim] x [..., heads, positions, head_dim] -> [..., heads, queries, positions]
        logits = matrix_product(queries, jnp.swapaxes(keys, -1, -2), self.precision) + bias
        weights = self._rounded(self.dropout(jax.nn.softmax(logits), deterministic=deterministic))
        # [..., heads, queries, head_dim] -> [..., queries, heads, head_dim]
        mixed = jnp.swapaxes(self._rounded(matrix_product(weights, values, self.precision)), -2, -3)
        return mixed.reshape(*mixed.shape[:-2], -1)

    def attend_over_path(
        self, inputs: jax.Array, *, position: Position, bias_by_age: jax.Array, path: Attended
    ) -> jax.Array:
        """Returns the attention output of packed rows, (rows, width), each to its own path; float32.

        Args:
          inputs: shape (rows, width).
          position: Position of each row.
          bias_by_age: shape (heads, steps). Biases by how many steps a key is older.
          path: See `PackedLayer`.
        """
        queries = self._by_head(self._rounded(self.query(inputs)))
        # [rows, 1, positions]
        age = jnp.asarray(position.steps)[:, None, None] - jnp.arange(path.positions)[None, None]
        is_past = age >= 0
        # [heads, rows, positions] -> [rows, heads, positions]
        bias = jnp.swapaxes(bias_by_age[:, jnp.maximum(age[:, 0], 0)], 0, 1)
        # Matrix products, though with one query each: on CPU, XLA (jaxlib 0.10.2) gives wrong sums where it fuses a
        # gather, a product and a sum over more than about 12,000 positions.
        logits = path.logits(lambda keys: einsum("rhd,rthd->rht", queries, keys, self.precision))

        def of_values(values: jax.Array, weights: jax.Array, is_past: jax.Array) -> jax.Array:
            # Zero the values beyond the past: a broken prompt may have left NaN there, and 0 * NaN is NaN.
            values = jnp.where(is_past[:, 0, :, None, None], values, jnp.zeros((), values.dtype))
            return einsum("rht,rthd->rhd", weights, values, self.precision)

        weights = self._weights(jnp.where(is_past, logits + bias, MASKED), path)
        mixed = self._rounded(path.mixed(of_values, weights, is_past))
        return self.out(mixed.reshape(len(inputs), -1))

    def attend_to_sources(self, inputs: jax.Array, sources: Sources) -> jax.Array:
        """Returns the attention output of packed rows, (rows, width), each to its own source; float32.

        Args:
          inputs: shape (rows, width).
          sources: See `PackedLayer`.
        """

        def attend(source: Attended, is_token: jax.Array, queries: jax.Array) -> jax.Array:
            logits = source.logits(lambda keys: matrix_product(queries, jnp.swapaxes(keys, -1, -2), self.precision))
            weights = self._weights(jnp.where(is_token[:, None, None], logits, MASKED), source)
            mixed = source.mixed(lambda values, weights: matrix_product(weights, values, self.precision), weights)
            # [groups, heads, ranks, head_dim] -> [groups, ranks, inner]
            mixed = jnp.swapaxes(self._rounded(mixed), 1, 2)
            return mixed.reshape(*mixed.shape[:2], -1)

        queries = self._split(sources.place(self._rounded(self.query(inputs))))
        return self.out(sources.pick(sources.each(attend, queries)))

    def _weights(self, logits: jax.Array, attended: Attended) -> jax.Array:
        """Returns the softmax of logits, (..., positions), rounded."""
        exponentials = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        return self._rounded(exponentials / attended.total(exponentials)[..., None])

    def keys_values(self, inputs: jax.Array) -> KeysValues:
        """Returns keys and values, each of shape (..., heads, positions, head_dim), of (..., positions, width)."""
        return self._split(self._rounded(self.key(inputs))), self._split(self._rounded(self.value(inputs)))

    def _split(self, projected: jax.Array) -> jax.Array:
        # Heads before positions: both products are then plain batched matrix products, which on CPU are several times
        # faster than products over an inner axis.
        return jnp.swapaxes(self._by_head(projected), -2, -3)

    def _by_head(self, projected: jax.Array) -> jax.Array:
        return projected.reshape(*projected.shape[:-1], self.config.num_heads, self.config.head_dim)

    def _rounded(self, values: jax.Array) -> jax.Array:
        return rounded(values, self.precision)


class RelativePositionBias(nn.Module):
    """The learned bias of a (query, key) distance, for all self-attention layers of a stack or for one.

    Attributes:
      config: Sizes of the model.
      bidirectional: Whether keys may come after the query (encoder).
    """

    config: T5Config
    bidirectional: bool

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        """Returns the biases of `length` queries to `length` keys, shape (heads, length, length)."""
        config = self.config
        shape = (config.num_heads, config.relative_buckets)
        table = parameter(self, "rel_embedding", nn.initializers.normal(1.0), shape)
        buckets = relative_position_bucket(
            np.arange(-length + 1, length),
            buckets=config.relative_buckets,
            max_distance=config.relative_max_distance,
            bidirectional=self.bidirectional,
        )
        return _by_position(table[:, buckets], length)


def _by_position(by_distance: jax.Array, length: int) -> jax.Array:
    """Returns the values of `by_distance` for each query and key, (heads, length, length).

    It repeats and cuts the values: a lookup pair by pair would take 128 numbers for each pair on TPUs, for any number
    of heads.

    Args:
      by_distance: shape (heads, 2 length - 1). Values by key position minus query position, from -length + 1 on.
      length: Number of queries, and of keys.
    """
    heads, side = by_distance.shape[0], 2 * length
    padded = jnp.pad(by_distance, ((0, 0), (0, 1)))
    # Rows of 2 length, read in rows of one less: each begins one place further back in the repeated values.
    repeated = jnp.broadcast_to(padded[:, None], (heads, length, side)).reshape(heads, -1)
    skewed = repeated[:, : length * (side - 1)].reshape(heads, length, side - 1)
    return skewed[:, :, length - 1 :]


def relative_position_bucket(
    distance: np.ndarray, *, buckets: int, max_distance: int, bidirectional: bool
) -> np.ndarray:
    """Returns the bucket of every key-minus-query distance.

    Half of the buckets hold one distance each, the others widen logarithmically up to `max_distance`.

    Args:
      distance: Integers, key position minus query position, any shape.
      buckets: Number of buckets in all.
      max_distance: Distance from which the last bucket is used.
      bidirectional: Whether half of the buckets are for keys after the query; else such keys count as distance 0.

    Returns:
      Integers in [0, buckets), shape of `distance`.

    Source: Raffel et al. (2020), section 2.1 (relative position embeddings).

    >>> relative_position_bucket(np.array([0, -1, -15, -16, -200, 5]), buckets=32, max_distance=128,
    ...                          bidirectional=False)
    array([ 0,  1, 15, 16, 31,  0])
    """
    offset = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    # float32, as every T5 implementation computes it: float64 puts a few distances into another bucket.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / exact) / np.float32(np.log(max_distance / exact))
    wide = exact + (ratio * (buckets - exact)).astype(distance.dtype)
    return offset + np.where(distance < exact, distance, np.minimum(wide, buckets - 1))
