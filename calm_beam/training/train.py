"""The training loop."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax

from calm_beam.model import EarlyExitT5, T5Config, parameter_shapes

from .batches import Batch, BatchShape, Pair, choose_shapes, end_pairs, make_batches
from .initialize import initialize_parameters
from .objective import layer_weighted_loss, sample_layers, token_cross_entropy_sums
from .optimizer import OptimizerConfig, make_optimizer

Parameters = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of a training run.

    Attributes:
      steps: Optimiser steps; as many epochs as they need.
      batch_tokens: Tokens of a batch on its wider side, padding included.
      num_shapes: Most batch shapes, each of which is compiled once.
      max_input_length: Most source tokens, eos included; longer sources are cut.
      max_target_length: Most target tokens, eos included; longer targets are cut.
      dropout_rate: Share of activations dropped, in [0, 1).
      sampled_layers: Lower decoder layers whose loss a step computes beside the last, drawn anew for each step so that
        the loss is unbiased; 0 computes all.
      seed: Decides initial weights, batches, sampled layers and dropout.
      progress_every: Steps between two calls of the progress callback.
      validate_every: Steps between two validations; 0 validates only at the end.
      optimizer: Rates and momenta.
    """

    steps: int
    batch_tokens: int = 1500
    num_shapes: int = 6
    max_input_length: int = 128
    max_target_length: int = 128
    dropout_rate: float = 0.1
    sampled_layers: int = 2
    seed: int = 0
    progress_every: int = 10
    validate_every: int = 0
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "num_shapes", "progress_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("max_input_length", "max_target_length"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2 (one token and eos), got {getattr(self, name)}.")
        for name in ("sampled_layers", "seed", "validate_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(f"dropout_rate must be in [0, 1), got {self.dropout_rate}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands.

    Attributes:
      step: Steps done.
      loss: Mean training loss over the steps since the last report, dropout on; an estimate if layers are sampled.
      target_tokens: Target tokens seen so far, eos included, padding not.
      validation_losses: Mean cross-entropy per target token of every decoder layer, dropout off, or None where this
        report comes without a validation.
    """

    step: int
    loss: float
    target_tokens: int
    validation_losses: tuple[float, ...] | None = None


def train(
    config: TrainingConfig,
    model_config: T5Config,
    pairs: Sequence[Pair],
    validation_pairs: Sequence[Pair],
    *,
    initial: Mapping[str, np.ndarray] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, np.ndarray]:
    """Returns the weights of a model trained with the layer-weighted loss.

    Args:
      config: Settings of the run.
      model_config: Sizes of the model.
      pairs: Source and target ids to learn from, without eos.
      validation_pairs: Pairs to measure the loss of every layer on; may be empty, then nothing is measured.
      initial: Weights to start from, names and shapes as in `parameter_shapes`; None starts anew. An exit classifier
        among them is returned as it was.
      on_progress: Called every `config.progress_every` steps, at every validation, and after the last step.

    Returns:
      float32 arrays by name, names and shapes as in `parameter_shapes`.

    Raises:
      ValueError: If there are no pairs, an id is outside the model's vocabulary, or `initial` does not fit the model.
      FloatingPointError: If the loss is no longer finite; seen when progress is reported.

    Source: CALM, section "Training early exit classifiers for local consistency".
    """
    _check_inputs(model_config, pairs, validation_pairs, initial)
    cut = functools.partial(
        end_pairs, max_input_length=config.max_input_length, max_target_length=config.max_target_length
    )
    pairs, validation_pairs = cut(pairs), cut(validation_pairs)
    shapes = choose_shapes([*pairs, *validation_pairs], batch_tokens=config.batch_tokens, num_shapes=config.num_shapes)
    # Streams of their own: another number of sampled layers must not change the batches.
    weights_rng, batches_rng, layers_rng = np.random.default_rng(config.seed).spawn(3)
    start = initialize_parameters(model_config, generator=weights_rng) if initial is None else initial
    # Copies, since the buffers are given away below.
    parameters = {name: jnp.array(array, jnp.float32, copy=True) for name, array in start.items()}
    model = EarlyExitT5(model_config, dropout_rate=config.dropout_rate)
    state = _initial_state(config.optimizer, config.steps, parameters)
    key = jax.random.key(config.seed)

    target_tokens, losses = 0, []
    for step, batch in zip(range(1, config.steps + 1), _endless(pairs, shapes, batches_rng), strict=False):
        layers, weights = sample_layers(
            model_config.num_decoder_layers, sampled_layers=config.sampled_layers, generator=layers_rng
        )
        loss, gradients = _loss_and_gradients(
            model,
            parameters,
            (batch.source_tokens, batch.decoder_inputs, batch.targets),
            layers,
            weights.astype(np.float32),
            jax.random.fold_in(key, step),
        )
        parameters, state = _update(config.optimizer, config.steps, parameters, state, gradients)
        losses.append(loss)
        target_tokens += batch.num_target_tokens
        is_last = step == config.steps
        validates = is_last or (config.validate_every > 0 and step % config.validate_every == 0)
        if validates or step % config.progress_every == 0:
            mean_loss = float(np.mean(jax.device_get(losses)))
            losses.clear()
            if not np.isfinite(mean_loss):
                raise FloatingPointError(
                    f"the training loss is {mean_loss} at step {step}. Lower the learning rates, or start from other "
                    "weights."
                )
            if on_progress is not None:
                measured = None
                if validates and validation_pairs:
                    measured = _validation_losses(model, parameters, validation_pairs, shapes)
                on_progress(
                    Progress(step=step, loss=mean_loss, target_tokens=target_tokens, validation_losses=measured)
                )
    return {name: np.asarray(array) for name, array in jax.device_get(parameters).items()}


def _endless(pairs: Sequence[Pair], shapes: Sequence[BatchShape], generator: np.random.Generator) -> Iterator[Batch]:
    """Yields the batches of epoch after epoch, each shuffled anew."""
    while True:
        yield from make_batches(pairs, shapes, generator=generator)


@functools.partial(jax.jit, static_argnums=(0,))
def _loss_and_gradients(
    model: EarlyExitT5,
    parameters: Parameters,
    batch: tuple[jax.Array, jax.Array, jax.Array],
    layers: jax.Array,
    weights: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, Parameters]:
    """Returns the loss over the given layers, counted from 1, and its gradient.

    Compiled once per batch shape; the update, which would take as long to compile, is compiled apart and only once.
    """
    source_tokens, decoder_inputs, targets = batch

    def loss_of(parameters: Parameters) -> jax.Array:
        apply = functools.partial(model.apply, _tree(parameters))
        # Two keys: the head's dropout must not repeat the stack's.
        stack_key, head_key = jax.random.split(key)
        states = apply(
            source_tokens,
            decoder_inputs,
            deterministic=False,
            rngs={"dropout": stack_key},
            method="decode_teacher_forced",
        )
        # [layers, batch, target, width] -> [some layers, batch, target, vocabulary]
        logits = apply(states[layers - 1], deterministic=False, rngs={"dropout": head_key}, method="head")
        return layer_weighted_loss(logits, targets, weights)

    return jax.value_and_grad(loss_of)(parameters)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _initial_state(config: OptimizerConfig, steps: int, parameters: Parameters) -> Any:
    """Returns the optimiser's state before the first of `steps` steps."""
    return make_optimizer(config, steps=steps).init(parameters)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _update(
    config: OptimizerConfig, steps: int, parameters: Parameters, state: Any, gradients: Parameters
) -> tuple[Parameters, Any]:
    """Returns parameters and state after a step; the old ones are given away."""
    updates, state = make_optimizer(config, steps=steps).update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state


def _validation_losses(
    model: EarlyExitT5, parameters: Parameters, pairs: Sequence[Pair], shapes: Sequence[BatchShape]
) -> tuple[float, ...]:
    """Returns each layer's mean cross-entropy per target token."""
    sums, tokens = np.zeros(model.config.num_decoder_layers), 0
    for batch in make_batches(pairs, shapes):
        arrays = (batch.source_tokens, batch.decoder_inputs, batch.targets)
        sums += np.asarray(_cross_entropy_sums(model, parameters, arrays), np.float64)
        tokens += batch.num_target_tokens
    return tuple((sums / tokens).tolist())


@functools.partial(jax.jit, static_argnums=(0,))
def _cross_entropy_sums(
    model: EarlyExitT5, parameters: Parameters, batch: tuple[jax.Array, jax.Array, jax.Array]
) -> jax.Array:
    """Returns each layer's cross-entropy summed over a batch, shape (layers,)."""
    source_tokens, decoder_inputs, targets = batch
    apply = functools.partial(model.apply, _tree(parameters))
    states = apply(source_tokens, decoder_inputs, method="decode_teacher_forced")
    # One layer after the other: the logits of all at once would be most of the memory.
    return jax.lax.map(lambda state: token_cross_entropy_sums(apply(state[None], method="head"), targets)[0], states)


def _tree(parameters: Parameters) -> dict[str, Any]:
    return {"params": flax.traverse_util.unflatten_dict(parameters, sep="/")}


def _check_inputs(
    model_config: T5Config,
    pairs: Sequence[Pair],
    validation_pairs: Sequence[Pair],
    initial: Mapping[str, np.ndarray] | None,
) -> None:
    if not pairs:
        raise ValueError("pairs must hold at least one pair, got none.")
    # An id beyond the embedding would silently read its last row.
    for name, group in (("pairs", pairs), ("validation_pairs", validation_pairs)):
        for index, pair in enumerate(group):
            outside = [token for side in pair for token in side if not 0 < token < model_config.vocab_size]
            if outside:
                raise ValueError(
                    f"{name}[{index}] has id {outside[0]}; ids must be in [1, {model_config.vocab_size}), the model's "
                    "vocabulary without padding."
                )
    if initial is not None:
        expected = parameter_shapes(model_config)
        found = {name: tuple(array.shape) for name, array in initial.items()}
        if found != expected:
            wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            raise ValueError(
                f"initial must hold the {len(expected)} arrays of the model; {', '.join(wrong[:4])} "
                f"{'is' if len(wrong) == 1 else 'are'} missing, unknown or of another shape."
            )
