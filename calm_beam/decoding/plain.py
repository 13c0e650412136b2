"""The plain sweep: every threshold of a prompt is a lane of its own, and every layer is evaluated for every lane.

Only then is it decided where the lane has exited, and what the layers above keep of the token. That is the plain
reading of the paper: the reference for the sweep that shares work, and what runs the rules that need every layer
anyway. Prompts occupy slots of a batch of fixed shape; a slot whose lanes have all ended is given the next prompt, so
that a long output does not keep the others waiting.
"""

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.measures import Measure, Need
from calm_beam.exits.propagation import at_layer, propagated_keys_values
from calm_beam.exits.rule import ExitRule
from calm_beam.model import ModelConfig, architecture_of, network_of
from calm_beam.model.heads import has_own_exits
from calm_beam.model.interface import EarlyExitModel, KeysValues, Position, of_layer
from calm_beam.model.numerics import widened

from .device_groups import DeviceGroup, first_device, placed
from .ends import is_end
from .padding import members_by_width
from .result import SweepResult
from .work import Work

State = dict[str, Any]

# Slots are refilled once this share of them is free: each refill costs a call of the encoder of fixed shape.
_REFILL_SHARE = 4


class PlainSweep:
    """Decodes prompts at all thresholds of a grid, every lane by itself through every layer.

    Compiles once for every width that prompts are padded to.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rule: ExitRule,
        *,
        thresholds: np.ndarray,
        max_input_length: int,
        slots: int,
        arithmetic: Arithmetic = FLOAT32,
        group: DeviceGroup | None = None,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          rule: How exits are decided.
          thresholds: float32, shape (steps, lanes); +inf in lane 0, the full model.
          max_input_length: Most tokens of a prompt.
          slots: Prompts decoded at the same time.
          arithmetic: In which numbers the model computes.
          group: The devices that decode; None for the first.
        """
        self._thresholds = thresholds
        self._group = group or first_device()
        self._parameters = {"params": placed(checkpoint, self._group, arithmetic).parameters(arithmetic)}
        self._model = network_of(checkpoint.config, arithmetic=arithmetic)
        self._rule = rule
        self._max_input_length = max_input_length
        self._slots = slots
        # A projection of every state that may exit, where logits decide; one for the token, or for the token of each
        # layer that may give it.
        each = len(rule.exit_layers(checkpoint.config.num_decoder_layers))
        asked = each if rule.measure().needs.asks_head else 0
        self._projections = asked + (each if _token_has_several_heads(rule, checkpoint.config) else 1)
        self.work = Work()

    @property
    def slots(self) -> int:
        """Most prompts that are decoded side by side."""
        return self._slots

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, SweepResult]]:
        """Yields the outputs of every prompt, with its index, in the order in which they end."""
        for width, members in members_by_width(prompts, self._max_input_length).items():
            # Long prompts tend to have long outputs: begun first, they do not run alone at the end.
            members.sort(key=lambda index: -len(prompts[index]))
            yield from self._decode_bucket(prompts, members, width)

    def _decode_bucket(
        self, prompts: Sequence[Sequence[int]], members: Sequence[int], width: int
    ) -> Iterator[tuple[int, SweepResult]]:
        """Yields the outputs of the prompts that are padded to one width."""
        chunk = max(1, self._slots // _REFILL_SHARE)
        waiting = collections.deque(members)
        owners: dict[int, int] = {}
        architecture = architecture_of(self._model.config)
        with self._group.running():
            state = _empty_state(self._model, self._slots, self._thresholds.shape, width)
        while waiting or owners:
            free = [slot for slot in range(self._slots) if slot not in owners]
            while waiting and free:
                admitted = [(free.pop(0), waiting.popleft()) for _ in range(min(chunk, len(free), len(waiting)))]
                owners.update(admitted)
                source_tokens = np.zeros((chunk, width), np.int32)
                lengths, first = np.zeros(chunk, np.int32), np.zeros(chunk, np.int32)
                # Rows that admit nobody are sent to a slot that does not exist, and dropped.
                slots = np.full(chunk, self._slots, np.int32)
                for row, (slot, index) in enumerate(admitted):
                    source_tokens[row, : len(prompts[index])] = prompts[index]
                    lengths[row] = len(prompts[index])
                    first[row] = architecture.first_input(self._model.config, prompts[index])
                    slots[row] = slot
                with self._group.running():
                    state = _admit(self._model, self._parameters, state, slots, source_tokens, lengths, first)
            enough_busy = self._slots - chunk if waiting else 0
            fields = ("finished", "tokens", "exit_layers", "confidences", "is_finite")
            with self._group.running():
                state = _advance(
                    self._model, self._rule, self._parameters, state, self._thresholds, np.int32(enough_busy)
                )
                host = jax.device_get({name: state[name] for name in fields})
            for slot in np.flatnonzero(host["finished"].all(axis=1)).tolist():
                if slot in owners:
                    result = _result(host, slot)
                    lane_tokens = int(result.lengths.sum())
                    self.work += Work(
                        prompts=1,
                        tokens=int(result.lengths[0]),
                        layer_rows=lane_tokens * self._model.config.num_decoder_layers,
                        projection_rows=lane_tokens * self._projections,
                    )
                    yield owners.pop(slot), result


def _result(host: dict[str, np.ndarray], slot: int) -> SweepResult:
    exit_layers = host["exit_layers"][slot].copy()
    return SweepResult(
        tokens=host["tokens"][slot].copy(),
        exit_layers=exit_layers,
        confidences=host["confidences"][slot].copy(),
        lengths=(exit_layers > 0).sum(axis=1, dtype=np.int32),
        is_finite=bool(host["is_finite"][slot]),
    )


def _empty_state(model: EarlyExitModel, slots: int, shape: tuple[int, ...], width: int) -> State:
    """Returns a batch of free slots; `shape` is (steps, lanes)."""
    steps, lanes = shape
    config = model.config

    def no_keys_values(*prefix: int, positions: int) -> list[KeysValues]:
        cache_shape = (slots, *prefix, config.num_kv_heads, positions, config.head_dim)
        # Two arrays a layer, not one twice: a buffer can only be given away once.
        dtype = model.arithmetic.dtype
        return [
            (jnp.zeros(cache_shape, dtype), jnp.zeros(cache_shape, dtype)) for _ in range(config.num_decoder_layers)
        ]

    return {
        "step": jnp.zeros((slots,), jnp.int32),
        "previous": jnp.zeros((slots, lanes), jnp.int32),
        "finished": jnp.ones((slots, lanes), bool),
        "cache": no_keys_values(lanes, positions=steps),
        "source": no_keys_values(positions=width),
        "source_mask": jnp.zeros((slots, width), bool),
        "prompt_lengths": jnp.ones((slots,), jnp.int32),
        "tokens": jnp.zeros((slots, lanes, steps), jnp.int32),
        "exit_layers": jnp.zeros((slots, lanes, steps), jnp.int32),
        "confidences": jnp.zeros((slots, lanes, steps)),
        "is_finite": jnp.ones((slots,), bool),
    }


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _admit(
    model: EarlyExitModel,
    parameters: Any,
    state: State,
    slots: jax.Array,
    source_tokens: jax.Array,
    lengths: jax.Array,
    first: jax.Array,
) -> State:
    """Returns the state with new prompts in `slots`; slot numbers beyond the last are dropped.

    Args:
      model: Sizes.
      parameters: Weights.
      state: Of `_empty_state` or `_advance`.
      slots: shape (rows,).
      source_tokens: shape (rows, width), 0-padded.
      lengths: shape (rows,). Tokens of each prompt.
      first: shape (rows,). The decoder's first inputs.
    """
    source, source_mask = model.apply(parameters, source_tokens, lengths, method="prefill")

    def put(values: jax.Array, new: Any) -> jax.Array:
        return values.at[slots].set(new, mode="drop")

    return {
        **state,
        # Positions not yet written are masked, but 0 * NaN is NaN: what a broken prompt left must not stay.
        "cache": [tuple(put(values, jnp.zeros((), values.dtype)) for values in pair) for pair in state["cache"]],
        "source": [
            tuple(put(old, new) for old, new in zip(olds, news, strict=True))
            for olds, news in zip(state["source"], source, strict=True)
        ],
        "source_mask": put(state["source_mask"], source_mask),
        "prompt_lengths": put(state["prompt_lengths"], lengths),
        "step": put(state["step"], 0),
        "previous": put(state["previous"], first[:, None]),
        "finished": put(state["finished"], new=False),
        "tokens": put(state["tokens"], 0),
        "exit_layers": put(state["exit_layers"], 0),
        "confidences": put(state["confidences"], np.float32(0)),
        "is_finite": put(state["is_finite"], new=True),
    }


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _advance(
    model: EarlyExitModel, rule: ExitRule, parameters: Any, state: State, thresholds: jax.Array, enough_busy: jax.Array
) -> State:
    """Returns the state after as many steps as leave at most `enough_busy` slots busy.

    Args:
      model: Sizes.
      rule: How exits are decided.
      parameters: Weights.
      state: Of `_empty_state` or `_admit`.
      thresholds: shape (steps, lanes); lane 0 is the full model.
      enough_busy: Stop once no more slots than this have lanes that go on.
    """
    steps = thresholds.shape[0]
    apply = functools.partial(model.apply, parameters)
    position_biases = apply(steps, method="decoder_position_biases")
    each_slot = jnp.arange(state["step"].shape[0])

    def has_too_many_busy(state: State) -> jax.Array:
        return jnp.sum(~jnp.all(state["finished"], axis=1)) > enough_busy

    def generate_token(state: State) -> State:
        step, finished = state["step"], state["finished"]
        # [heads, slots, positions] -> [slots, 1, heads, 1, positions]
        self_biases = [jnp.swapaxes(bias[:, step], 0, 1)[:, None, :, None] for bias in position_biases]
        token, exit_layer, confidence, is_finite, cache = _one_token(
            rule, model.config, apply, state, thresholds[step], self_biases
        )

        def written(values: jax.Array, new: jax.Array) -> jax.Array:
            kept = values[each_slot, :, step]
            return values.at[each_slot, :, step].set(jnp.where(finished, kept, new))

        is_last = step == steps - 1
        return {
            **state,
            "step": jnp.where(is_last, step, step + 1),
            "previous": token,
            "finished": finished | is_end(token, model.config.end_ids) | is_last[:, None],
            "cache": cache,
            "tokens": written(state["tokens"], token),
            "exit_layers": written(state["exit_layers"], exit_layer),
            "confidences": written(state["confidences"], confidence),
            "is_finite": state["is_finite"] & jnp.all(is_finite | finished, axis=1),
        }

    return jax.lax.while_loop(has_too_many_busy, generate_token, state)


def _one_token(
    rule: ExitRule,
    config: ModelConfig,
    apply: Any,
    state: State,
    thresholds: jax.Array,
    self_biases: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, list[KeysValues]]:
    """Returns token, exit layer, confidence and finiteness of every lane, each (slots, lanes), and the new caches."""
    num_layers = config.num_decoder_layers
    exit_layers = rule.exit_layers(num_layers)
    previous, step = state["previous"], state["step"]
    each_slot = jnp.arange(previous.shape[0])
    position = Position(step, state["prompt_lengths"])
    source_biases = apply(state["source_mask"], position, method="source_biases")
    project = functools.partial(apply, position=position, method="self_keys_values")

    def put(cached: KeysValues, new: KeysValues) -> KeysValues:
        return tuple(old.at[each_slot, :, :, step].set(values) for old, values in zip(cached, new, strict=True))

    embedded = below = apply(previous, method="embed")
    states, own, cache = [], [], []
    for layer in range(1, num_layers + 1):
        own.append(project(below, layer))
        cache.append(put(state["cache"][layer - 1], own[-1]))
        below = apply(
            below,
            layer,
            self_keys_values=cache[-1],
            self_bias=of_layer(self_biases, layer),
            source_keys_values=state["source"][layer - 1],
            source_bias=of_layer(source_biases, layer),
            position=position,
            method="decoder_layer",
        )
        states.append(below)
    inputs = [embedded, *states[:-1]]
    measured = _confidences(rule, exit_layers, apply, inputs, states)
    exit_layer, confidence = jnp.full(previous.shape, num_layers, jnp.int32), measured[-1]
    for layer, value in reversed(list(zip(exit_layers[:-1], measured[:-1], strict=True))):
        leaves = value >= thresholds
        exit_layer, confidence = jnp.where(leaves, layer, exit_layer), jnp.where(leaves, value, confidence)
    kept = propagated_keys_values(
        rule.propagation().passed_on,
        states,
        own=own,
        exit_layer=exit_layer,
        first_exit=exit_layers[0],
        project=project,
    )
    cache = [put(pair, new) for pair, new in zip(cache, kept, strict=True)]
    given = states[-1] if rule.token_from == "last_layer" else at_layer(states, exit_layer)
    logits = apply(given, num_layers, method="head")
    if _token_has_several_heads(rule, config):
        for layer in exit_layers[:-1]:
            of_layer_below = apply(states[layer - 1], layer, method="head")
            logits = jnp.where((exit_layer == layer)[..., None], of_layer_below, logits)
    # The maximum may pass over a NaN: on CPU, XLA's does.
    is_finite = jnp.isfinite(jnp.max(logits, axis=-1)) & ~jnp.any(jnp.isnan(logits), axis=-1) & jnp.isfinite(confidence)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), exit_layer, confidence, is_finite, cache


