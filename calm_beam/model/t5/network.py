"""The encoder-decoder network: the encoder, one decoder layer at a time, and the output head at any layer.

It also packs its decoder for native code.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from calm_beam.model.heads import (
    Projection,
    exit_probability,
    exit_projections,
    has_own_head,
    head_logits,
    head_weights,
    layer_dropout_rates,
    normed,
    passed_by,
)
from calm_beam.model.interface import Attended, KeysValues, Position, Sources, Taught, of_layer
from calm_beam.model.native import library
from calm_beam.model.native_decoder import NativeDecoder, Packing, classifier_of, norms_before_heads
from calm_beam.model.numerics import MASKED, Dense, added, parameter, precision_of, rounded, widened
from calm_beam.model.partitioning import looked_up
from calm_beam.precision import FLOAT32, Precision

from .attention import Attention, RelativePositionBias, relative_position_bucket
from .config import PAD_ID, T5Config

NORM_EPSILON = 1e-6
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}


class RMSNorm(nn.Module):
    """Scales every vector to unit root mean square; no mean is subtracted and no bias added.

    Attributes:
      precision: Its type is that of the normed inputs; they are float32 until then.
    """

    precision: Precision = FLOAT32

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the normed inputs, shape (..., width)."""
        scale = parameter(self, "scale", nn.initializers.ones, (inputs.shape[-1],))
        wide = widened(inputs)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + NORM_EPSILON) * scale.reshape((1,) * (inputs.ndim - 1) + (-1,))
        return rounded(normed, self.precision)


class FeedForward(nn.Module):
    """The feed-forward layer, without biases: to a wider space, and back to the model's width.

    A gated layer, such as T5 1.1's, has f(x W0) * (x W1); one without a gate, such as the original T5's, has f(x W).

    Attributes:
      config: Sizes of the model; `gated_mlp` determines which of the two, `activation` which f.
      dropout_rate: Dropout between the kernels, used only with `deterministic=False`.
      precision: Precision in which it computes.
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
          bias: Bias that hides padding; includes the stack's relative positions, if the layer has none of its own.
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

    Separate methods compute keys and values, since with early exits a layer also computes them for tokens that skip it
    (CALM, "Decoding with early exiting": state propagation).
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

        T5's do not depend on the position, which only the biases, the terms, depend on.
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


class Encoder(nn.Module):
    """The encoder stack with its final norm."""

    config: T5Config
    dropout_rate: float = 0.0
    precision: Precision = FLOAT32

    @nn.compact
    def __call__(self, embedded: jax.Array, source_mask: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Returns the encoder's output, shape (batch, source, width), of embedded tokens and their mask."""
        config = self.config
        bias = padding_bias(source_mask)
        if not config.relative_bias_per_layer:
            relative = RelativePositionBias(config, bidirectional=True, name="relpos_bias")(embedded.shape[1])
            # [heads, source, source], [batch, source] -> [batch, heads, source, source]
            bias = relative[None] + bias
        dropout = nn.Dropout(self.dropout_rate)
        hidden = dropout(embedded, deterministic=deterministic)
        for index in range(config.num_encoder_layers):
            layer = EncoderLayer(config, self.dropout_rate, self.precision, name=f"layers_{index}")
            hidden = layer(hidden, bias, deterministic=deterministic)
        return dropout(RMSNorm(self.precision, name="encoder_norm")(hidden), deterministic=deterministic)


class Decoder(nn.Module):
    """The decoder stack, whose layers and head are called one by one."""

    config: T5Config
    dropout_rate: float = 0.0
    precision: Precision = FLOAT32

    def setup(self) -> None:
        """Declares the layers, the final norm and the head, those of exits, and the exit classifier."""
        config = self.config
        if not config.relative_bias_per_layer:
            self.relpos_bias = RelativePositionBias(config, bidirectional=False)
        self.layers = [
            DecoderLayer(config, self.dropout_rate, self.precision) for _ in range(config.num_decoder_layers)
        ]
        # `head_inputs` rounds, after it has scaled where the head needs that.
        self.decoder_norm = RMSNorm()
        self.dropout = nn.Dropout(self.dropout_rate)
        if not config.tied_head:
            self.logits_dense = Projection(config.emb_dim, config.vocab_size)
        self.exit_norms = [RMSNorm() for _ in range(config.num_decoder_layers - 1 if config.exit_norms else 0)]
        self.exit_heads = exit_projections(config)
        if config.exit_classifier:
            self.meta_cls = nn.Dense(config.exit_classifier, precision=precision_of(self.precision))


