"""Early exits of a network of any architecture: the output head after any layer, and the exit classifier.

All layers share the final norm and the output head, unless those below the last have their own norm or head kernel
(`architecture.py`). In training, layer dropout makes lower layers better at predicting: rows skip decoder layers,
deeper ones more often.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from calm_beam.precision import Precision

from .architecture import ModelConfig
from .numerics import matrix_product, parameter, widened


class Projection(nn.Module):
    """The kernel of a dense layer without a bias, for callers that multiply by it themselves."""

    inputs: int
    outputs: int

    def setup(self) -> None:
        """Declares the kernel, [in, out]."""
        self.kernel = parameter(self, "kernel", nn.initializers.lecun_normal(), (self.inputs, self.outputs))


def exit_projections(config: ModelConfig) -> list[Projection]:
    """Returns the own heads of the layers below the last; none if they share the output head."""
    count = config.num_decoder_layers - 1 if config.exit_heads else 0
    return [Projection(config.emb_dim, config.vocab_size) for _ in range(count)]


def has_own_exits(config: ModelConfig) -> bool:
    """Returns whether layers below the last predict with their own norm or head."""
    return config.exit_norms or config.exit_heads


def has_own_head(config: ModelConfig, layer: int) -> bool:
    """Returns whether a layer, counted from 1, has its own head kernel."""
    return config.exit_heads and layer < config.num_decoder_layers


def kernel_layers(config: ModelConfig) -> Sequence[int]:
    """Returns the layers with a head kernel each: all, or only the last, if all layers share its kernel."""
    return range(1 if config.exit_heads else config.num_decoder_layers, config.num_decoder_layers + 1)


def exit_layers(config: ModelConfig) -> Sequence[int]:
    """Returns the layers with their own norm or head: all, or only the last, if all layers share both."""
    return range(1 if has_own_exits(config) else config.num_decoder_layers, config.num_decoder_layers + 1)


def normed(decoder: Any, states: jax.Array, layer: int) -> jax.Array:
    """Returns states after a layer's norm before the head.

    Args:
      decoder: A decoder, with the model's config, `decoder_norm`, and `exit_norms` if there are any.
      states: shape (..., width). Output of the layer.
      layer: Number of the layer, from 1.
    """
    config = decoder.config
    is_own = config.exit_norms and layer < config.num_decoder_layers
    result: jax.Array = (decoder.exit_norms[layer - 1] if is_own else decoder.decoder_norm)(states)
    return result


def head_weights(token_embedder: nn.Embed, decoder: Any, layer: int, precision: Precision) -> tuple[jax.Array, int]:
    """Returns the weights of the head after a layer, and the axis of the vocabulary in them.

    Args:
      token_embedder: The embedding, which a tied head shares.
      decoder: A decoder, with the model's config, `logits_dense` unless the head is tied, and `exit_heads` if there are
        any.
      layer: Number of the layer, from 1.
      precision: Its type is that of the returned weights.
    """
    if has_own_head(decoder.config, layer):
        return decoder.exit_heads[layer - 1].kernel.astype(precision.dtype), 1
    if decoder.config.tied_head:
        return token_embedder.embedding.astype(precision.dtype), 0
    return decoder.logits_dense.kernel.astype(precision.dtype), 1


def head_logits(inputs: jax.Array, weights: tuple[jax.Array, int], precision: Precision) -> jax.Array:
    """Returns float32 logits, (..., vocabulary), of inputs of the head, (..., width), and `head_weights`."""
    kernel, vocab_axis = weights
    return matrix_product(inputs, kernel if vocab_axis else kernel.T, precision)


def own_parameters(decoder: Mapping[str, Any], config: ModelConfig, layer: int) -> dict[str, Any]:
    """Returns the own norm and head of a layer below the last, under the names of layer 1's.

    So one program, that of layer 1's head, serves every such layer.

    Args:
      decoder: The decoder's parameters, as a tree.
      config: The model's config.
      layer: Number of the layer, from 1.
    """
    return {
        f"{field}_0": decoder[f"{field}_{layer - 1}"]
        for field, has_any in (("exit_norms", config.exit_norms), ("exit_heads", config.exit_heads))
        if has_any
    }


def head_parameters(tree: Mapping[str, Any], config: ModelConfig, layer: int) -> tuple[int, dict[str, Any]]:
    """Returns the layer whose program applies the head after a layer, and the parameters that it needs.

    The program is layer 1's for all layers with their own norm or head, and the last layer's for the others.

    Args:
      tree: All parameters.
      config: The model's config.
      layer: Number of the layer, from 1.
    """
    is_own = has_own_exits(config) and layer < config.num_decoder_layers
    decoder = own_parameters(tree["decoder"], config, layer) if is_own else {}
    if "exit_norms_0" not in decoder:
        decoder["decoder_norm"] = tree["decoder"]["decoder_norm"]
    parameters = {"decoder": decoder}
    if "exit_heads_0" not in decoder:
        if config.tied_head:
            parameters["token_embedder"] = tree["token_embedder"]
        else:
            decoder["logits_dense"] = tree["decoder"]["logits_dense"]
    return (1 if is_own else config.num_decoder_layers), parameters


def over_layers(of_layer: Callable[..., Any], states: jax.Array, config: ModelConfig) -> Any:
    """Returns a function's results for each layer's states, stacked.

    It runs one layer after the other: the logits of all layers would take too much memory.

    Args:
      of_layer: Takes the states of a layer, and the keyword `layer`, the layer whose head applies to them.
      states: shape (layers, ...). States of layers 1 and on.
      config: The model's config.
    """
    if not has_own_exits(config):
        return jax.lax.map(functools.partial(of_layer, layer=config.num_decoder_layers), states)
    branches = [functools.partial(of_layer, layer=layer) for layer in range(1, len(states) + 1)]
    return jax.lax.map(lambda each: jax.lax.switch(each[0], branches, each[1]), (jnp.arange(len(states)), states))


def exit_probability(classifier: nn.Dense, states: jax.Array) -> jax.Array:
    """Returns the probability of "exit", shape (...), of raw layer outputs, (..., width).

    The classifier reads a layer's output without the final norm, as in the released T5X code. One logit goes through a
    sigmoid (CALM, "Local confidence measures"), two through a softmax (T5X).
    """
    logits = classifier(widened(states))
    if classifier.features == 1:
        return jax.nn.sigmoid(logits[..., 0])
    return jax.nn.softmax(logits)[..., 1]


def layer_dropout_rates(num_layers: int, most: float) -> list[float]:
    """Returns the rate at which a row skips each decoder layer: 0 at the first, `most` at the last.

    Args:
      num_layers: Decoder depth, at least 1.
      most: In [0, 1).

    Source: LayerSkip (Elhoushi et al., 2024), section "Layer Dropout": exp(l ln 2 / (L - 1)) - 1 times the maximum.

    >>> [round(rate, 3) for rate in layer_dropout_rates(3, 0.2)]
    [0.0, 0.083, 0.2]
    """
    return [most * (2 ** (layer / max(1, num_layers - 1)) - 1) for layer in range(num_layers)]


def passed_by(before: jax.Array, after: jax.Array, *, rate: float | jax.Array, key: jax.Array) -> jax.Array:
    """Returns a layer's output, (batch, ...), or its input for rows that skip it. Outputs are not rescaled.

    Args:
      before: Input of the layer.
      after: Output of the layer.
      rate: Probability that a row skips the layer.
      key: Random key that selects these rows.
    """
    passes = jax.random.bernoulli(key, rate, before.shape[:1])
    return jnp.where(passes.reshape(-1, *(1,) * (before.ndim - 1)), before, after)
