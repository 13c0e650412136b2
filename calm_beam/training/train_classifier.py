"""Training of the exit classifier on the states of a frozen model.

Its objectives are weighted sums of binary cross-entropies, one per token and layer: the classifier predicts "exit" or
"don't exit", and the oracle is whether the layer predicts the same token as the last one. An objective defines the
weight of each decision in the loss.

The fit is weighted logistic regression by Newton's method. The loss is convex with a few hundred weights: a handful of
Newton steps reach its only minimum, without a learning rate, whatever the scales of the features. The result reports
how well the classifier separates layers that agree with the last one from those that do not.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.stats

from calm_beam.checkpoints import Arrays, FloatArrays
from calm_beam.decoding.device_groups import device_groups
from calm_beam.exits.measures.built_in import agreement
from calm_beam.model import ModelConfig, network_of
from calm_beam.model.heads import over_layers
from calm_beam.model.interface import EarlyExitModel, Taught
from calm_beam.model.numerics import widened
from calm_beam.precision import Precision

from .batches import Pair, choose_shapes, count_batches, end_pairs, make_batches, numbered_batches
from .config import ClassifierConfig
from .step import Parameters, variables

# Makes the minimum unique, even if the classes can be separated or there is only one.
_RIDGE = 1e-6
# In nats; half the Newton decrement bounds the distance of the loss from its minimum.
_TOLERANCE = 1e-9
_MOST_STEPS = 50
_SMALLEST_STEP = 2.0**-20


def independent_weights(agrees: np.ndarray) -> np.ndarray:
    """Returns weights by which every layer counts equally, whatever the layers below it have predicted.

    Args:
      agrees: bool, shape (layers - 1, tokens). Whether each layer except the last predicts the last one's token.

    Returns:
      float64, shape of `agrees`. The weighted sum over layers of a token's losses is their average.

    Source: CALM, "Local confidence measures" (early exit classifier), and appendix "Training Details of the Early Exit
      Classifier" (unweighted average across layers).
    """
    return np.full(agrees.shape, 1 / len(agrees))


def balanced_weights(agrees: np.ndarray) -> np.ndarray:
    """Returns independent weights times 1 - the share of the decision's class, within each layer.

    Args:
      agrees: bool, shape (layers - 1, tokens), of one batch. Whether each layer predicts the last one's token.

    Returns:
      float64, shape of `agrees`. A layer where all tokens agree, or none does, gives no information: weights are 0.

    Source: the released T5X code, `contrib/calm/models.py`; the paper does not mention it.
    """
    share = agrees.mean(axis=1, keepdims=True)
    weights: np.ndarray = independent_weights(agrees) * np.where(agrees, 1 - share, share)
    return weights


def geometric_weights(agrees: np.ndarray) -> np.ndarray:
    """Returns weights by which a token's loss is minus the log-probability of exiting where the oracle first would.

    That is the sum of log "don't exit" over all layers below, and of log "exit" at the layer itself. The last layer
    always agrees, and nothing is decided there, so it adds no term (in the released T5X code it does).

    Args:
      agrees: bool, shape (layers - 1, tokens). Whether each layer predicts the last one's token.

    Returns:
      float64, shape of `agrees`: 1 up to the first layer that agrees, 0 above.

    Source: Elbayad et al. (2020), section 3.2 (geometric-like); CALM, appendix "Training Details of the Early Exit
      Classifier".
    """
    earlier = np.cumsum(agrees, axis=0) - agrees
    return np.asarray(earlier == 0, np.float64)


def decision_losses(margins: np.ndarray, agrees: np.ndarray) -> np.ndarray:
    """Returns the binary cross-entropy of every decision.

    Args:
      margins: float64, any shape. Log-odds of "exit".
      agrees: bool, same shape. The right decisions.

    Returns:
      float64, same shape, in nats.
    """
    return np.logaddexp(0.0, np.where(agrees, -margins, margins))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a regression.

    Attributes:
      features: float32, shape (rows, width).
      labels: bool, shape (rows,).
      weights: float64, shape (rows,), at least 0.
    """

    features: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticFit:
    """Fitted log-odds of a label: features @ kernel + bias.

    Attributes:
      kernel: float64, shape (width,).
      bias: The intercept.
      steps: Number of Newton steps.
    """

    kernel: np.ndarray
    bias: float
    steps: int