class EarlyExitT5(nn.Module):
    """T5 with an output head after every decoder layer.

    `parameter_shapes` describes the parameter tree. Methods are called through `Module.apply`. Decoder layers are
    counted from 1, as in the paper.

    Attributes:
      config: Sizes of the model.
      dropout_rate: Dropout used with `deterministic=False`.
      precision: Precision in which it computes. States, keys and values have its type.
      layer_dropout: Rate at which rows skip the last decoder layer with `deterministic=False`; see
        `layer_dropout_rates`.
    """

    config: T5Config
    dropout_rate: float = 0.0
    precision: Precision = FLOAT32
    layer_dropout: float = 0.0

    def setup(self) -> None:
        """Declares embedding, encoder and decoder."""
        config, precision = self.config, self.precision
        self.token_embedder = nn.Embed(config.vocab_size, config.emb_dim, dtype=precision.dtype)
        self.encoder = Encoder(config, self.dropout_rate, precision)
        self.decoder = Decoder(config, self.dropout_rate, precision)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings of token ids, shape of `tokens` + (width,)."""
        return looked_up(self.token_embedder.embedding.astype(self.precision.dtype), tokens)

    def encode(self, source_tokens: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Returns the encoder's output, shape (batch, source, width), of 0-padded ids (batch, source)."""
        embedded = self.embed(source_tokens)
        return self.encoder(embedded, source_tokens != PAD_ID, deterministic=deterministic)

    def prefill(
        self, source_tokens: jax.Array, lengths: jax.Array, prefix: Sequence[KeysValues] = ()
    ) -> tuple[list[KeysValues], jax.Array]:
        """Returns every decoder layer's keys and values of the encoder's output, and the mask of its positions.

        Padding is recognised by its id at any position, as in T5X, so `lengths` is not used.

        Args:
          source_tokens: shape (batch, source). 0-padded.
          lengths: int32, shape (batch,).
          prefix: Must be empty: later tokens change the encoder's output for the first ones.
        """
        assert not prefix
        return self.cross_keys_values(self.encode(source_tokens)), source_tokens != PAD_ID

    def source_biases(self, source_mask: jax.Array, position: Position) -> list[jax.Array]:
        """Returns the bias that hides padding, one for all layers and positions."""
        return [padding_bias(source_mask)]

    def cross_keys_values(self, encoded: jax.Array) -> list[KeysValues]:
        """Returns every decoder layer's keys and values of the encoder's output, each (batch, heads, source, dim)."""
        return [layer.cross_keys_values(encoded) for layer in self.decoder.layers]

    def decoder_position_biases(self, length: int) -> list[jax.Array]:
        """Returns the decoder's relative position biases with future keys masked, each (heads, length, length).

        There is one for every layer, or a single one that all of them share: see `of_layer`.
        """
        causal = jnp.where(np.tril(np.ones((length, length), bool)), np.float32(0), MASKED)[None]
        if self.config.relative_bias_per_layer:
            return [layer.relpos_bias(length) + causal for layer in self.decoder.layers]
        return [self.decoder.relpos_bias(length) + causal]

    def path_terms(self, length: int) -> list[jax.Array]:
        """Returns the relative position biases by how many steps a key is older, each (heads, length)."""
        # [heads, query, key], of the last query -> [heads, age]
        return [bias[:, -1, ::-1] for bias in self.decoder_position_biases(length)]

    def self_keys_values(self, states: jax.Array, layer: int, *, position: Position) -> KeysValues:
        """Returns a decoder layer's keys and values for one position of every branch.

        Args:
          states: shape (batch, branches, width). The (possibly propagated) output of the layer below.
          layer: Number of the layer, from 1.
          position: Position of each row, which T5's keys and values do not depend on.

        Returns:
          Keys and values, each of shape (batch, branches, heads, head_dim).
        """
        keys, values = self.decoder.layers[layer - 1].self_keys_values(states[:, :, None])
        return keys[:, :, :, 0], values[:, :, :, 0]

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
        """Returns the output of a decoder layer for one position of every branch.

        Args:
          hidden: shape (batch, branches, width). Output of the layer below at this position.
          layer: Number of the layer, from 1.
          self_keys_values: Each of shape (batch, branches, heads, positions, head_dim).
          self_bias: shape (batch, 1, heads, 1, positions). Future and unfilled positions are masked.
          source_keys_values: Each of shape (batch, heads, source, head_dim), shared by the branches of a prompt.
          source_bias: shape (batch, 1, 1, source). Padding is masked.
          position: Position of each row, which the biases already include.

        Returns:
          Shape (batch, branches, width).
        """
        module = self.decoder.layers[layer - 1]
        # One query per branch attends to the cache of that branch.
        hidden = module.self_attend(hidden[:, :, None], self_keys_values, bias=self_bias)[:, :, 0]
        # The branches of a prompt are the queries of one attention over its source.
        return module.cross_attend_and_feed_forward(hidden, source_keys_values, bias=source_bias)

    def decode_teacher_forced(
        self, source_tokens: jax.Array, decoder_inputs: jax.Array, *, deterministic: bool = True
    ) -> jax.Array:
        """Returns the output of every decoder layer at every position, without early exits.

        Args:
          source_tokens: shape (batch, source). 0-padded.
          decoder_inputs: shape (batch, target). The start token, and then the targets without the last.
          deterministic: Whether dropout is off.

        Returns:
          Shape (layers, batch, target, width), no final norm applied.
        """
        encoded = self.encode(source_tokens, deterministic=deterministic)
        cross_bias = padding_bias(source_tokens != PAD_ID)
        self_biases = self.decoder_position_biases(decoder_inputs.shape[1])
        hidden = self.decoder.dropout(self.embed(decoder_inputs), deterministic=deterministic)
        rates = layer_dropout_rates(self.config.num_decoder_layers, 0.0 if deterministic else self.layer_dropout)
        states = []
        for number, (layer, rate) in enumerate(zip(self.decoder.layers, rates, strict=True), start=1):
            own = layer.self_keys_values(hidden)
            self_bias = of_layer(self_biases, number)[None]
            after = layer.self_attend(hidden, own, bias=self_bias, deterministic=deterministic)
            cross = layer.cross_keys_values(encoded)
            after = layer.cross_attend_and_feed_forward(after, cross, bias=cross_bias, deterministic=deterministic)
            hidden = passed_by(hidden, after, rate=rate, key=self.make_rng("dropout")) if rate else after
            states.append(hidden)
        return jnp.stack(states)

    def teacher_forced(self, taught: Taught, *, deterministic: bool = True) -> jax.Array:
        """Returns the states that predict the targets, (layers, batch, target, width)."""
        inputs = jnp.pad(taught.targets[:, :-1], ((0, 0), (1, 0)), constant_values=self.config.start_id)
        return self.decode_teacher_forced(jnp.asarray(taught.source_tokens), inputs, deterministic=deterministic)

    def head(self, states: jax.Array, layer: int, *, deterministic: bool = True) -> jax.Array:
        """Returns the logits of the output head after a layer: norm, then head, each the layer's own or shared.

        Args:
          states: shape (..., width). Output of the layer.
          layer: Number of the layer, from 1.
          deterministic: Whether dropout is off.

        Returns:
          float32, shape (..., vocabulary).
        """
        inputs = self.head_inputs(states, layer, deterministic=deterministic)
        return head_logits(inputs, self.head_weights(layer), self.precision)

    def head_inputs(self, states: jax.Array, layer: int, *, deterministic: bool = True) -> jax.Array:
        """Returns the inputs of the head, the normed states, shape of `states`; for the arguments see `head`.

        A tied head takes them scaled, a layer's own head unscaled.
        """
        inputs = self.decoder.dropout(normed(self.decoder, states, layer), deterministic=deterministic)
        if self.config.tied_head and not has_own_head(self.config, layer):
            # T5's tied head undoes the scale of the embeddings (Raffel et al., 2020; T5X `logits_via_embedding`).
            inputs = inputs / np.float32(np.sqrt(self.config.emb_dim))
        return rounded(inputs, self.precision)

    def head_weights(self, layer: int) -> tuple[jax.Array, int]:
        """Returns the weights of the head after a layer, and the axis of the vocabulary in them."""
        return head_weights(self.token_embedder, self.decoder, layer, self.precision)

    def exit_score(self, states: jax.Array) -> jax.Array:
        """Returns the exit classifier's probability of "exit", shape (...), of raw layer outputs (..., width)."""
        return exit_probability(self.decoder.meta_cls, states)

    def __call__(self, source_tokens: jax.Array, decoder_inputs: jax.Array) -> jax.Array:
        """Returns every layer's logits, shape (layers, batch, target, vocabulary); declares every parameter."""
        states = self.decode_teacher_forced(source_tokens, decoder_inputs)
        if self.config.exit_classifier:
            self.exit_score(states)
        return jnp.stack([self.head(state, layer) for layer, state in enumerate(states, start=1)])


