"""The decoder-only network: prefill, one decoder layer at a time, and the output head at any layer.

It also packs its decoder for native code.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from calm_beam.model.heads import (
    Projection,
    exit_probability,
    exit_projections,
    head_logits,
    head_weights,
    layer_dropout_rates,
    normed,
    passed_by,
)
from calm_beam.model.interface import Attended, KeysValues, Numbers, Position, Sources, Taught, of_layer
from calm_beam.model.native import library
from calm_beam.model.native_decoder import NativeDecoder, Packing, classifier_of, norms_before_heads
from calm_beam.model.numerics import MASKED, Dense, added, capped, precision_of, rounded, widened
from calm_beam.model.partitioning import divided, looked_up
from calm_beam.precision import FLOAT32, Precision

from .attention import Attention, RMSNorm, Turning, inverse_frequencies, turnings
from .config import LlamaConfig, chunk_positions

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}


class FeedForward(nn.Module):
    """The gated feed-forward layer, without biases: f(x W0) * (x W1), back to the model's width.

    The experts of a mixture are one wide layer: each has its share of the columns, which the router weighs. All are
    computed for every row, and those that a row does not use have weight 0, so a row does not depend on its batch.
    """

    config: LlamaConfig
    precision: Precision

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the output as float32, before the residual is added, shape of `inputs`."""
        config = self.config
        gate, linear = (Dense(config.mlp_dim, self.precision, name=name)(inputs) for name in ("wi_0", "wi_1"))
        hidden = _ACTIVATIONS[config.activation](gate) * linear
        if config.num_experts > 1:
            weights = expert_weights(config, Dense(config.num_experts, self.precision, name="router")(inputs))
            hidden = hidden * jnp.repeat(weights, config.mlp_dim // config.num_experts, axis=-1)
        return Dense(config.emb_dim, self.precision, name="wo")(rounded(hidden, self.precision))


def expert_weights(config: LlamaConfig, logits: jax.Array) -> jax.Array:
    """Returns the weight of every expert, float32, (..., experts); 0 for those that a token does not use.

    Args:
      config: The model's config. Of experts with equal logits, the first ones are used.
      logits: The router's outputs, float32, (..., experts).

    Source: Jiang et al. (2024), "Mixtral of Experts", section 2.1; transformers `modeling_qwen3_moe.py`.
    """
    # [..., experts per token]
    largest, experts = jax.lax.top_k(jax.nn.softmax(logits), config.experts_per_token)
    if config.normed_expert_weights:
        largest = largest / jnp.sum(largest, axis=-1, keepdims=True)
    is_expert = jax.nn.one_hot(experts, config.num_experts, dtype=jnp.float32)
    return jnp.sum(largest[..., None] * is_expert, axis=-2)


class LayerTerms(NamedTuple):
    """The inputs of a packed layer that differ between layers, in addition to its parameters.

    Attributes:
      window: int32 scalar. How many keys a position sees, its own included.
      turning: The rotation of queries and keys; None if all layers have the same, which is then part of the program.
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
            # These norms take float32 sums, which are rounded when the residual is added.
            self.post_self_attention_layer_norm = RMSNorm(config)
            self.post_mlp_layer_norm = RMSNorm(config)

    def keys_values(self, states: jax.Array, positions: Numbers, *, turning: Turning) -> KeysValues:
        """Returns this layer's keys and values of (possibly propagated) states.

        Args:
          states: shape (..., width).
          positions: int32, shape (...).
          turning: This layer's rotation.

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
          turning: This layer's rotation.
          is_seen: bool, shape (positions, source). By position of query and of key.
        """
        mixed = self.self_attention.attend_in_prompt(
            self._queries(hidden, positions[None], turning), keys_values, is_seen=is_seen
        )
        return self._feed_forward(self._added(hidden, self.self_attention.output(mixed), "self_attention"))

    def in_branches(
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
        """Returns the layer's output for one position of every branch, (batch, branches, width).

        Args:
          hidden: shape (batch, branches, width).
          own: See `attend_in_branches`.
          own_bias: See `attend_in_branches`.
          source: See `attend_in_branches`.
          source_bias: See `attend_in_branches`.
          position: Position of each row, (batch,).
          turning: This layer's rotation.
        """
        mixed = self.self_attention.attend_in_branches(
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
        """Returns the input of a sub-layer, given the residual stream."""
        taken: jax.Array = getattr(self, f"pre_{name}_layer_norm")(hidden) if self.config.pre_norms else hidden
        return taken

    def _added(self, stream: jax.Array, values: jax.Array, name: str) -> jax.Array:
        """Returns the residual stream with a sub-layer's output added."""
        if self.config.post_norms:
            values = getattr(self, f"post_{name}_layer_norm")(values)
        if self.config.residual_factor != 1:
            values = values * np.float32(self.config.residual_factor)
        return added(stream, values, self.precision)


def positions_of(position: Position) -> jax.Array:
    """Returns the rotary positions of tokens; the first step has that of the prompt's last token."""
    return jnp.asarray(position.prompt_lengths) - 1 + jnp.asarray(position.steps)


class _OfLayer(NamedTuple):
    """The inputs of a layer in a loop over layers; of all layers, each array has one more axis, the first.

    Attributes:
      parameters: Its parameters.
      terms: What else differs between layers.
      rate: float32 scalar. At which rows skip the layer.
      key: Random key that selects these rows; None without layer dropout.
    """

    parameters: Any
    terms: LayerTerms
    rate: jax.Array
    key: jax.Array | None


def _stacked(*values: jax.Array) -> jax.Array:
    return jnp.stack(values)


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

    `parameter_shapes` describes the parameter tree, and `EarlyExitModel` the methods, which are called through
    `Module.apply`. Prefill runs all layers for the whole prompt, its last token included. The first step reads that
    token again, so that it may exit; its keys and values are not used, since the source has them already.

    Attributes:
      config: The model's config.
      precision: Precision in which it computes. States, keys and values have its type.
      layer_dropout: Rate at which rows skip the last layer with `deterministic=False`; see `layer_dropout_rates`.
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
            # Gemma's own code also rounds the factor to the type of the states.
            factor = factor * np.asarray(np.sqrt(self.config.emb_dim), self.precision.dtype).astype(np.float32)
        return embedded if factor == 1 else rounded(widened(embedded) * factor, self.precision)

    def prefill(
        self, source_tokens: jax.Array, lengths: jax.Array, prefix: Sequence[KeysValues] = ()
    ) -> tuple[list[KeysValues], jax.Array]:
        """Returns every layer's keys and values of prompts, and the mask of their positions.

        Long prompts are prefilled in chunks, each of which attends to the keys and values of those before it.

        Args:
          source_tokens: shape (batch, source). Right-padded: no position sees later ones.
          lengths: int32, shape (batch,).
          prefix: Keys and values of the common prefix of all prompts, each (1, heads of keys, positions, head_dim), as
            `prefill` returned them, with fewer positions than source; empty to compute them here.
        """
        batch, source = source_tokens.shape
        mask = jnp.arange(source)[None] < lengths[:, None]
        chunk = chunk_positions(self.config, rows=batch, source=source)
        if chunk == source and not prefix:
            return self._in_prompt(source_tokens), mask
        return self._by_chunks(source_tokens, chunk, prefix), mask

    def _by_chunks(self, tokens: jax.Array, most: int, prefix: Sequence[KeysValues]) -> list[KeysValues]:
        """Returns every layer's keys and values of prompts, (batch, source), at most `most` positions at a time."""
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
        # Flax modules cannot be used in JAX's loops: unbind this one, and pass its parameters.
        model, variables = self.unbind()

        def prefill(kept: list[KeysValues], part: tuple[jax.Array, jax.Array]) -> tuple[list[KeysValues], None]:
            return model.apply(variables, part[0], first=part[1], kept=kept, method="_in_prompt"), None

        kept, _ = jax.lax.scan(prefill, begun, (parts, first + chunk * jnp.arange(count)))
        return [tuple(values[:, :, :source] for values in pair) for pair in kept]

    def teacher_forced(self, taught: Taught, *, deterministic: bool = True) -> jax.Array:
        """Returns the states that predict the targets, (layers, batch, target, width), from the prompt's last token on.

        Arguments are those of `EarlyExitModel.teacher_forced`; the only dropout is layer dropout.
        """
        states = self.decode_teacher_forced(jnp.asarray(taught.source_tokens), deterministic=deterministic)
        width = taught.targets.shape[1]
        # Each row takes as many states as the longest output has; a shorter output's slice may exceed the row, so pad.
        states = jnp.pad(states, ((0, 0), (0, 0), (0, width), (0, 0)))
        starts = jnp.asarray(taught.source_lengths) - jnp.asarray(taught.target_lengths)

        def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            of_layers, start = row
            return jax.lax.dynamic_slice_in_dim(of_layers, start, width, axis=1)

        # Row by row: for all rows at once the gradient is a scatter, for which XLA (jaxlib 0.10.2) chooses a division
        # among GPUs that it then refuses.
        taken: jax.Array = jax.lax.map(of_row, (jnp.moveaxis(states, 1, 0), starts))
        return jnp.moveaxis(taken, 0, 1)

    def decode_teacher_forced(self, tokens: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Returns the output of every layer at every position, without early exits.

        Layers are the steps of a loop: compiled once, and no step's gradient becomes part of another's. Written one
        after the other, on CPU every layer's gradient repeats the sums of all later layers (jaxlib 0.10.2): a gradient
        of 30 layers took five times as long, and compiled for minutes.

        Args:
          tokens: shape (batch, positions). Prompt and output, right-padded.
          deterministic: Whether layer dropout is off.

        Returns:
          Shape (layers, batch, positions, width), no final norm applied.
        """
        config = self.config
        parameters = self.variables["params"]["decoder"]
        layers = [parameters[f"layers_{index}"] for index in range(config.num_decoder_layers)]
        inputs = _OfLayer(
            parameters=jax.tree.map(_stacked, *layers),
            terms=jax.tree.map(_stacked, *self._terms()),
            rate=jnp.array(layer_dropout_rates(config.num_decoder_layers, self.layer_dropout), jnp.float32),
            key=None if deterministic else jax.random.split(self.make_rng("dropout"), config.num_decoder_layers),
        )
        positions = jnp.arange(tokens.shape[1])
        age = positions[:, None] - positions[None]
        # Not bound: Flax modules cannot be used in JAX's loops.
        layer = DecoderLayer(config, self.precision, parent=None)

        def run(hidden: jax.Array, of_layer: _OfLayer) -> tuple[jax.Array, jax.Array]:
            bound, (window, turning) = layer.bind({"params": of_layer.parameters}), of_layer.terms
            assert turning is not None
            made = bound.keys_values(hidden, positions[None], turning=turning)
            seen = tuple(jnp.swapaxes(part, 1, 2) for part in made)
            is_seen = (age >= 0) & (age < window)
            after = bound.in_prompt(hidden, seen, positions=positions, turning=turning, is_seen=is_seen)
            if of_layer.key is not None:
                after = passed_by(hidden, after, rate=of_layer.rate, key=of_layer.key)
            return after, after

        # Of each layer, a gradient keeps the products with kernels and computes all else again: as fast, in two thirds
        # of the memory.
        kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        _, states = jax.lax.scan(jax.checkpoint(run, policy=kept, prevent_cse=False), self.embed(tokens), inputs)
        return states

    def _in_prompt(
        self,
        tokens: jax.Array,
        *,
        first: jax.Array | int = 0,
        kept: Sequence[KeysValues | None] = (),
    ) -> list[KeysValues]:
        """Returns every layer's keys and values of positions of prompts, and of earlier ones.

        Args:
          tokens: shape (batch, positions).
          first: int32 scalar. The first of the positions.
          kept: Every layer's keys and values of earlier positions, with room for these, each (batch, heads of keys,
            source, head_dim); empty if there are no earlier ones.

        Returns:
          In the shape of `kept`, or of these positions alone.
        """
        positions = jnp.arange(tokens.shape[1]) + first
        hidden, keys_values = self.embed(tokens), []
        for layer, window, turning, earlier in itertools.zip_longest(
            self.decoder.layers, self._windows(), turnings(self.config), kept
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
            hidden = layer.in_prompt(hidden, seen, positions=positions, turning=turning, is_seen=is_seen)
            keys_values.append(seen)
        return keys_values

    def _placed(self, values: jax.Array) -> jax.Array:
        return divided(values, 1, of=self.config.num_kv_heads)

    def decoder_position_biases(self, length: int) -> list[jax.Array]:
        """Returns the masks of generated keys as biases, each (1, length, length), for every layer, or one for all.

        They hide future keys, keys before the window, and that of the first step, which the source has.
        """
        steps = np.arange(length)
        age = steps[:, None] - steps
        return [
            jnp.where((steps > 0) & (age >= 0) & (age < window), np.float32(0), MASKED)[None]
            for window in self._distinct_windows()
        ]

    def path_terms(self, length: int) -> list[LayerTerms]:
        """Returns the terms of packed layers, for every layer, or one for all."""
        if not (self.config.unturned_layers or self.config.local_rope_theta):
            return [LayerTerms(jnp.int32(window), None) for window in self._distinct_windows()]
        return self._terms()

    def _terms(self) -> list[LayerTerms]:
        """Returns the terms of every layer."""
        return [
            LayerTerms(jnp.int32(window), Turning(jnp.asarray(turning.frequencies), jnp.asarray(turning.factor)))
            for window, turning in zip(self._windows(), turnings(self.config), strict=True)
        ]

    def source_biases(self, source_mask: jax.Array, position: Position) -> list[jax.Array]:
        """Returns the masks of padding, and of keys before the window, as biases, each (batch, 1, 1, source)."""
        # [batch, source]
        age = positions_of(position)[:, None] - jnp.arange(source_mask.shape[1])[None]
        return [
            jnp.where(source_mask & (age < window), np.float32(0), MASKED)[:, None, None]
            for window in self._distinct_windows()
        ]

    def self_keys_values(self, states: jax.Array, layer: int, *, position: Position) -> KeysValues:
        """Returns keys and values for one position of every branch, each (batch, branches, heads of keys, head_dim)."""
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
        """Returns the output of a layer for one position of every branch, (batch, branches, width)."""
        return self.decoder.layers[layer - 1].in_branches(
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
        """Returns the inputs of the head, shape of `states`: the normed states, divided by the divisor of logits."""
        inputs = normed(self.decoder, states, layer)
        divisor = self.config.logits_divisor
        return inputs if divisor == 1 else rounded(widened(inputs) / np.float32(divisor), self.precision)

    def head_weights(self, layer: int) -> tuple[jax.Array, int]:
        """Returns the stored weights of the head after a layer, and the axis of the vocabulary in them."""
        return head_weights(self.token_embedder, self.decoder, layer, self.precision)

    def exit_score(self, states: jax.Array) -> jax.Array:
        """Returns the exit classifier's probability of "exit", shape (...), of raw layer outputs (..., width)."""
        return exit_probability(self.decoder.meta_cls, states)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns every layer's logits, shape (layers, batch, positions, vocabulary); declares every parameter."""
        if self.is_initializing():
            # The loop over layers reads their parameters, but declares none.
            self._in_prompt(tokens)
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
        """Returns `_windows`, or a single window if all layers have the same."""
        windows = self._windows()
        return windows[:1] if len(set(windows)) == 1 else windows


def native_decoder(config: LlamaConfig, parameters: Mapping[str, Any], *, terms: Sequence[Any]) -> NativeDecoder:
    """Returns a model's decoder for native code.

    Args:
      config: The model's config.
      parameters: All arrays of the model, as a tree.
      terms: The network's `path_terms`.
    """
    decoder, packing = parameters["decoder"], Packing()
    layers = [
        _layer(config, decoder[f"layers_{index}"], int(of_layer(terms, index + 1).window), packing)
        for index in range(config.num_decoder_layers)
    ]
    return NativeDecoder(
        layers,
        prompt_layers=layers[:-1],
        source_layers=layers[-1:],
        rows_of_prompts="of prompt",
        norms=[_scale(config, norm) for norm in norms_before_heads(config, decoder)],
        factors=[1 / config.logits_divisor] * config.num_decoder_layers,
        epsilon=config.norm_epsilon,
        embedding=np.asarray(parameters["token_embedder"]["embedding"]),
        embedding_factor=config.embedding_factor * (math.sqrt(config.emb_dim) if config.scaled_embedding else 1.0),
        frequencies=inverse_frequencies(config),
        turn_factor=config.rope_scaling.attention_factor,
        packing=packing,
        classifier=classifier_of(config, decoder),
    )


def _layer(config: LlamaConfig, layer: Mapping[str, Any], window: int, packing: Packing) -> library.Layer:
    attention, mlp = layer["self_attention"], layer["mlp"]
    made = library.Layer(
        **{name: packing.matrix(attention[name]["kernel"]) for name in ("query", "key", "value", "out")},
        gate=packing.matrix(mlp["wi_0"]["kernel"]),
        wide=packing.matrix(mlp["wi_1"]["kernel"]),
        narrow=packing.matrix(mlp["wo"]["kernel"]),
        norm=packing.address(_scale(config, layer["pre_self_attention_layer_norm"])),
        mlp_norm=packing.address(_scale(config, layer["pre_mlp_layer_norm"])),
        heads=config.num_heads,
        key_heads=config.num_kv_heads,
        size=config.head_dim,
        width=config.emb_dim,
        activation=library.ACTIVATIONS.index(config.activation),
        # Skip the first step: the source has its keys and values.
        first=1,
        window=window,
        epsilon=config.norm_epsilon,
        query_scale=config.head_dim**-0.5 if config.query_factor is None else config.query_factor,
    )
    if config.attention_bias:
        for name in ("query", "key", "value"):
            setattr(made, f"{name}_bias", packing.address(attention[name]["bias"]))
    if config.query_key_norms:
        for name in ("query", "key"):
            setattr(made, f"{name}_norm", packing.address(_scale(config, attention[f"{name}_norm"])))
    return made


def _scale(config: LlamaConfig, norm: Mapping[str, Any]) -> np.ndarray:
    scale = np.asarray(norm["scale"])
    return scale + np.float32(1) if config.unit_offset_norms else scale