def fit_logistic(batches: Sequence[Rows]) -> LogisticFit:
    """Returns the weights with the least weighted mean cross-entropy.

    Features are standardised for the fit; the result applies to the original features.

    Args:
      batches: All rows; at least one row has a positive weight, and all features are finite.

    Source: iteratively reweighted least squares, that is Newton's method, with step halving.
    """
    center, scale = _moments(batches)
    total = sum(batch.weights.sum() for batch in batches)
    weights = np.zeros(len(center) + 1)
    loss, gradient, hessian = _derivatives(batches, weights, center=center, scale=scale, total=total)
    steps = 0
    while steps < _MOST_STEPS:
        direction = scipy.linalg.solve(hessian, gradient, assume_a="pos")
        decrement = gradient @ direction
        if decrement / 2 <= _TOLERANCE:
            break
        size = 1.0
        while size >= _SMALLEST_STEP:
            candidate = weights - size * direction
            new = _derivatives(batches, candidate, center=center, scale=scale, total=total)
            if new[0] <= loss - 1e-4 * size * decrement:
                break
            size /= 2
        weights, (loss, gradient, hessian) = candidate, new
        steps += 1
    kernel = weights[:-1] / scale
    return LogisticFit(kernel=kernel, bias=float(weights[-1] - center @ kernel), steps=steps)


