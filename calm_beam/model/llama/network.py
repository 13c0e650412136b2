"""The decoder-only network: prompts, one decoder layer at a time, and the output head at any layer."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from calm_beam.arithmetic import FLOAT32, Precision
from calm_beam.model.heads import (
    Projection,
    exit_probability,
    exit_projections,
    head_logits,
    head_weights,
    normed,
)
from calm_beam.model.interface import KeysValues, Position, Taught
from calm_beam.model.layer_dropout import layer_dropout_rates, passed_by
from calm_beam.model.numerics import MASKED, capped, precision_of, rounded, widened
from calm_beam.model.partitioning import divided, looked_up

from .chunks import chunk_positions
from .config import LlamaConfig
from .layers import DecoderLayer, LayerTerms, positions_of
from .norm import RMSNorm
from .rotary import Turning, turnings

# More keys than any position has.
_ALL = np.int32(2**30)


class Decoder(nn.Module):
    """The decoder stack, whose layers and head are called one by one."""

    config: LlamaConfig
    precision: Precision

    def setup(self) -> None:
        """Declares the layers, the final norm and the head, those of exits, and the exit classifier."""
        config = self.config
        self.layers = [DecoderLayer(config, self.precision) for _ in range(config.num_decoder_layers)]
        self.decoder_norm = RMSNorm(config, self.precision)
        if not config.tied_head:
            self.logits_dense = Projection(config.emb_dim, config.vocab_size)
        lower = config.num_decoder_layers - 1 if config.exit_norms else 0
        self.exit_norms = [RMSNorm(config, self.precision) for _ in range(lower)]
        self.exit_heads = exit_projections(config)
        if config.exit_classifier:
            self.meta_cls = nn.Dense(config.exit_classifier, precision=precision_of(self.precision))


class EarlyExitLlama(nn.Module):
    """A decoder-only model with an output head after every layer.

    The parameter tree is the one of `parameter_shapes`. Methods are called through `Module.apply`, and described in
    `EarlyExitModel`. The prompt goes through all layers, its last token included. The first step reads that token
    again, so that it may exit; what it would keep is not used, since the prompt has kept it already.

    Attributes:
      config: Of the model.
      precision: In which numbers it computes. States, keys and values are of its type.
      layer_dropout: How often rows pass the last layer by, used with `deterministic=False`; see `layer_dropout_rates`.
    """

    config: LlamaConfig
    precision: Precision = FLOAT32
    layer_dropout: float = 0.0

    def setup(self) -> None:
        """Declares embedding and decoder."""
        self.token_embedder = nn.Embed(self.config.vocab_size, self.config.emb_dim, dtype=self.precision.dtype)
        self.decoder = Decoder(self.config, self.precision)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings of token ids, shape of `tokens` + (width,)."""
        embedded = looked_up(self.token_embedder.embedding.astype(self.precision.dtype), tokens)
        factor: Any = np.float32(self.config.embedding_factor)
        if self.config.scaled_embedding:
            # Gemma's own code, too, rounds the factor to the type of the states.
            factor = factor * np.asarray(np.sqrt(self.config.emb_dim), self.precision.dtype).astype(np.float32)
        return embedded if factor == 1 else rounded(widened(embedded) * factor, self.precision)

    def prefill(
        self, source_tokens: jax.Array, lengths: jax.Array, prefix: Sequence[KeysValues] = ()
    ) -> tuple[list[KeysValues], jax.Array]:
        """Returns every layer's keys and values of prompts, and the mask of their positions.

        Long prompts go through the layers in chunks, each attending to what those before it have left.

        Args:
          source_tokens: shape (batch, source). Padded behind: no position sees those after it.
          lengths: int32, shape (batch,).
          prefix: What `prefill` made of the first tokens that all prompts share, each (1, heads of keys, positions,
            head_dim), with fewer positions than source; none if they go through the layers here, too.
        """
        batch, source = source_tokens.shape
        mask = jnp.arange(source)[None] < lengths[:, None]
        chunk = chunk_positions(self.config, rows=batch, source=source)
        if chunk == source and not prefix:
            return self._in_prompt(source_tokens)[1], mask
        return self._by_chunks(source_tokens, chunk, prefix), mask

    def _by_chunks(self, tokens: jax.Array, most: int, prefix: Sequence[KeysValues]) -> list[KeysValues]:
        """Returns every layer's keys and values of prompts, (batch, source), at most so many positions at a time."""
        config, (batch, source) = self.config, tokens.shape
        first = prefix[0][0].shape[2] if prefix else 0
        count = -(-(source - first) // most)
        chunk = -(-(source - first) // count)
        padding = first + count * chunk - source
        shape = batch, config.num_kv_heads, source + padding, config.head_dim
        begun = [tuple(jnp.zeros(shape, self.precision.dtype) for _ in range(2)) for _ in self._windows()]
        if prefix:
            begun = [
                tuple(room.at[:, :, :first].set(values) for room, values in zip(rooms, pair, strict=True))
                for rooms, pair in zip(begun, prefix, strict=True)
            ]
        begun = [tuple(map(self._placed, pair)) for pair in begun]
        rest = jnp.pad(tokens[:, first:], ((0, 0), (0, padding)))
        parts = jnp.moveaxis(rest.reshape(batch, count, chunk), 1, 0)
        # Flax's modules are not for JAX's loops: this one is taken apart, and its parameters are those of the caller.
        model, variables = self.unbind()

        def go_through(kept: list[KeysValues], part: tuple[jax.Array, jax.Array]) -> tuple[list[KeysValues], None]:
            _, kept = model.apply(variables, part[0], first=part[1], kept=kept, method="_in_prompt")
            return kept, None

        kept, _ = jax.lax.scan(go_through, begun, (parts, first + chunk * jnp.arange(count)))
        return [tuple(values[:, :, :source] for values in pair) for pair in kept]

    def teacher_forced(self, taught: Taught, *, deterministic: bool = True) -> jax.Array:
        """Returns the states that predict the targets, (layers, batch, target, width): from the prompt's last on.

        Arguments are those of `EarlyExitModel.teacher_forced`; there is no dropout but of layers.
        """
        states = self.decode_teacher_forced(jnp.asarray(taught.source_tokens), deterministic=deterministic)
        width = taught.targets.shape[1]
        # As many of each row are taken as the longest output needs: of a shorter one, up to positions that no row has.
        states = jnp.pad(states, ((0, 0), (0, 0), (0, width), (0, 0)))
        starts = jnp.asarray(taught.source_lengths) - jnp.asarray(taught.target_lengths)

        def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            of_layers, start = row
            return jax.lax.dynamic_slice_in_dim(of_layers, start, width, axis=1)

        # Row by row: of all at once the gradient is a scatter, which XLA (jaxlib 0.10.2) divides among GPUs in a way
        # that it refuses afterwards.
        taken: jax.Array = jax.lax.map(of_row, (jnp.moveaxis(states, 1, 0), starts))
        return jnp.moveaxis(taken, 0, 1)

    def decode_teacher_forced(self, tokens: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Returns the output of every layer at every position, without early exits.

        Args:
          tokens: shape (batch, positions). Prompt and output, padded behind.
          deterministic: Whether layer dropout is off.

        Returns:
          Shape (layers, batch, positions, width), no final norm applied.
        """
        return jnp.stack(self._in_prompt(tokens, deterministic=deterministic)[0])

    def _in_prompt(
        self,
        tokens: jax.Array,
        *,
        first: jax.Array | int = 0,
        kept: Sequence[KeysValues | None] = (),
        deterministic: bool = True,
    ) -> tuple[list[jax.Array], list[KeysValues]]:
        """Returns of every layer its output at positions of prompts, and keys and values of these and earlier ones.

        Args:
          tokens: shape (batch, positions).
          first: int32 scalar. The first of the positions.
          kept: Every layer's keys and values of earlier positions, with room for these, each (batch, heads of keys,
            source, head_dim); none if there are no earlier ones.
          deterministic: Whether layer dropout is off.

        Returns:
          For each layer (batch, positions, width); and keys and values as they came, or of these positions alone.
        """
        positions = jnp.arange(tokens.shape[1]) + first
        hidden, states, keys_values = self.embed(tokens), [], []
        rates = layer_dropout_rates(self.config.num_decoder_layers, 0.0 if deterministic else self.layer_dropout)
        for layer, rate, window, turning, earlier in itertools.zip_longest(
            self.decoder.layers, rates, self._windows(), turnings(self.config), kept
        ):
            made = layer.keys_values(hidden, positions[None], turning=turning)
            seen = tuple(jnp.swapaxes(part, 1, 2) for part in made)
            if earlier is not None:
                seen = tuple(
                    self._placed(jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=2))
                    for old, new in zip(earlier, seen, strict=True)
                )
            age = positions[:, None] - jnp.arange(seen[0].shape[2])[None]
            is_seen = (age >= 0) & (age < window)
            after = layer.in_prompt(hidden, seen, positions=positions, turning=turning, is_seen=is_seen)
            hidden = passed_by(hidden, after, rate=rate, key=self.make_rng("dropout")) if rate else after
            keys_values.append(seen)
            states.append(hidden)
        return states, keys_values

    def _placed(self, values: jax.Array) -> jax.Array:
        return divided(values, 1, of=self.config.num_kv_heads)

    def decoder_position_biases(self, length: int) -> list[jax.Array]:
        """Returns what hides generated keys from queries, each (1, length, length): of each layer, or of all.

        Hidden are those to come, those before the window, and that of the first step, which is the prompt's.
        """
        steps = np.arange(length)
        age = steps[:, None] - steps
        return [
            jnp.where((steps > 0) & (age >= 0) & (age < window), np.float32(0), MASKED)[None]
            for window in self._distinct_windows()
        ]

    def path_terms(self, length: int) -> list[LayerTerms]:
        """Returns what packed layers need, of each layer or of all."""
        if not (self.config.unturned_layers or self.config.local_rope_theta):
            return [LayerTerms(jnp.int32(window), None) for window in self._distinct_windows()]
        return [
            LayerTerms(jnp.int32(window), Turning(jnp.asarray(turning.frequencies), jnp.asarray(turning.factor)))
            for window, turning in zip(self._windows(), turnings(self.config), strict=True)
        ]

    def source_biases(self, source_mask: jax.Array, position: Position) -> list[jax.Array]:
        """Returns what hides padding, and what is before the window, from queries: (batch, 1, 1, source) each."""
        # [batch, source]
        age = positions_of(position)[:, None] - jnp.arange(source_mask.shape[1])[None]
        return [
            jnp.where(source_mask & (age < window), np.float32(0), MASKED)[:, None, None]
            for window in self._distinct_windows()
        ]

    def self_keys_values(self, states: jax.Array, layer: int, *, position: Position) -> KeysValues:
        """Returns what a layer keeps of one position of every lane, each (batch, lanes, heads of keys, head_dim)."""
        turning = turnings(self.config)[layer - 1]
        return self.decoder.layers[layer - 1].keys_values(states, positions_of(position)[:, None], turning=turning)

    def decoder_layer(
        self,
        hidden: jax.Array,
        layer: int,
        *,
        self_keys_values: KeysValues,
        self_bias: jax.Array,
        source_keys_values: KeysValues,
        source_bias: jax.Array,
        position: Position,
    ) -> jax.Array:
        """Returns the output of a layer for one position of every lane, (batch, lanes, width)."""
        return self.decoder.layers[layer - 1].in_lanes(
            hidden,
            self_keys_values,
            own_bias=self_bias,
            source=source_keys_values,
            source_bias=source_bias,
            position=position,
            turning=turnings(self.config)[layer - 1],
        )

    def head(self, states: jax.Array, layer: int, *, deterministic: bool = True) -> jax.Array:
        """Returns the logits of the output head after a layer: norm, then head, each the layer's own or shared.

        If the model caps logits, they are capped.
        """
        logits = head_logits(self.head_inputs(states, layer), self.head_weights(layer), self.precision)
        return capped(logits, self.config.logits_cap)

    def head_inputs(self, states: jax.Array, layer: int) -> jax.Array:
        """Returns what the head's weights multiply, shape of `states`: the normed states, divided as logits are."""
        inputs = normed(self.decoder, states, layer)
        divisor = self.config.logits_divisor
        return inputs if divisor == 1 else rounded(widened(inputs) / np.float32(divisor), self.precision)

    def head_weights(self, layer: int) -> tuple[jax.Array, int]:
        """Returns the weights of the head after a layer as they are stored, and the axis of the vocabulary in them."""
        return head_weights(self.token_embedder, self.decoder, layer, self.precision)

    def exit_score(self, states: jax.Array) -> jax.Array:
        """Returns the exit classifier's probability of "exit", shape (...), of raw layer outputs (..., width)."""
        return exit_probability(self.decoder.meta_cls, states)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns every layer's logits, shape (layers, batch, positions, vocabulary); declares every parameter."""
        states = self.decode_teacher_forced(tokens)
        if self.config.exit_classifier:
            self.exit_score(states)
        return jnp.stack([self.head(state, layer) for layer, state in enumerate(states, start=1)])

    def _windows(self) -> list[np.int32]:
        """Returns how many keys a position sees at each layer."""
        config = self.config
        window = _ALL if config.sliding_window is None else np.int32(config.sliding_window)
        return [window if index in config.windowed_layers else _ALL for index in range(config.num_decoder_layers)]

    def _distinct_windows(self) -> list[np.int32]:
        """Returns `_windows`, or the only one that there is."""
        windows = self._windows()
        return windows[:1] if len(set(windows)) == 1 else windows
