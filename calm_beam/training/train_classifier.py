"""Training the exit classifier on the states of a model that stays as it is."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.arithmetic import Precision
from calm_beam.checkpoints import Arrays, FloatArrays
from calm_beam.decoding.device_groups import device_groups
from calm_beam.exits.measures.oracle import agreement
from calm_beam.model import ModelConfig, network_of
from calm_beam.model.heads import over_layers
from calm_beam.model.interface import EarlyExitModel, Taught
from calm_beam.model.numerics import widened
from calm_beam.training.logistic import ExitQuality, exit_quality

from .batches import Pair, choose_shapes, count_batches, end_pairs, make_batches, numbered_batches
from .config import ClassifierConfig
from .exit_objective import balanced_weights, decision_losses, geometric_weights, independent_weights
from .logistic import LogisticFit, Rows, fit_logistic
from .step import Parameters, variables

_KERNEL, _BIAS = "decoder/meta_cls/kernel", "decoder/meta_cls/bias"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedClassifier:
    """A model with a new exit classifier.

    Attributes:
      config: Sizes of the model.
      arrays: All weights by name; all but the classifier's are the arrays that were given.
      tokens: Target tokens learned from.
      newton_steps: Steps that the fit took.
      training_loss: The objective per target token, on the pairs learned from.
      validation_loss: The same on the validation pairs.
      quality: On the validation pairs, of every layer but the last.
    """

    config: ModelConfig
    arrays: Arrays
    tokens: int
    newton_steps: int
    training_loss: float
    validation_loss: float
    quality: tuple[ExitQuality, ...]


def train_classifier(
    config: ClassifierConfig,
    model_config: ModelConfig,
    *,
    arrays: Arrays,
    pairs: Sequence[Pair],
    validation_pairs: Sequence[Pair],
    end_id: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> TrainedClassifier:
    """Returns the model with a classifier that tells from a layer's output whether the last layer would agree.

    Inputs are the raw outputs of all layers but the last, teacher-forced on the references. The oracle's labels and the
    states come from the model as it decodes, without dropout (the released T5X code leaves dropout on for both).
    Since the model is frozen, they are computed once, and the classifier is fitted to them exactly, by Newton's method:
    there is one minimum, so no rate, schedule or best checkpoint has to be chosen.

    Args:
      config: Settings.
      model_config: Sizes of the model.
      arrays: Its weights by name; an exit classifier among them is replaced.
      pairs: Prompts and targets to learn from, as `train` takes them; at least one.
      validation_pairs: Pairs to measure the classifier on; at least one.
      end_id: As `train` takes it.
      on_progress: Takes the number of batches done, and of all; those of both sets.

    Raises:
      ValueError: If the decoder has one layer only, so that there is nothing to decide; if a state is not finite; or if
        classes are to be balanced where there is only one.

    Source: CALM, "Local confidence measures" (early exit classifier), and appendix "Training Details of the Early Exit
      Classifier".
    """
    if model_config.num_decoder_layers < 2:
        raise ValueError("an exit classifier needs a decoder of at least 2 layers, this one has 1.")
    with_classifier: ModelConfig = dataclasses.replace(cast(Any, model_config), exit_classifier=config.num_logits)
    frozen = {name: array for name, array in arrays.items() if name not in (_KERNEL, _BIAS)}
    precision = Precision(dtype=config.dtype)
    model = network_of(with_classifier, precision=precision)
    group, *_ = device_groups(model_config, model_parallelism=config.model_parallelism)
    parameters = {name: group.place(name, array, precision) for name, array in frozen.items()}
    lengths = {"max_input_length": config.max_input_length, "max_target_length": config.max_target_length}
    ended = end_pairs(pairs, model_config, end_id=end_id, **lengths)
    ended_validation = end_pairs(validation_pairs, model_config, end_id=end_id, **lengths)
    shapes = choose_shapes([*ended, *ended_validation], batch_tokens=config.batch_tokens, num_shapes=config.num_shapes)
    steps = min(config.steps, count_batches(ended, shapes))
    all_steps = steps + count_batches(ended_validation, shapes)

    decisions, tokens = [], 0
    for step, batch in itertools.islice(numbered_batches(ended, shapes, seed=config.seed), steps):
        with group.running():
            padded = _states_and_labels(model, parameters, batch=batch)
        states, agrees = (_unpadded(values, batch) for values in padded)
        decisions.append(_rows(config, states, agrees=agrees))
        tokens += agrees.shape[1]
        if on_progress is not None:
            on_progress(step, all_steps)
    if not any(each.weights.any() for each in decisions):
        raise ValueError(
            "there is nothing to balance: at every layer, all tokens agree with the last layer or none does."
        )
    fit = fit_logistic(decisions)
    classifier = _classifier_arrays(config, fit)
    training_loss = sum(_loss(classifier, each) for each in decisions) / tokens

    scores, labels, validation_loss = [], [], 0.0
    for step, batch in enumerate(make_batches(ended_validation, shapes), start=steps + 1):
        with group.running():
            padded_states, padded_agrees = _states_and_labels(model, parameters, batch=batch)
            padded_scores = _exit_scores(model, classifier, padded_states)
        labels.append(_unpadded(padded_agrees, batch))
        scores.append(_unpadded(padded_scores, batch))
        validation_loss += _loss(classifier, _rows(config, _unpadded(padded_states, batch), agrees=labels[-1]))
        if on_progress is not None:
            on_progress(step, all_steps)
    quality = exit_quality(np.concatenate(scores, axis=1), np.concatenate(labels, axis=1))
    return TrainedClassifier(
        config=with_classifier,
        arrays={**frozen, **classifier},
        tokens=tokens,
        newton_steps=fit.steps,
        training_loss=training_loss,
        validation_loss=validation_loss / sum(agrees.shape[1] for agrees in labels),
        quality=quality,
    )


def _states_and_labels(model: EarlyExitModel, parameters: Parameters, *, batch: Taught) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of all layers but the last, and whether each predicts what the last does, padding included.

    Shapes (layers - 1, rows, target, width), float32, and (layers - 1, rows, target).
    """
    states, agrees = _teacher_forced(model, parameters, batch)
    if not bool(jnp.all(jnp.isfinite(states))):
        raise ValueError("the model gives states that are not finite. Check the checkpoint.")
    return states, agrees


