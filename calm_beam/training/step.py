"""One training step: the loss and its gradient, and the update by an optimiser.

The optimisers are Muon on the matrices of the layers with Adam on all other weights, or Adafactor on everything.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import optax
import optax.contrib

from calm_beam.model.heads import has_own_exits, own_parameters
from calm_beam.model.interface import EarlyExitModel, Taught
from calm_beam.model.partitioning import divided, spread, whole
from calm_beam.model.sharding import Division
from calm_beam.training.config import AdafactorConfig, MuonConfig, OptimizerConfig
from calm_beam.training.objective import layer_weighted_loss

Parameters = dict[str, jax.Array]
_UNDIVIDED = Division()
_LAYER_KERNEL = re.compile(r"(encoder|decoder)/layers_\d+/.*/kernel")
_FROZEN = re.compile(r"decoder/meta_cls/.*")


def variables(parameters: Parameters) -> dict[str, Any]:
    """Returns what `EarlyExitModel.apply` takes, of parameters by name."""
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
    """Returns the loss over the given layers, counted from 1 and the last of them the model's last, and its gradient.

    Compiled once per batch shape; the update, which would take as long to compile, is compiled apart and only once.
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
    """Returns the logits of the given layers, (some layers, batch, target, vocabulary), of the states of all."""
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
    # Steps differ in which lower layers these are: each is applied as layer 1, with what it has of its own.
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
    """Returns an optimiser's state where a group of devices keeps it."""
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
    """Returns parameters and optimiser state after a step; the old ones are given away."""
    # Muon multiplies matrices, and leaves the precision to the device: accelerators would round.
    with jax.default_matmul_precision("highest"):
        updates, state = make_optimizer(config, steps=steps).update(gradients, state, parameters)
    updated: Parameters = optax.apply_updates(parameters, updates)
    # Where they were: else the next step would be another program.
    updated = {name: _in_place(name, values, division=division) for name, values in updated.items()}
    return updated, jax.tree.map(spread, state)


def _in_place(name: str, values: jax.Array, *, division: Division) -> jax.Array:
    axis = division.axis(name, values.ndim)
    return whole(values) if axis is None else divided(values, axis, of=values.shape[axis])


def parameter_group(name: str) -> str:
    """Returns which rule trains a parameter next to Muon: `muon`, `adam`, or `frozen` (the exit classifier).

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
      config: Which one, with its rates.
      steps: Length of the run, at least 1; Muon's and Adam's rates reach 0 after it.

    Returns:
      An optax transformation, whose updates are to be added to the parameters. The exit classifier gets none.
    """
    return _adafactor(config) if isinstance(config, AdafactorConfig) else _muon_and_adam(config, steps)


def linear_schedule(peak: float, config: MuonConfig, *, steps: int) -> optax.Schedule:
    """Returns the rate by step: linear warm-up to `peak`, then linear to 0 after the last of `steps` steps."""
    warmup = min(config.warmup_steps, steps // 5)
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    fall = optax.linear_schedule(peak, 0.0, steps - warmup)
    return optax.join_schedules([rise, fall], [warmup])


def _adafactor(config: AdafactorConfig) -> optax.GradientTransformation:
    # T5X's settings, named even where they are optax's defaults. The whole gradient is not clipped by its norm: the
    # rule does not see its scale.
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
    """Returns which axis is which, for stacks [kernels, in, out]; kernels are updated independently of each other."""
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2), stacks)


def _stacked_by_shape(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a transformation that hands the inner one all kernels of a shape as one array.

    The updates are the same. A model has dozens of kernels in two or three shapes: one batched product instead of
    dozens of small ones takes less than half of the time, and a fifth of it to compile.
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