def padding_bias(mask: jax.Array) -> jax.Array:
    """Returns the attention bias that hides padding, shape (batch, 1, 1, source), of a mask (batch, source)."""
    return jnp.where(mask, np.float32(0), MASKED)[:, None, None, :]


def native_decoder(config: T5Config, parameters: Mapping[str, Any], *, biases: Sequence[Any]) -> NativeDecoder:
    """Returns a model's decoder for native code.

    Args:
      config: The model's config.
      parameters: All arrays of the model, as a tree.
      biases: The network's `path_terms`, (heads, ages), one for each layer or one for all.
    """
    encoder, decoder, packing = parameters["encoder"], parameters["decoder"], Packing()
    layers = [decoder[f"layers_{index}"] for index in range(config.num_decoder_layers)]
    return NativeDecoder(
        [
            _decoder_layer(config, layer, np.asarray(of_layer(biases, number)), packing)
            for number, layer in enumerate(layers, start=1)
        ],
        prompt_layers=[
            _encoder_layer(config, encoder, encoder[f"layers_{index}"], packing)
            for index in range(config.num_encoder_layers)
        ],
        source_layers=[_source_layer(config, encoder, layer, packing) for layer in layers],
        rows_of_prompts="of encoder",
        norms=[np.asarray(norm["scale"]) for norm in norms_before_heads(config, decoder)],
        factors=[
            1 / math.sqrt(config.emb_dim) if config.tied_head and not has_own_head(config, layer) else 1.0
            for layer in range(1, config.num_decoder_layers + 1)
        ],
        epsilon=NORM_EPSILON,
        embedding=np.asarray(parameters["token_embedder"]["embedding"]),
        packing=packing,
        classifier=classifier_of(config, decoder),
    )


