"""How good a model is on pairs that it does not learn from."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.model.heads import over_layers
from calm_beam.model.interface import EarlyExitModel, Taught

from .batches import BatchShape, Pair, make_batches
from .objective import token_cross_entropy_sums
from .step import Parameters, variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """What was measured after a step.

    Attributes:
      losses: Mean cross-entropy per target token of every decoder layer, in nats; dropout, label smoothing and z-loss
        are off.
      score: Mean score of the full model's outputs, more is better; None where models are compared by loss.
    """

    losses: tuple[float, ...]
    score: float | None = None

    def is_better_than(self, other: "Validation") -> bool:
        """Returns whether the score is higher, or without scores the last layer's loss lower; ties are not better."""
        if self.score is not None and other.score is not None:
            return self.score > other.score
        return self.losses[-1] < other.losses[-1]


def validation_losses(
    model: EarlyExitModel, parameters: Parameters, *, pairs: Sequence[Pair], shapes: Sequence[BatchShape]
) -> tuple[float, ...]:
    """Returns each layer's mean cross-entropy per target token.

    Args:
      model: Sizes.
      parameters: Weights by name.
      pairs: From `end_pairs`; at least one.
      shapes: From `choose_shapes`, for these pairs among others.
    """
    sums, tokens = np.zeros(model.config.num_decoder_layers), 0
    for batch in make_batches(pairs, shapes):
        sums += np.asarray(_cross_entropy_sums(model, parameters, batch), np.float64)
        tokens += batch.num_target_tokens
    return tuple((sums / tokens).tolist())


@functools.partial(jax.jit, static_argnums=(0,))
def _cross_entropy_sums(model: EarlyExitModel, parameters: Parameters, batch: Taught) -> jax.Array:
    """Returns each layer's cross-entropy summed over a batch, shape (layers,)."""
    apply = functools.partial(model.apply, variables(parameters))
    states = apply(batch, method="teacher_forced")

    def of_layer(state: jax.Array, *, layer: int) -> jax.Array:
        logits = apply(state[None], layer, method="head")
        return token_cross_entropy_sums(logits, jnp.asarray(batch.targets), is_target=batch.is_target)[0]

    sums: jax.Array = over_layers(of_layer, states, model.config)
    return sums
