"""What every layer predicts of the tokens of outputs that are given."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.arithmetic import FLOAT32, Precision
from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.measures.softmax import softmax_gap
from calm_beam.model import architecture_of, network_of
from calm_beam.model.heads import over_layers
from calm_beam.model.interface import EarlyExitModel, Taught
from calm_beam.training.batches import choose_shapes, make_batches

from .suitability import LayerPredictions

_BATCH_TOKENS, _SHAPES = 2048, 3

_Pair = tuple[Sequence[int], Sequence[int]]


def layer_predictions(
    checkpoint: Checkpoint, pairs: Sequence[_Pair], *, precision: Precision = FLOAT32
) -> LayerPredictions:
    """Returns what every layer predicts of the targets' tokens, each given those before it.

    Args:
      checkpoint: The model.
      pairs: Prompts as decoding sees them, and outputs with their ends; at least one of each.
      precision: In which numbers the model computes.

    Raises:
      ValueError: If the model gives states that are not finite.
    """
    architecture = architecture_of(checkpoint.config)
    pairs = [(architecture.taught_source(prompt, output), output) for prompt, output in pairs]
    shapes = choose_shapes(pairs, batch_tokens=_BATCH_TOKENS, num_shapes=_SHAPES)
    model = network_of(checkpoint.config, precision=precision)
    parameters = jax.device_put({"params": checkpoint.parameters(precision)})
    parts: list[list[np.ndarray]] = [[], [], []]
    for batch in make_batches(pairs, shapes):
        made = _of_layers(model, parameters, batch)
        for part, values in zip(parts, made, strict=True):
            # [layers, rows, target] -> [layers, tokens]
            part.append(np.asarray(values)[:, batch.is_target])
    tokens, gaps, cross_entropies = (np.concatenate(part, axis=1) for part in parts)
    if not np.isfinite(cross_entropies).all():
        raise ValueError("the model gives logits that are not finite. Check the checkpoint.")
    return LayerPredictions(tokens=tokens, gaps=gaps, cross_entropies=cross_entropies.astype(np.float64).mean(axis=1))


@functools.partial(jax.jit, static_argnums=0)
def _of_layers(model: EarlyExitModel, parameters: Any, batch: Taught) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns predicted tokens, gaps and cross-entropies, each (layers, rows, target)."""
    apply = functools.partial(model.apply, parameters)
    states = apply(batch, method="teacher_forced")

    def of_layer(state: jax.Array, *, layer: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = apply(state, layer, method="head")
        given = jnp.take_along_axis(logits, jnp.asarray(batch.targets)[..., None], axis=-1)[..., 0]
        return jnp.argmax(logits, axis=-1), softmax_gap(logits), jax.nn.logsumexp(logits, axis=-1) - given

    of_all: tuple[jax.Array, jax.Array, jax.Array] = over_layers(of_layer, states, model.config)
    return of_all
