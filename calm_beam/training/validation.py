"""Validation of a model on held-out pairs, by its losses or by its generated outputs.

The paper chooses its checkpoints by the full model's predictions.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import Arrays, Checkpoint
from calm_beam.decoding.branches import Branch
from calm_beam.decoding.decoder import Decoder
from calm_beam.exits.rule import ExitRule
from calm_beam.metrics import NO_SETTINGS, MetricSettings
from calm_beam.metrics.registry import checked_score, get_metric
from calm_beam.model import ModelConfig
from calm_beam.model.heads import over_layers
from calm_beam.model.interface import EarlyExitModel, Taught
from calm_beam.precision import Precision
from calm_beam.training.batches import BatchShape, Pair, make_batches
from calm_beam.training.config import TrainingConfig
from calm_beam.training.step import Parameters, token_cross_entropy_sums, variables

_BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """The measurements after a step.

    Attributes:
      losses: Mean cross-entropy per target token of every decoder layer, in nats; dropout, label smoothing and z-loss
        are off.
      score: Mean score of the full model's outputs, higher is better; None if models are compared by loss.
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
      model: The model, for its sizes.
      parameters: Weights by name.
      pairs: Pairs from `end_pairs`; at least one.
      shapes: Shapes from `choose_shapes`, for at least these pairs.
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


class GenerationScore:
    """The mean score of the full model's greedy outputs, always on the same prompts."""

    def __init__(
        self,
        metric: str,
        model_config: ModelConfig,
        *,
        config: TrainingConfig,
        prompts: Sequence[Sequence[int]],
        references: Sequence[Sequence[str]],
        decode: Callable[[Sequence[int]], str],
        metric_settings: MetricSettings = NO_SETTINGS,
    ) -> None:
        """Prepares the score.

        Args:
          metric: Its name, as `get_metric` takes it.
          model_config: Sizes of the models to score.
          config: Training settings: the maximum length of outputs, and the compute type.
          prompts: At least one, encoded as in decoding.
          references: Right answers to each prompt.
          decode: Turns token ids into text.
          metric_settings: Settings of the metric.

        Raises:
          ValueError: If the metric is unknown, or lacks something it needs.
        """
        self.name = f"{metric} of {len(prompts)} outputs"
        self._metric_name, self._metric = metric, get_metric(metric, metric_settings)
        self._model_config, self._config = model_config, config
        self._prompts, self._references = prompts, references
        self._decode = decode

    def __call__(self, arrays: Arrays) -> float:
        """Returns the score, in [0, 1], of the model with the given weights.

        Raises:
          MetricError: If the metric fails on an output; names the prompt's index.
        """
        nowhere = pathlib.Path()
        model = Checkpoint(
            config=self._model_config, arrays=arrays, directory=nowhere, vocabulary_path=None, layout="native"
        )
        decoder = Decoder(
            model,
            # The full model tests no exits; `state` is the cheapest measure.
            [Branch.at(ExitRule(confidence="state"), None, max_decode_length=self._config.max_target_length)],
            max_input_length=max(map(len, self._prompts)),
            batch_size=min(_BATCH_SIZE, len(self._prompts)),
            precision=Precision(dtype=self._config.dtype),
            model_parallelism=self._config.model_parallelism,
        )
        scores = []
        for index, result in decoder.decode(self._prompts):
            text = self._decode(result.tokens[0, : result.lengths[0]].tolist())
            references, place = self._references[index], f"validation row {index + 1}"
            scores.append(
                checked_score(self._metric, self._metric_name, candidate=text, references=references, example_id=place)
            )
        # Outputs end in any order.
        return math.fsum(scores) / len(scores)