def _token_has_several_heads(rule: ExitRule, config: ModelConfig) -> bool:
    """Returns whether the head that predicts a token depends on the layer where it exits."""
    return rule.token_from != "last_layer" and has_own_exits(config)


def _confidences(
    rule: ExitRule, exit_layers: Sequence[int], apply: Any, inputs: Sequence[jax.Array], states: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns the confidence of every lane, (slots, lanes), at each of the layers that may exit."""
    measure = rule.measure()
    outputs = [states[layer - 1] for layer in exit_layers]
    match measure.needs:
        case Need.LAYER:
            shape = states[0].shape[:-1]
            return [jnp.full(shape, measure.confidence(layer, len(states)), jnp.float32) for layer in exit_layers]
        case Need.STATES:
            wide, wide_inputs = ([widened(each) for each in values] for values in (states, inputs))
            return [measure.confidence(wide[layer - 1], wide_inputs[layer - 1], layer) for layer in exit_layers]
        case Need.CLASSIFIER:
            return [measure.confidence(apply(output, method="exit_score")) for output in outputs]
    logits = [apply(output, layer, method="head") for layer, output in zip(exit_layers, outputs, strict=True)]
    match measure.needs:
        case Need.LAST_LOGITS:
            return [measure.confidence(values, logits[-1]) for values in logits]
        case Need.TOKENS:
            return _of_tokens(measure, [jnp.argmax(values, axis=-1).astype(jnp.int32) for values in logits], rule)
    return [measure.confidence(values) for values in logits]


def _of_tokens(measure: Measure, tokens: Sequence[jax.Array], rule: ExitRule) -> list[jax.Array]:
    assert rule.patience is not None
    none = [jnp.full(tokens[0].shape, -1, jnp.int32)] * (rule.patience - 1)
    found = []
    for place, token in enumerate(tokens):
        earlier = [*reversed(tokens[:place]), *none][: rule.patience - 1]
        found.append(measure.confidence(token, jnp.stack(earlier, -1) if earlier else jnp.zeros((*token.shape, 0))))
    return found
