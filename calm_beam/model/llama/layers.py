"""The decoder layer of Llama's family."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from calm_beam.arithmetic import Precision
from calm_beam.model.dense import Dense
from calm_beam.model.interface import Attended, KeysValues, Numbers, Position, Sources
from calm_beam.model.numerics import added, rounded

from .attention import Attention
from .config import LlamaConfig
from .norm import RMSNorm
from .rotary import Turning, turnings

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}


class FeedForward(nn.Module):
    """The gated feed-forward layer, without biases: f(x W0) * (x W1), back to the model's width."""

    config: LlamaConfig
    precision: Precision

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the output as float32, before the residual is added, shape of `inputs`."""
        config = self.config
        gate, linear = (Dense(config.mlp_dim, self.precision, name=name)(inputs) for name in ("wi_0", "wi_1"))
        hidden = rounded(_ACTIVATIONS[config.activation](gate) * linear, self.precision)
        return Dense(config.emb_dim, self.precision, name="wo")(hidden)


class LayerTerms(NamedTuple):
    """What a packed layer needs beside its parameters.

    Attributes:
      window: int32 scalar. How many keys a position sees, its own included.
      turning: How it turns queries and keys; None if all layers do it alike, and it is part of the program.
    """

    window: jax.Array
    turning: Turning | None


class DecoderLayer(nn.Module):
    """Self-attention and feed-forward, each normed before, or after, or both, and added to its input."""

    config: LlamaConfig
    precision: Precision

    def setup(self) -> None:
        """Declares the sub-layers."""
        config = self.config
        if config.pre_norms:
            self.pre_self_attention_layer_norm = RMSNorm(config, self.precision)
            self.pre_mlp_layer_norm = RMSNorm(config, self.precision)
        self.self_attention = Attention(config, self.precision)
        self.mlp = FeedForward(config, self.precision)
        if config.post_norms:
            # Of float32 sums, which are rounded when they are added.
            self.post_self_attention_layer_norm = RMSNorm(config)
            self.post_mlp_layer_norm = RMSNorm(config)

    def keys_values(self, states: jax.Array, positions: Numbers, *, turning: Turning) -> KeysValues:
        """Returns this layer's keys and values of (possibly propagated) states.

        Args:
          states: shape (..., width).
          positions: int32, shape (...).
          turning: Of this layer.

        Returns:
          Each of shape (..., heads of keys, head_dim).
        """
        return self.self_attention.keys_values(self._normed(states, "self_attention"), positions, turning=turning)

    def self_keys_values(self, states: jax.Array, *, position: Position, terms: LayerTerms) -> KeysValues:
        """Returns keys and values of packed states, (rows, width), each (heads of keys, rows, head_dim)."""
        made = self.keys_values(states, positions_of(position), turning=self._turning(terms))
        return tuple(jnp.swapaxes(part, 0, 1) for part in made)

    def in_prompt(
        self,
        hidden: jax.Array,
        keys_values: KeysValues,
        *,
        positions: jax.Array,
        turning: Turning,
        is_seen: jax.Array,
    ) -> jax.Array:
        """Returns the layer's output at positions of prompts.

        Args:
          hidden: shape (batch, positions, width).
          keys_values: Of these and earlier positions, each (batch, heads of keys, source, head_dim).
          positions: int32, shape (positions,).
          turning: Of this layer.
          is_seen: bool, shape (positions, source). By position of query and of key.
        """
        mixed = self.self_attention.attend_in_prompt(
            self._queries(hidden, positions[None], turning), keys_values, is_seen=is_seen
        )
        return self._feed_forward(self._added(hidden, self.self_attention.output(mixed), "self_attention"))

    def in_lanes(
        self,
        hidden: jax.Array,
        own: KeysValues,
        *,
        own_bias: jax.Array,
        source: KeysValues,
        source_bias: jax.Array,
        position: Position,
        turning: Turning,
    ) -> jax.Array:
        """Returns the layer's output for one position of every lane, (batch, lanes, width).

        Args:
          hidden: shape (batch, lanes, width).
          own: As in `attend_in_lanes`, like the next three.
          own_bias: As there.
          source: As there.
          source_bias: As there.
          position: Of each row, (batch,).
          turning: Of this layer.
        """
        mixed = self.self_attention.attend_in_lanes(
            self._queries(hidden, positions_of(position)[:, None], turning),
            own,
            own_bias=own_bias,
            source=source,
            source_bias=source_bias,
        )
        return self._feed_forward(self._added(hidden, self.self_attention.output(mixed), "self_attention"))

    def in_rows(
        self, hidden: jax.Array, *, position: Position, terms: LayerTerms, path: Attended, sources: Sources
    ) -> jax.Array:
        """Returns the layer's output for packed rows, (rows, width); arguments are those of `PackedLayer`."""
        attention, positions = self.self_attention, positions_of(position)
        queries, window = self._queries(hidden, positions, self._turning(terms)), terms.window
        of_path = attention.share_of_path(queries, steps=position.steps, window=window, path=path)
        of_source = attention.share_of_source(queries, positions=positions, window=window, sources=sources)
        attended = attention.output(of_path.merged(of_source))
        return self._feed_forward(self._added(hidden, attended, "self_attention"))

    def _turning(self, terms: LayerTerms) -> Turning:
        return turnings(self.config)[0] if terms.turning is None else terms.turning

    def _queries(self, hidden: jax.Array, positions: Numbers, turning: Turning) -> jax.Array:
        return self.self_attention.queries(self._normed(hidden, "self_attention"), positions, turning=turning)

    def _feed_forward(self, hidden: jax.Array) -> jax.Array:
        return self._added(hidden, self.mlp(self._normed(hidden, "mlp")), "mlp")

    def _normed(self, hidden: jax.Array, name: str) -> jax.Array:
        """Returns what a sub-layer takes of the residual stream."""
        taken: jax.Array = getattr(self, f"pre_{name}_layer_norm")(hidden) if self.config.pre_norms else hidden
        return taken

    def _added(self, stream: jax.Array, values: jax.Array, name: str) -> jax.Array:
        """Returns the stream with what a sub-layer gives."""
        if self.config.post_norms:
            values = getattr(self, f"post_{name}_layer_norm")(values)
        if self.config.residual_factor != 1:
            values = values * np.float32(self.config.residual_factor)
        return added(stream, values, self.precision)


def positions_of(position: Position) -> jax.Array:
    """Returns the rotary positions of tokens: that of the first step is the prompt's last token."""
    return jnp.asarray(position.prompt_lengths) - 1 + jnp.asarray(position.steps)
