"""One training step: the layer-weighted loss, its gradient, and the optimiser's update.

The loss is the cross-entropy of every decoder layer's prediction, weighted towards the last. The optimisers are Muon
on the matrices of the layers with Adam on all other weights, or Adafactor on everything.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from calm_beam.model.heads import has_own_exits, own_parameters
from calm_beam.model.interface import EarlyExitModel, Taught
from calm_beam.model.partitioning import divided, spread, whole
from calm_beam.model.sharding import Division

from .config import LAYER_WEIGHTS, AdafactorConfig, MuonConfig, OptimizerConfig


def layer_weights(num_layers: int, weighting: str = "linear") -> np.ndarray:
    """Returns the share of each decoder layer in the loss.

    Args:
      num_layers: Decoder depth L, at least 1.
      weighting: `linear` (w_i = i / sum_j j, the paper's choice), `uniform` (1 / L) or `exponential` (each layer twice
        the one below).

    Returns:
      float64, shape (num_layers,), not decreasing, with sum 1.

    Raises:
      ValueError: If `num_layers` is below 1, or the weighting is unknown.

    Source: CALM, section "Training early exit classifiers for local consistency" (weighted sum of layer losses); the
    others are those that the released T5X code offers in addition (`aggregation_weights` 0 and -1).

    >>> layer_weights(4)
    array([0.1, 0.2, 0.3, 0.4])
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}.")
    layers = np.arange(1, num_layers + 1, dtype=np.float64)
    weights: np.ndarray
    if weighting == "linear":
        weights = layers
    elif weighting == "uniform":
        weights = np.ones(num_layers)
    elif weighting == "exponential":
        weights = 2.0 ** (layers - num_layers)
    else:
        raise ValueError(f"layer_weights must be one of {', '.join(LAYER_WEIGHTS)}; got {weighting!r}.")
    normalized: np.ndarray = weights / weights.sum()
    return normalized


def all_layers(num_layers: int, weighting: str = "linear") -> tuple[np.ndarray, np.ndarray]:
    """Returns all layers, counted from 1, and their weights: the loss is then exact."""
    return np.arange(1, num_layers + 1, dtype=np.int32), layer_weights(num_layers, weighting)


