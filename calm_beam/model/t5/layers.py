"""The layers of a T5 stack."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from calm_beam.arithmetic import FLOAT32, Precision
from calm_beam.model.dense import Dense
from calm_beam.model.interface import Attended, KeysValues, Position, Sources
from calm_beam.model.numerics import added, rounded, widened

from .attention import Attention, RelativePositionBias
from .config import T5Config

NORM_EPSILON = 1e-6
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}


class RMSNorm(nn.Module):
    """Scales every vector to unit root mean square; no mean is subtracted and no bias added.

    Attributes:
      precision: In whose type the normed inputs come; they are float32 until then.
    """

    precision: Precision = FLOAT32

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the normed inputs, shape (..., width)."""
        scale = self.param("scale", nn.initializers.ones, (inputs.shape[-1],))
        wide = widened(inputs)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + NORM_EPSILON) * scale.reshape((1,) * (inputs.ndim - 1) + (-1,))
        return rounded(normed, self.precision)


class FeedForward(nn.Module):
    """The feed-forward layer, without biases: to a wider space, and back to the model's width.

    A gated one, such as T5 1.1's, has f(x W0) * (x W1), one without a gate, such as the original T5's, f(x W).

    Attributes:
      config: Sizes of the model; `gated_mlp` says which of the two, `activation` which f.
      dropout_rate: Dropout between the kernels, used only with `deterministic=False`.
      precision: In which numbers it computes.
    """

    config: T5Config
    dropout_rate: float = 0.0
    precision: Precision = FLOAT32

    @nn.compact
    def __call__(self, inputs: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Returns the output as float32, before the residual is added, shape (..., width)."""
        activation = _ACTIVATIONS[self.config.activation]
        if self.config.gated_mlp:
            hidden = activation(self._widened(inputs, "wi_0")) * self._widened(inputs, "wi_1")
        else:
            hidden = activation(self._widened(inputs, "wi"))
        hidden = rounded(nn.Dropout(self.dropout_rate)(hidden, deterministic=deterministic), self.precision)
        return Dense(inputs.shape[-1], self.precision, name="wo")(hidden)

    def _widened(self, inputs: jax.Array, name: str) -> jax.Array:
        return Dense(self.config.mlp_dim, self.precision, name=name)(inputs)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each normed before and added to its input."""

    config: T5Config
    dropout_rate: float = 0.0
    precision: Precision = FLOAT32

    def setup(self) -> None:
        """Declares the sub-layers."""
        config, precision = self.config, self.precision
        self.pre_attention_layer_norm = RMSNorm(precision)
        self.attention = Attention(config, self.dropout_rate, precision)
        if config.relative_bias_per_layer:
            self.relpos_bias = RelativePositionBias(config, bidirectional=True)
        self.pre_mlp_layer_norm = RMSNorm(precision)
        self.mlp = FeedForward(config, self.dropout_rate, precision)
        self.dropout = nn.Dropout(self.dropout_rate)

    def __call__(self, hidden: jax.Array, bias: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Returns the layer's output, shape (batch, source, width), of an input of that shape.

        Args:
          hidden: The input.
          bias: Hides padding; with the stack's relative positions, if the layer has none of its own.
          deterministic: Whether dropout is off.
        """
        if self.config.relative_bias_per_layer:
            bias = bias + self.relpos_bias(hidden.shape[1])[None]
        normed = self.pre_attention_layer_norm(hidden)
        keys_values = self.attention.keys_values(normed)
        attended = self.attention.attend(normed, keys_values, bias=bias, deterministic=deterministic)
        hidden = self._added(hidden, self.dropout(attended, deterministic=deterministic))
        output = self.mlp(self.pre_mlp_layer_norm(hidden), deterministic=deterministic)
        return self._added(hidden, self.dropout(output, deterministic=deterministic))

    def _added(self, stream: jax.Array, values: jax.Array) -> jax.Array:
        return added(stream, values, self.precision)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward, each normed before and added to its input.

    Keys and values are made by calls of their own, since with early exits a layer makes them also for tokens
    that it never computes (CALM, "Decoding with early exiting": state propagation).
    """

    config: T5Config
    dropout_rate: float = 0.0
    precision: Precision = FLOAT32

    def setup(self) -> None:
        """Declares the sub-layers."""
        config, precision = self.config, self.precision
        self.pre_self_attention_layer_norm = RMSNorm(precision)
        self.self_attention = Attention(config, self.dropout_rate, precision)
        if config.relative_bias_per_layer:
            self.relpos_bias = RelativePositionBias(config, bidirectional=False)
        self.pre_cross_attention_layer_norm = RMSNorm(precision)
        self.encoder_decoder_attention = Attention(config, self.dropout_rate, precision)
        self.pre_mlp_layer_norm = RMSNorm(precision)
        self.mlp = FeedForward(config, self.dropout_rate, precision)
        self.dropout = nn.Dropout(self.dropout_rate)

    def self_keys_values(
        self, states: jax.Array, *, position: Position | None = None, terms: jax.Array | None = None
    ) -> KeysValues:
        """Returns this layer's self-attention keys and values of (possibly propagated) states, (..., width).

        T5's do not depend on their position: it decides the biases, which the terms are.
        """
        return self.self_attention.keys_values(self.pre_self_attention_layer_norm(states))

    def cross_keys_values(self, encoded: jax.Array) -> KeysValues:
        """Returns this layer's keys and values of the encoder's output, (batch, source, width)."""
        return self.encoder_decoder_attention.keys_values(encoded)

    def self_attend(
        self,
        hidden: jax.Array,
        keys_values: KeysValues,
        *,
        bias: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Returns the states after self-attention, residual included, shape of `hidden`."""
        normed = self.pre_self_attention_layer_norm(hidden)
        attended = self.self_attention.attend(normed, keys_values, bias=bias, deterministic=deterministic)
        return self._added(hidden, self.dropout(attended, deterministic=deterministic))

    def in_rows(
        self, hidden: jax.Array, *, position: Position, terms: jax.Array, path: Attended, sources: Sources
    ) -> jax.Array:
        """Returns the layer's output for packed rows, (rows, width).

        Arguments are those of `PackedLayer`; the terms are the layer's biases by age, (heads, steps).
        """
        normed = self.pre_self_attention_layer_norm(hidden)
        attended = self.self_attention.attend_over_path(normed, position=position, bias_by_age=terms, path=path)
        hidden = self._added(hidden, attended)
        normed = self.pre_cross_attention_layer_norm(hidden)
        return self._feed_forward(
            self._added(hidden, self.encoder_decoder_attention.attend_to_sources(normed, sources))
        )

    def cross_attend_and_feed_forward(
        self,
        hidden: jax.Array,
        keys_values: KeysValues,
        *,
        bias: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Returns the layer's output, shape of `hidden`, of the states after self-attention."""
        normed = self.pre_cross_attention_layer_norm(hidden)
        attended = self.encoder_decoder_attention.attend(normed, keys_values, bias=bias, deterministic=deterministic)
        hidden = self._added(hidden, self.dropout(attended, deterministic=deterministic))
        return self._feed_forward(hidden, deterministic=deterministic)

    def _feed_forward(self, hidden: jax.Array, *, deterministic: bool = True) -> jax.Array:
        output = self.mlp(self.pre_mlp_layer_norm(hidden), deterministic=deterministic)
        return self._added(hidden, self.dropout(output, deterministic=deterministic))

    def _added(self, stream: jax.Array, values: jax.Array) -> jax.Array:
        return added(stream, values, self.precision)
