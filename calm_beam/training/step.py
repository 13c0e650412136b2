"""One training step: the loss and its gradient, and the update."""

import functools
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import optax

from calm_beam.model.heads import has_own_exits, own_parameters
from calm_beam.model.interface import EarlyExitModel, Taught
from calm_beam.model.partitioning import divided, spread, whole
from calm_beam.model.sharding import Division

from .config import OptimizerConfig
from .objective import layer_weighted_loss
from .optimizer import make_optimizer

Parameters = dict[str, jax.Array]
_UNDIVIDED = Division()


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