def _decoder_layer(config: T5Config, layer: Mapping[str, Any], biases: np.ndarray, packing: Packing) -> library.Layer:
    made = _layer(config, layer, biases, packing, norm="pre_self_attention_layer_norm", attention="self_attention")
    cross = layer["encoder_decoder_attention"]
    made.cross_query = packing.matrix(cross["query"]["kernel"])
    made.cross_out = packing.matrix(cross["out"]["kernel"])
    made.cross_norm = packing.address(layer["pre_cross_attention_layer_norm"]["scale"])
    return made


def _encoder_layer(
    config: T5Config, encoder: Mapping[str, Any], layer: Mapping[str, Any], packing: Packing
) -> library.Layer:
    table = (layer if config.relative_bias_per_layer else encoder)["relpos_bias"]["rel_embedding"]
    furthest = config.relative_max_distance
    buckets = relative_position_bucket(
        np.arange(furthest, -furthest - 1, -1),
        buckets=config.relative_buckets,
        max_distance=furthest,
        bidirectional=True,
    )
    biases = np.asarray(table)[:, buckets]
    return _layer(config, layer, biases, packing, norm="pre_attention_layer_norm", attention="attention")


def _source_layer(
    config: T5Config, encoder: Mapping[str, Any], layer: Mapping[str, Any], packing: Packing
) -> library.Layer:
    """Returns what makes a decoder layer's keys and values of sources from the output of the last encoder layer."""
    return library.Layer(
        **{name: packing.matrix(layer["encoder_decoder_attention"][name]["kernel"]) for name in ("key", "value")},
        norm=packing.address(encoder["encoder_norm"]["scale"]),
        key_heads=config.num_heads,
        size=config.head_dim,
        width=config.emb_dim,
        epsilon=NORM_EPSILON,
    )


def _layer(
    config: T5Config,
    layer: Mapping[str, Any],
    biases: np.ndarray,
    packing: Packing,
    *,
    norm: str,
    attention: str,
) -> library.Layer:
    """Returns what layers of encoder and decoder have in common; `biases` are (heads, ages)."""
    own, mlp = layer[attention], layer["mlp"]
    made = library.Layer(
        **{name: packing.matrix(own[name]["kernel"]) for name in ("query", "key", "value", "out")},
        wide=packing.matrix(mlp["wi_1" if config.gated_mlp else "wi"]["kernel"]),
        narrow=packing.matrix(mlp["wo"]["kernel"]),
        norm=packing.address(layer[norm]["scale"]),
        mlp_norm=packing.address(layer["pre_mlp_layer_norm"]["scale"]),
        biases=packing.address(biases),
        bias_heads=biases.shape[0],
        ages=biases.shape[1],
        heads=config.num_heads,
        key_heads=config.num_heads,
        size=config.head_dim,
        width=config.emb_dim,
        activation=library.ACTIVATIONS.index(config.activation),
        window=library.NO_WINDOW,
        epsilon=NORM_EPSILON,
    )
    if config.gated_mlp:
        made.gate = packing.matrix(mlp["wi_0"]["kernel"])
    return made
