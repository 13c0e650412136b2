"""The sweep: the greedy output of every prompt at every threshold, and of the full model.

This decoder runs every threshold of a prompt as a lane of its own and evaluates every layer for every lane; a lane that
has exited keeps its state while the others go on. That is the plain reading of the paper, and the reference for
decoders that share work between lanes. The seam is `SweepDecoder.decode`: prompts in; tokens, exit layers and
confidences out.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.saturation import hidden_state_saturation
from calm_beam.exits.schedule import scheduled_thresholds
from calm_beam.exits.softmax_response import softmax_gap, softmax_max
from calm_beam.model import EarlyExitT5
from calm_beam.model.network import PAD_ID, padding_bias
from calm_beam.vocabulary import EOS_ID


# Keys and values, each of shape (batch, lanes, heads, positions, head_dim), or without lanes for cross-attention.
KeysValues = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Outputs of a batch of prompts in every lane; lane 0 is the full model, lane k the k-th threshold.

    Attributes:
      tokens: int32, shape (batch, lanes, max_decode_length). 0 after the output's end; eos is part of the output.
      lengths: int32, shape (batch, lanes). Number of tokens, eos included.
      exit_layers: int32, shape of `tokens`. Layers used, counted from 1; 0 after the end.
      confidences: float32, shape of `tokens`. Confidence at the exit layer; 0 after the end. It is
        the last layer's in the full model's lane, and wherever a token went that far.
      finite: bool, shape (batch,). False where a prompt gave a logit that is NaN or infinite.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    finite: np.ndarray


class SweepDecoder:
    """Decodes batches of prompts at all thresholds of a grid; rows and lanes never influence each other.

    Each distinct batch shape is compiled once.
    """

    def __init__(
        self, checkpoint: Checkpoint, rule: ExitRule, *, thresholds: Sequence[float], max_decode_length: int
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          rule: How exits are decided.
          thresholds: Exit thresholds in [0, 1], any order; lane k of a result belongs to the k-th.
          max_decode_length: Most tokens to generate, eos included.

        Raises:
          ValueError: If the rule does not fit the model (no exit classifier, `min_exit_layer` too high), or a length is
            below 1.
        """
        if rule.confidence == "classifier" and not checkpoint.config.exit_classifier:
            raise ValueError("confidence 'classifier' needs decoder/meta_cls in the checkpoint, which has none.")
        if max_decode_length < 1:
            raise ValueError(f"max_decode_length must be at least 1, got {max_decode_length}.")
        rule.exit_layers(checkpoint.config.num_decoder_layers)
        # [steps, thresholds]; the full model's lane gets a column that is never looked at.
        by_step = scheduled_thresholds(rule, tuple(thresholds), max_decode_length)
        self._thresholds = jnp.asarray(np.concatenate([np.ones((max_decode_length, 1), np.float32), by_step], axis=1))
        self._parameters = jax.device_put({"params": checkpoint.parameters()})
        self._model = EarlyExitT5(checkpoint.config)
        self._rule = rule

    def decode(self, source_tokens: np.ndarray) -> SweepResult:
        """Returns the outputs of a batch of prompts in every lane.

        Args:
          source_tokens: int32, shape (batch, source). Padded with 0; a row of padding only is not decoded.

        Returns:
          The outputs; those of rows without a prompt are empty.
        """
        outputs = _decode(self._model, self._rule, self._parameters, jnp.asarray(source_tokens), self._thresholds)
        return SweepResult(**{name: np.asarray(value) for name, value in jax.device_get(outputs).items()})


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(
    model: EarlyExitT5, rule: ExitRule, parameters: Any, source_tokens: jax.Array, thresholds: jax.Array
) -> dict[str, jax.Array]:
    """Returns the fields of `SweepResult`; `thresholds` has shape (steps, lanes), lane 0 being the full model."""
    steps, lanes = thresholds.shape
    batch = source_tokens.shape[0]
    config = model.config
    apply = functools.partial(model.apply, parameters)

    has_prompt = jnp.any(source_tokens != PAD_ID, axis=1)
    cross = apply(apply(source_tokens, method="encode"), method="cross_keys_values")
    cross_bias = padding_bias(source_tokens != PAD_ID)
    position_bias = apply(steps, method="decoder_position_bias")

    cache_shape = (batch, lanes, config.num_heads, steps, config.head_dim)
    empty_cache = [(jnp.zeros(cache_shape), jnp.zeros(cache_shape)) for _ in range(config.num_decoder_layers)]
    state = {
        "step": jnp.int32(0),
        "previous": jnp.zeros((batch, lanes), jnp.int32),
        "finished": jnp.broadcast_to(~has_prompt[:, None], (batch, lanes)),
        "cache": empty_cache,
        "tokens": jnp.zeros((batch, lanes, steps), jnp.int32),
        "exit_layers": jnp.zeros((batch, lanes, steps), jnp.int32),
        "confidences": jnp.zeros((batch, lanes, steps)),
        "finite": jnp.ones((batch,), bool),
    }

    def is_running(state: dict[str, Any]) -> jax.Array:
        return (state["step"] < steps) & ~jnp.all(state["finished"])

    def generate_token(state: dict[str, Any]) -> dict[str, Any]:
        step, finished = state["step"], state["finished"]
        self_bias = jax.lax.dynamic_index_in_dim(position_bias, step, axis=1, keepdims=False)
        token, exit_layer, confidence, finite, cache = _one_token(
            model, rule, apply, state["previous"], step, thresholds[step], state["cache"], self_bias, cross, cross_bias
        )
        record = lambda values, new: values.at[:, :, step].set(jnp.where(finished, jnp.zeros_like(new), new))  # noqa: E731
        return {
            "step": step + 1,
            "previous": token,
            "finished": finished | (token == EOS_ID),
            "cache": cache,
            "tokens": record(state["tokens"], token),
            "exit_layers": record(state["exit_layers"], exit_layer),
            "confidences": record(state["confidences"], confidence),
            "finite": state["finite"] & jnp.all(finite | finished, axis=1),
        }

    final = jax.lax.while_loop(is_running, generate_token, state)
    return {
        "tokens": final["tokens"],
        "lengths": jnp.sum(final["exit_layers"] > 0, axis=2),
        "exit_layers": final["exit_layers"],
        "confidences": final["confidences"],
        "finite": final["finite"],
    }


