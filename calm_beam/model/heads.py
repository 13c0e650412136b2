"""What predicts from states, whatever the architecture: the output head that all layers share, the exit classifier."""

from typing import Any

import jax
from flax import linen as nn

from calm_beam.arithmetic import Arithmetic

from .numerics import matrix_product, widened


class Projection(nn.Module):
    """The kernel of a dense layer without a bias, for callers that multiply by it themselves."""

    inputs: int
    outputs: int

    def setup(self) -> None:
        """Declares the kernel, [in, out]."""
        self.kernel = self.param("kernel", nn.initializers.lecun_normal(), (self.inputs, self.outputs))


def head_weights(token_embedder: nn.Embed, decoder: Any, arithmetic: Arithmetic) -> tuple[jax.Array, int]:
    """Returns the weights of the head as they are multiplied, and the axis of the vocabulary in them.

    Args:
      token_embedder: Whose embedding a tied head shares.
      decoder: Has the model's config, and `logits_dense` unless the head is tied.
      arithmetic: In whose type they come.
    """
    if decoder.config.tied_head:
        return token_embedder.embedding.astype(arithmetic.dtype), 0
    return decoder.logits_dense.kernel.astype(arithmetic.dtype), 1


def head_logits(inputs: jax.Array, weights: tuple[jax.Array, int], arithmetic: Arithmetic) -> jax.Array:
    """Returns float32 logits, (..., vocabulary), of what the head multiplies, (..., width), and `head_weights`."""
    kernel, vocab_axis = weights
    return matrix_product(inputs, kernel if vocab_axis else kernel.T, arithmetic)


def exit_probability(classifier: nn.Dense, states: jax.Array) -> jax.Array:
    """Returns the probability of "exit", shape (...), of raw layer outputs, (..., width).

    The classifier reads a layer's output as it is, without the final norm, as the released T5X code does. One logit
    goes through a sigmoid (CALM, "Local confidence measures"), two through a softmax (T5X).
    """
    logits = classifier(widened(states))
    if classifier.features == 1:
        return jax.nn.sigmoid(logits[..., 0])
    return jax.nn.softmax(logits)[..., 1]