def _moments(batches: Sequence[Rows]) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation of every feature; 1 if it does not vary."""
    rows = sum(len(batch.features) for batch in batches)
    center = sum(batch.features.sum(axis=0, dtype=np.float64) for batch in batches) / rows
    variance = sum(np.square(batch.features - center).sum(axis=0) for batch in batches) / rows
    return center, np.where(variance > 0, np.sqrt(variance), 1.0)


def _derivatives(
    batches: Sequence[Rows], weights: np.ndarray, *, center: np.ndarray, scale: np.ndarray, total: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """Returns the loss at given weights of the standardised features and a constant, its gradient and its Hessian."""
    loss, gradient, hessian = 0.0, np.zeros_like(weights), np.zeros((len(weights), len(weights)))
    for batch in batches:
        inputs = np.concatenate([(batch.features - center) / scale, np.ones((len(batch.features), 1))], axis=1)
        margins = inputs @ weights
        probabilities = 0.5 * (1 + np.tanh(margins / 2))
        loss += batch.weights @ decision_losses(margins, batch.labels)
        gradient += (batch.weights * (probabilities - batch.labels)) @ inputs
        curvature = batch.weights * probabilities * (1 - probabilities)
        hessian += inputs.T @ (curvature[:, None] * inputs)
    # The penalty is on the mean loss.
    loss = loss / total + _RIDGE / 2 * (weights @ weights)
    return loss, gradient / total + _RIDGE * weights, hessian / total + _RIDGE * np.eye(len(weights))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitQuality:
    """The classifier's quality at one layer.

    Attributes:
      agreeing: Share of tokens for which the layer predicts the last one's token.
      f1: F1 of "don't exit", from `f1_not_exiting`.
      auc: Area under the ROC curve, from `area_under_curve`.
    """

    agreeing: float
    f1: float
    auc: float


def exit_quality(scores: np.ndarray, agrees: np.ndarray) -> tuple[ExitQuality, ...]:
    """Returns the quality at every layer except the last.

    Args:
      scores: Shape (layers - 1, tokens), at least one token. The classifier's probabilities of "exit".
      agrees: bool, same shape. Whether the layer predicts the last one's token.
    """
    return tuple(
        ExitQuality(
            agreeing=float(labels.mean()), f1=f1_not_exiting(values, labels), auc=area_under_curve(values, labels)
        )
        for values, labels in zip(scores, agrees, strict=True)
    )


def f1_not_exiting(scores: np.ndarray, agrees: np.ndarray) -> float:
    """Returns the F1 of "don't exit" (score below 1/2) against the oracle (the layer disagrees with the last).

    Args:
      scores: Shape (tokens,).
      agrees: bool, shape (tokens,).

    Returns:
      2 TP / (2 TP + FP + FN), in [0, 1]; NaN if no token disagrees and none is predicted to.

    Source: CALM, appendix "Training Details of the Early Exit Classifier" (table of F1 scores).

    >>> f1_not_exiting(np.array([0.1, 0.2, 0.7, 0.9]), np.array([False, True, False, True]))
    0.5
    """
    stays = scores < 0.5
    hits = np.count_nonzero(stays & ~agrees)
    named = np.count_nonzero(stays) + np.count_nonzero(~agrees)
    return float(2 * hits / named) if named else float("nan")


def area_under_curve(scores: np.ndarray, agrees: np.ndarray) -> float:
    """Returns the probability that a token that agrees scores higher than one that does not; ties count half.

    Args:
      scores: Shape (tokens,).
      agrees: bool, shape (tokens,).

    Returns:
      In [0, 1]; NaN if all tokens agree or none does.

    Source: Mann-Whitney U.

    >>> area_under_curve(np.array([0.1, 0.2, 0.7, 0.9]), np.array([False, True, False, True]))
    0.75
    """
    positives = np.count_nonzero(agrees)
    pairs = positives * (len(agrees) - positives)
    if not pairs:
        return float("nan")
    ranks = scipy.stats.rankdata(scores)
    return float((ranks[agrees].sum() - positives * (positives + 1) / 2) / pairs)


_KERNEL, _BIAS = "decoder/meta_cls/kernel", "decoder/meta_cls/bias"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedClassifier:
    """A model with a new exit classifier.

    Attributes:
      config: Sizes of the model.
      arrays: All weights by name; all except the classifier's are the given arrays.
      tokens: Number of target tokens in training.
      newton_steps: Number of Newton steps of the fit.
      training_loss: The objective per target token, on the training pairs.
      validation_loss: The objective per target token, on the validation pairs.
      quality: Quality on the validation pairs, for every layer except the last.
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
    """Returns the model with a classifier that predicts from a layer's output whether the last layer would agree.

    Inputs are the raw outputs of all layers except the last, teacher-forced on the references. The oracle's labels and
    the states come from the model as it decodes, without dropout (the released T5X code leaves dropout on for both).
    Since the model is frozen, they are computed once, and the classifier is fitted to them exactly, by Newton's method:
    there is one minimum, so no rate, schedule or best checkpoint needs choosing.

    Args:
      config: Settings.
      model_config: Sizes of the model.
      arrays: Its weights by name; an exit classifier among them is replaced.
      pairs: Training prompts and targets, in the form that `train` takes; at least one.
      validation_pairs: Pairs on which the classifier is measured; at least one.
      end_id: End token of every target; None for the first of the model's end-of-sequence ids.
      on_progress: Called with the number of finished batches and of all batches, of both sets.

    Raises:
      ValueError: If the decoder has only one layer, so that there is nothing to decide; if a state is not finite; or if
        classes are to be balanced and there is only one.

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
    """Returns the outputs of all layers except the last, and whether each predicts the last one's token, with padding.

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
    """Returns the fit as the model's parameters, rounded to the type in which they will be stored."""
    kernel, bias = fit.kernel[:, None], np.array([fit.bias])
    if config.num_logits == 2:
        # The difference of the two logits is the log-odds; gradient descent from 0 would also split them evenly.
        kernel, bias = np.concatenate([-kernel, kernel], axis=1) / 2, np.concatenate([-bias, bias]) / 2
    return {
        name: array.astype(config.stored_dtype).astype(np.float32) for name, array in ((_KERNEL, kernel), (_BIAS, bias))
    }


def _loss(classifier: FloatArrays, rows: Rows) -> float:
    """Returns the objective summed over some decisions, in float64."""
    logits = rows.features.astype(np.float64) @ classifier[_KERNEL] + classifier[_BIAS]
    margins = logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]
    return float(rows.weights @ decision_losses(margins, rows.labels))