def _one_token(
    model: EarlyExitT5,
    rule: ExitRule,
    apply: Any,
    previous: jax.Array,
    step: jax.Array,
    thresholds: jax.Array,
    cache: list[KeysValues],
    self_bias: jax.Array,
    cross: list[KeysValues],
    cross_bias: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, list[KeysValues]]:
    """Returns token, exit layer, confidence and finiteness of every lane, each (batch, lanes), and the new caches."""
    num_layers = model.config.num_decoder_layers
    exit_layers = rule.exit_layers(num_layers)
    lanes = previous.shape[1]
    is_full_model = jnp.arange(lanes) == 0
    # Until a lane exits, `hidden` is its latest layer's output; from then on, it stays that of the exit layer.
    hidden = first_exit_hidden = apply(previous, method="embed")
    exited = jnp.zeros(previous.shape, bool)
    exit_layer = jnp.full(previous.shape, num_layers, jnp.int32)
    confidence = jnp.zeros(previous.shape)
    new_cache = []
    for layer in range(1, num_layers + 1):
        propagated = hidden
        if rule.state_propagation == "from_first_exit":
            propagated = jnp.where(exited[..., None], first_exit_hidden, hidden)
        keys_values = tuple(
            cached.at[:, :, :, step].set(new)
            for cached, new in zip(cache[layer - 1], apply(propagated, layer, method="self_keys_values"), strict=True)
        )
        new_cache.append(keys_values)
        output = apply(hidden, layer, keys_values, self_bias, cross[layer - 1], cross_bias, method="decoder_layer")
        below, hidden = hidden, jnp.where(exited[..., None], hidden, output)
        if layer == exit_layers[0]:
            first_exit_hidden = output
        if layer in exit_layers:
            measured = _confidence(rule.confidence, apply, layer, output, below)
            confidence = jnp.where(exited, confidence, measured)
            exits = ~exited & (measured >= thresholds[None]) & ~is_full_model[None]
            exit_layer = jnp.where(exits, layer, exit_layer)
            exited = exited | exits
    logits = apply(hidden, method="head")
    finite = jnp.isfinite(jnp.max(logits, axis=-1)) & jnp.isfinite(confidence)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), exit_layer, confidence, finite, new_cache


def _confidence(measure: str, apply: Any, layer: int, output: jax.Array, below: jax.Array) -> jax.Array:
    """Returns the confidence of every lane, (batch, lanes), after `layer`."""
    if measure == "softmax":
        return softmax_gap(apply(output, method="head"))
    if measure == "softmax_max":
        return softmax_max(apply(output, method="head"))
    if measure == "classifier":
        return apply(output, method="exit_score")
    return hidden_state_saturation(output, below) if layer > 1 else jnp.zeros(output.shape[:-1])
