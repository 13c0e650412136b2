"""The two large steps of the shared sweep by themselves, with batches that are full."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.xla import steps as device_steps
from calm_beam.decoding.xla.steps import AskedRows, LayerRows
from calm_beam.decoding.xla.tiles import grouped, source_positions
from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.model import network_of

from .multiply_adds import layer_row, projection_row, seconds_per_call

# A size that the sweep pads to, and how many prompts these rows belong to.
ROWS = 512
_PLACES = 64


def projection_step_rate(checkpoint: Checkpoint, rule: ExitRule) -> float:
    """Returns the multiply-adds per second of the output head when it decides `ROWS` rows."""
    config, weights = checkpoint.config, jax.device_put({"params": checkpoint.parameters()})
    states = _states(config.num_decoder_layers, config.emb_dim)
    asked = AskedRows(branches=np.arange(ROWS, dtype=np.int32), layers=np.ones(ROWS, np.int32))
    seconds = seconds_per_call(
        lambda: device_steps.decide_rows(
            network_of(config),
            (rule.confidence,),
            head_layer=1,
            parameters=weights,
            states=states,
            rows=asked.joined(),
        )
    )
    return ROWS * projection_row(config) / seconds


def layer_step_rate(checkpoint: Checkpoint, rule: ExitRule, *, steps: int, source: int) -> float:
    """Returns the multiply-adds per second of a decoder layer when it runs `ROWS` rows.

    Args:
      checkpoint: The model.
      rule: Its confidence is made in the step, unless it is made of logits.
      steps: Tokens so far, all of which the rows attend to.
      source: Tokens of each prompt.
    """
    config = checkpoint.config
    model = network_of(config)
    tree = jax.device_put(checkpoint.parameters())
    weights = tree["decoder"]["layers_0"]
    parameters = {"layer": weights}
    of_states = (rule.confidence,) if rule.measure().needs in (Need.STATES, Need.CLASSIFIER) else ()
    if rule.confidence == "classifier":
        parameters["classifier"] = {"params": {"decoder": {"meta_cls": tree["decoder"]["meta_cls"]}}}
    inner = config.num_heads * config.head_dim
    state: dict[str, Any] = {
        "states": _states(config.num_decoder_layers, config.emb_dim),
        "cache": tuple(_normal(part, ROWS * steps, inner) for part in range(2)),
    }
    width = source_positions(source)
    keys_values = tuple(_normal(part, _PLACES, config.num_heads, width, config.head_dim) for part in range(2))
    branches = np.arange(ROWS, dtype=np.int32)
    paths = np.arange(ROWS * steps, dtype=np.int32).reshape(ROWS, steps)
    rows = LayerRows(
        below=branches,
        branches=branches,
        nodes=paths[:, -1],
        paths=paths,
        steps=np.full(ROWS, steps - 1, np.int32),
        prompt_lengths=np.full(ROWS, source, np.int32),
        **grouped(branches // np.int32(ROWS // _PLACES), ROWS),
    ).joined()

    def run() -> tuple[jax.Array, jax.Array]:
        # The step takes its buffers over and gives them back.
        state["states"], state["cache"], confidences = device_steps.run_layer(
            model,
            of_states,
            **state,
            parameters=parameters,
            keys_values=keys_values,
            source_mask=jnp.broadcast_to(jnp.arange(width) < source, (_PLACES, width)),
            terms=jnp.zeros((config.num_heads, steps)),
            layer=np.int32(1),
            rows=rows,
        )
        return state["states"], confidences

    return ROWS * layer_row(config) / seconds_per_call(run)


def _states(num_layers: int, width: int) -> jax.Array:
    return _normal(0, num_layers + 1, ROWS, width)


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)