def sampled_weights(
    num_layers: int, lower_layers: np.ndarray, *, weighting: str = "linear"
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layers of an estimate of the loss and their weights: some lower layers, and always the last.

    Each sampled lower layer represents (L - 1) / k of them. When every set of k lower layers is equally likely, the
    weighted sum is an unbiased estimate of the exact loss, and so is its gradient.

    Args:
      num_layers: Decoder depth L.
      lower_layers: shape (k,), k at least 1. Distinct layers in [1, L - 1].
      weighting: One of the weightings of `layer_weights`.

    Returns:
      Layers, int32, and weights, float64; both of shape (k + 1,), the last layer at the end.

    >>> sampled_weights(4, np.array([1, 3]))
    (array([1, 3, 4], dtype=int32), array([0.15, 0.45, 0.4 ]))
    """
    exact = layer_weights(num_layers, weighting)
    scale = (num_layers - 1) / len(lower_layers)
    layers = np.append(lower_layers, num_layers).astype(np.int32)
    return layers, np.append(exact[lower_layers - 1] * scale, exact[-1])


def sample_layers(
    num_layers: int, *, sampled_layers: int, generator: np.random.Generator, weighting: str = "linear"
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layers whose loss one step computes, and their weights.

    Args:
      num_layers: Decoder depth L.
      sampled_layers: Lower layers to draw, in addition to the last. 0, L - 1 or more takes all of them exactly.
      generator: Source of the draw; not used when the loss is exact.
      weighting: One of the weightings of `layer_weights`.

    Returns:
      Layers, int32, counted from 1, and weights, float64, of the same shape.
    """
    if sampled_layers == 0 or sampled_layers >= num_layers - 1:
        return all_layers(num_layers, weighting)
    lower = 1 + generator.choice(num_layers - 1, size=sampled_layers, replace=False)
    return sampled_weights(num_layers, lower, weighting=weighting)


def rotating_layers(
    num_layers: int, *, every: int, step: int, weighting: str = "linear"
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layers whose loss one step computes when layers take turns, and their weights.

    Each lower layer has a turn in one of every R steps, with R times its weight: over R steps, the weights add up to
    those of the exact loss. The last layer is in every step.

    Args:
      num_layers: Decoder depth L.
      every: R, at least 1: lower layers are R apart.
      step: Number of the step, from 1.
      weighting: One of the weightings of `layer_weights`.

    Returns:
      Layers, int32, counted from 1, and weights, float64, of the same shape.

    Source: LayerSkip (Elhoushi et al., 2024), section "Early Exit Loss": the rotational curriculum.

    >>> [rotating_layers(4, every=2, step=step)[0].tolist() for step in (1, 2, 3)]
    [[1, 3, 4], [2, 4], [1, 3, 4]]
    """
    lower = np.arange(1, num_layers, dtype=np.int32)
    lower = lower[(lower - step) % every == 0]
    exact = layer_weights(num_layers, weighting)
    return np.append(lower, np.int32(num_layers)), np.append(exact[lower - 1] * every, exact[-1])


def token_cross_entropy_sums(
    logits: jax.Array, targets: jax.Array, *, is_target: jax.Array, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> jax.Array:
    """Returns the cross-entropy of each layer's predictions, summed over the target tokens that are not padding.

    Args:
      logits: float32, shape (layers, batch, target, vocabulary), at least 2 ids.
      targets: int32, shape (batch, target).
      is_target: bool, shape (batch, target). False for padding, whatever its ids.
      label_smoothing: Probability, in [0, 1), that is moved from the target evenly to all other ids. The
        entropy of that distribution is subtracted, so that the least possible loss is 0.
      z_loss: Weight of every token's squared log-normalizer in the loss, which keeps logits from drifting.

    Returns:
      float32, shape (layers,), in nats.

    Source: T5X `losses.py` (label smoothing with its normalizing constant, z-loss).
    """
    vocabulary = logits.shape[-1]
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    # Comparing costs more than picking the entry, but its gradient fuses with that of the softmax; the gradient of
    # picking is a scatter, which on CPU is a slow loop.
    is_its_id = jnp.arange(vocabulary, dtype=targets.dtype)[None, None] == targets[..., None]
    target_logit = jnp.sum(jnp.where(is_its_id[None], logits, np.float32(0)), axis=-1)
    expected_logit, entropy = target_logit, 0.0
    if label_smoothing:
        other = label_smoothing / (vocabulary - 1)
        expected_logit = (1 - label_smoothing - other) * target_logit + other * jnp.sum(logits, axis=-1)
        entropy = -(1 - label_smoothing) * math.log(1 - label_smoothing) - label_smoothing * math.log(other)
    losses = log_normalizer - expected_logit - entropy
    if z_loss:
        losses = losses + z_loss * jnp.square(log_normalizer)
    # [layers, batch, target] -> [layers]
    return jnp.sum(jnp.where(is_target[None], losses, np.float32(0)), axis=(1, 2))


def layer_weighted_loss(
    logits: jax.Array,
    targets: jax.Array,
    *,
    is_target: jax.Array,
    weights: jax.Array,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """Returns the weighted sum over layers of the mean cross-entropy per target token.

    Args:
      logits: float32, shape (layers, batch, target, vocabulary), for all layers or a sample of them.
      targets: int32, shape (batch, target).
      is_target: bool, shape (batch, target). Padding does not count, in the sum or in the number of tokens.
      weights: float32, shape (layers,), from `all_layers` or `sample_layers`.
      label_smoothing: Probability, in [0, 1), that is moved from the target evenly to all other ids.
      z_loss: Weight of every token's squared log-normalizer in the loss.

    Returns:
      float32, a scalar, in nats; 0 if there is no target token.

    Source: CALM, section "Training early exit classifiers for local consistency".
    """
    tokens = jnp.maximum(jnp.sum(is_target, dtype=jnp.int32), 1).astype(jnp.float32)
    sums = token_cross_entropy_sums(
        logits, targets, is_target=is_target, label_smoothing=label_smoothing, z_loss=z_loss
    )
    return jnp.sum(weights * sums) / tokens


Parameters = dict[str, jax.Array]
_UNDIVIDED = Division()
_LAYER_KERNEL = re.compile(r"(encoder|decoder)/layers_\d+/.*/kernel")
_FROZEN = re.compile(r"decoder/meta_cls/.*")


def variables(parameters: Parameters) -> dict[str, Any]:
    """Returns the argument of `EarlyExitModel.apply` for parameters by name."""
    return {"params": flax.traverse_util.unflatten_dict(parameters, sep="/")}


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("label_smoothing", "z_loss"))
def loss_and_gradients(
    model: EarlyExitModel,
    parameters: Parameters,
    *,
    batch: Taught,
    layers: jax.Array,
    weights: jax.Array,
    key: jax.Array,
    label_smoothing: float,
    z_loss: float,
) -> tuple[jax.Array, Parameters]:
    """Returns the loss over the given layers, counted from 1 and ending with the model's last, and its gradient.

    Compiled once per batch shape. The update takes as long to compile, and is compiled separately and only once.
    """

    def loss_of(parameters: Parameters) -> jax.Array:
        apply = functools.partial(model.apply, variables(parameters))
        # Two keys: the head's dropout must not repeat the stack's.
        stack_key, head_key = jax.random.split(key)
        states = apply(batch, deterministic=False, rngs={"dropout": stack_key}, method="teacher_forced")
        logits = _logits(model, parameters, states=states, layers=layers, key=head_key)
        return layer_weighted_loss(
            logits,
            jnp.asarray(batch.targets),
            is_target=batch.is_target,
            weights=weights,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )

    return jax.value_and_grad(loss_of)(parameters)


def _logits(
    model: EarlyExitModel, parameters: Parameters, *, states: jax.Array, layers: jax.Array, key: jax.Array
) -> jax.Array:
    """Returns the logits of the given layers, (some layers, batch, target, vocabulary), from the states of all."""
    config, tree = model.config, variables(parameters)["params"]
    last = config.num_decoder_layers

    def head(own: Parameters, states: jax.Array, key: jax.Array, *, layer: int) -> Any:
        of_layer = {"params": {**tree, "decoder": {**tree["decoder"], **own}}}
        return model.apply(of_layer, states, layer, deterministic=False, rngs={"dropout": key}, method="head")

    if not has_own_exits(config):
        shared: jax.Array = head({}, states[layers - 1], key, layer=last)
        return shared
    keys = jax.random.split(key, len(layers))
    of_last: jax.Array = head({}, states[-1:], keys[-1], layer=last)
    if len(layers) == 1:
        return of_last
    # The sampled layers change from step to step, so each is applied as layer 1 with its own parameters.
    every = [own_parameters(tree["decoder"], config, layer) for layer in range(1, last)]
    own = jax.tree.map(lambda *arrays: jnp.stack(arrays)[layers[:-1] - 1], *every)
    of_lower = jax.vmap(functools.partial(head, layer=1))(own, states[layers[:-1] - 1], keys[:-1])
    return jnp.concatenate([of_lower, of_last])


@functools.partial(jax.jit, static_argnums=(0, 1))
def initial_optimizer_state(config: OptimizerConfig, steps: int, *, parameters: Parameters) -> Any:
    """Returns the optimiser's state before the first of `steps` steps."""
    return jax.tree.map(spread, make_optimizer(config, steps=steps).init(parameters))


@jax.jit
def spread_state(state: Any) -> Any:
    """Returns an optimiser's state, distributed over a group of devices."""
    return jax.tree.map(spread, state)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="division", donate_argnames=("parameters", "state"))
def update(
    config: OptimizerConfig,
    steps: int,
    *,
    division: Division = _UNDIVIDED,
    parameters: Parameters,
    state: Any,
    gradients: Parameters,
) -> tuple[Parameters, Any]:
    """Returns parameters and optimiser state after a step; donates the old ones."""
    # Muon multiplies matrices at the device's default precision, which on accelerators would round.
    with jax.default_matmul_precision("highest"):
        updates, state = make_optimizer(config, steps=steps).update(gradients, state, parameters)
    updated: Parameters = optax.apply_updates(parameters, updates)
    # Keeps their placement: another one would compile another program for the next step.
    updated = {name: _in_place(name, values, division=division) for name, values in updated.items()}
    return updated, jax.tree.map(spread, state)


def _in_place(name: str, values: jax.Array, *, division: Division) -> jax.Array:
    axis = division.axis(name, values.ndim)
    return whole(values) if axis is None else divided(values, axis, of=values.shape[axis])


def parameter_group(name: str) -> str:
    """Returns the rule that trains a parameter under Muon: `muon`, `adam`, or `frozen` (the exit classifier).

    >>> parameter_group("decoder/layers_3/mlp/wi_0/kernel")
    'muon'
    >>> parameter_group("decoder/logits_dense/kernel"), parameter_group("decoder/exit_heads_3/kernel")
    ('adam', 'adam')
    """
    if _FROZEN.fullmatch(name):
        return "frozen"
    return "muon" if _LAYER_KERNEL.fullmatch(name) else "adam"


def make_optimizer(config: OptimizerConfig, *, steps: int) -> optax.GradientTransformation:
    """Returns the optimiser of a run of `steps` steps, for parameters in a flat mapping by name.

    Args:
      config: The optimiser's settings, which also select it.
      steps: Length of the run, at least 1; Muon's and Adam's rates reach 0 after it.

    Returns:
      An optax transformation, whose updates are added to the parameters. The exit classifier gets none.
    """
    return _adafactor(config) if isinstance(config, AdafactorConfig) else _muon_and_adam(config, steps)


def linear_schedule(peak: float, config: MuonConfig, *, steps: int) -> optax.Schedule:
    """Returns the rate by step: linear warm-up to `peak`, then linear to 0 after the last of `steps` steps."""
    warmup = min(config.warmup_steps, steps // 5)
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    fall = optax.linear_schedule(peak, 0.0, steps - warmup)
    return optax.join_schedules([rise, fall], [warmup])


def _adafactor(config: AdafactorConfig) -> optax.GradientTransformation:
    # T5X's settings, named even if they are optax's defaults. The gradient's norm is not clipped: the rule does not
    # depend on its scale.
    rule = optax.adafactor(
        config.learning_rate,
        min_dim_size_to_factor=128,
        decay_rate=0.8,
        multiply_by_parameter_scale=True,
        clipping_threshold=1.0,
        momentum=None,
        factored=True,
    )

    def label(parameters: Mapping[str, jax.Array]) -> dict[str, str]:
        return {name: "frozen" if parameter_group(name) == "frozen" else "trained" for name in parameters}

    return optax.partition({"trained": rule, "frozen": optax.set_to_zero()}, label)


def _muon_and_adam(config: MuonConfig, steps: int) -> optax.GradientTransformation:
    groups = {
        "muon": _stacked_by_shape(
            optax.contrib.muon(
                linear_schedule(config.muon_learning_rate, config, steps=steps),
                ns_steps=config.newton_schulz_steps,
                beta=config.momentum,
                nesterov=True,
                muon_weight_dimension_numbers=_stacked_matrices,
            )
        ),
        # Not the Adam inside `optax.contrib.muon`: that one takes over Muon's Nesterov momentum.
        "adam": optax.adam(
            linear_schedule(config.adam_learning_rate, config, steps=steps), b1=config.adam_b1, b2=config.adam_b2
        ),
        "frozen": optax.set_to_zero(),
    }
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.partition(groups, _labels))


def _labels(parameters: Mapping[str, jax.Array]) -> dict[str, str]:
    return {name: parameter_group(name) for name in parameters}


def _stacked_matrices(stacks: Any) -> Any:
    """Returns the roles of axes for stacks [kernels, in, out]; kernels are updated independently of each other."""
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2), stacks)


def _stacked_by_shape(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a transformation that gives the inner one all kernels of a shape as one array.

    The updates are the same. A model has dozens of kernels in two or three shapes: one batched product takes less than
    half of the time of dozens of small ones, and a fifth of it to compile.
    """

    def stack(tree: Mapping[str, Any]) -> dict[str, jax.Array]:
        by_shape: dict[str, list[jax.Array]] = {}
        for name in sorted(tree):
            if not isinstance(tree[name], optax.MaskedNode):
                by_shape.setdefault(str(tree[name].shape), []).append(tree[name])
        return {shape: jnp.stack(kernels) for shape, kernels in by_shape.items()}

    def update(updates: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        stacked, state = inner.update(stack(updates), state, None if parameters is None else stack(parameters))
        remaining = {shape: iter(kernels) for shape, kernels in stacked.items()}
        unstacked = {
            name: value if isinstance(value, optax.MaskedNode) else next(remaining[str(value.shape)])
            for name, value in sorted(updates.items())
        }
        return unstacked, state

    return optax.GradientTransformation(lambda parameters: inner.init(stack(parameters)), update)