@functools.partial(jax.jit, static_argnums=(0,))
def _teacher_forced(model: EarlyExitModel, parameters: Parameters, batch: Taught) -> tuple[jax.Array, jax.Array]:
    apply = functools.partial(model.apply, variables(parameters))
    states = apply(batch, method="teacher_forced")
    last_tokens = jnp.argmax(apply(states[-1], len(states), method="head"), axis=-1)

    def agrees(state: jax.Array, *, layer: int) -> jax.Array:
        token = jnp.argmax(apply(state, layer, method="head"), axis=-1)
        agreed: jax.Array = agreement(token, last_tokens) > 0
        return agreed

    return widened(states[:-1]), over_layers(agrees, states[:-1], model.config)


@functools.partial(jax.jit, static_argnums=(0,))
def _exit_scores(model: EarlyExitModel, classifier: Parameters, states: jax.Array) -> jax.Array:
    """Returns the probabilities that serving would compute, shape of `states` without the width."""
    scores: jax.Array = model.apply(variables(classifier), states, method="exit_score")
    return scores


def _unpadded(values: jax.Array, batch: Taught) -> np.ndarray:
    """Returns the values at target tokens, without padding: [layers, rows, target, ...] -> [layers, tokens, ...]."""
    return np.asarray(values)[:, batch.is_target]


def _rows(config: ClassifierConfig, states: np.ndarray, *, agrees: np.ndarray) -> Rows:
    """Returns the decisions of one batch, [layers - 1, tokens, width] -> [rows, width]."""
    if config.objective == "geometric":
        weights = geometric_weights(agrees)
    else:
        weights = balanced_weights(agrees) if config.balance_classes else independent_weights(agrees)
    return Rows(features=states.reshape(-1, states.shape[-1]), labels=agrees.ravel(), weights=weights.ravel())


def _classifier_arrays(config: ClassifierConfig, fit: LogisticFit) -> dict[str, np.ndarray]:
    """Returns the fit as the model's parameters, rounded to the type they will be stored in."""
    kernel, bias = fit.kernel[:, None], np.array([fit.bias])
    if config.num_logits == 2:
        # The difference of the two logits is the log-odds, and gradient descent from 0 would split them evenly too.
        kernel, bias = np.concatenate([-kernel, kernel], axis=1) / 2, np.concatenate([-bias, bias]) / 2
    return {
        name: array.astype(config.stored_dtype).astype(np.float32) for name, array in ((_KERNEL, kernel), (_BIAS, bias))
    }


def _loss(classifier: FloatArrays, rows: Rows) -> float:
    """Returns the objective summed over some decisions, in float64."""
    logits = rows.features.astype(np.float64) @ classifier[_KERNEL] + classifier[_BIAS]
    margins = logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]
    return float(rows.weights @ decision_losses(margins, rows.labels))
