"""The full model's greedy outputs with one token replaced, for many positions at once.

Every (position, kind of replacement) is a lane of its prompt, beside lane 0, which nothing is done to. Up to its
position a lane is lane 0; there it takes the replacement, and then it goes on by itself.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.ends import is_end
from calm_beam.decoding.padding import members_by_width
from calm_beam.model import architecture_of, network_of
from calm_beam.model.interface import EarlyExitModel, Position, of_layer

from .sensitivity import KINDS

_BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perturbed:
    """The outputs of one prompt. Token ids end with eos if it was generated.

    Attributes:
      unperturbed: The full model's greedy output.
      outputs: By kind and position (from 0), the whole output if the token there is replaced. Only positions that the
        unperturbed output has.
      is_finite: Whether all logits that were used are finite numbers.
    """

    unperturbed: tuple[int, ...]
    outputs: Mapping[tuple[str, int], tuple[int, ...]]
    is_finite: bool


class PerturbationDecoder:
    """Decodes prompts with single tokens replaced; compiles once for every width that prompts are padded to."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        positions: Sequence[int],
        rank: int,
        max_decode_length: int,
        max_input_length: int = 512,
        batch_size: int | None = None,
        arithmetic: Arithmetic = FLOAT32,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          positions: Where to replace a token, from 0, each on its own.
          rank: Rank of the last layer's token that replaces its first choice in the kind `sampling`, from 1.
          max_decode_length: Most tokens to generate, eos included.
          max_input_length: Most tokens of a prompt.
          batch_size: Prompts decoded together, each with two lanes per position; None for 8.
          arithmetic: In which numbers the model computes.

        Raises:
          ValueError: If there is no position, one is outside [0, max_decode_length) or given twice, or there is no
            token of that rank.
        """
        if not positions or len(set(positions)) < len(positions):
            raise ValueError(f"positions must list one or more different values, got {list(positions)}.")
        for position in positions:
            if not 0 <= position < max_decode_length:
                raise ValueError(f"positions must be in [0, {max_decode_length}), the output's room; got {position}.")
        vocab_size = checkpoint.config.vocab_size
        if not 1 <= rank <= vocab_size:
            raise ValueError(f"rank must be in [1, {vocab_size}], the model's token ids; got {rank}.")
        architecture_of(checkpoint.config).check_positions(
            checkpoint.config, source=max_input_length, steps=max_decode_length
        )
        self._model = network_of(checkpoint.config, arithmetic=arithmetic)
        self._parameters = jax.device_put({"params": checkpoint.parameters(arithmetic)})
        self._lanes = tuple((kind, position) for kind in KINDS for position in positions)
        self._rank = rank
        self._steps = max_decode_length
        self._max_input_length = max_input_length
        self._rows = batch_size or _BATCH_SIZE

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Perturbed]]:
        """Yields the outputs of every prompt, with its index, not in order.

        Args:
          prompts: Token ids of each prompt, 1 to `max_input_length` of them.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        for width, members in members_by_width(prompts, self._max_input_length).items():
            # A batch takes as long as its longest output, and those of prompts alike in length are alike.
            members.sort(key=lambda index: len(prompts[index]))
            for start in range(0, len(members), self._rows):
                batch = members[start : start + self._rows]
                tokens, is_finite = jax.device_get(self._run([prompts[index] for index in batch], width))
                for row, index in enumerate(batch):
                    yield index, self._result(tokens[row], bool(is_finite[row]))

    def _run(self, prompts: Sequence[Sequence[int]], width: int) -> tuple[jax.Array, jax.Array]:
        source_tokens = np.zeros((self._rows, width), np.int32)
        lengths, first = np.zeros(self._rows, np.int32), np.zeros(self._rows, np.int32)
        for row, prompt in enumerate(prompts):
            source_tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
            first[row] = architecture_of(self._model.config).first_input(self._model.config, prompt)
        is_sampling = np.array([False, *(kind == "sampling" for kind, _ in self._lanes)])
        # No step has the number of lane 0.
        positions = np.array([self._steps, *(position for _, position in self._lanes)], np.int32)
        decoded: tuple[jax.Array, jax.Array] = _decode(
            self._model,
            self._rank,
            self._steps,
            self._parameters,
            source_tokens,
            lengths,
            first,
            is_sampling,
            positions,
        )
        return decoded

    def _result(self, tokens: np.ndarray, is_finite: bool) -> Perturbed:
        unperturbed, *others = (self._up_to_end(row) for row in tokens.tolist())
        outputs = {lane: output for lane, output in zip(self._lanes, others, strict=True) if lane[1] < len(unperturbed)}
        return Perturbed(unperturbed=unperturbed, outputs=outputs, is_finite=is_finite)

    def _up_to_end(self, tokens: list[int]) -> tuple[int, ...]:
        ends = (index for index, token in enumerate(tokens) if token in self._model.config.end_ids)
        return tuple(tokens[: next(ends, len(tokens)) + 1])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(
    model: EarlyExitModel,
    rank: int,
    steps: int,
    parameters: Any,
    source_tokens: jax.Array,
    lengths: jax.Array,
    first: jax.Array,
    is_sampling: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns tokens, (rows, lanes, steps), 0 after the end, and whether all logits of a row are finite, (rows,).

    Args:
      model: Sizes.
      rank: Of the token that replaces in the kind `sampling`.
      steps: Most tokens of an output.
      parameters: Weights.
      source_tokens: shape (rows, width), 0-padded.
      lengths: shape (rows,). Tokens of each prompt; a row of none is no prompt and has no outputs.
      first: shape (rows,). The decoder's first inputs.
      is_sampling: shape (lanes,). Which of the kinds a lane is.
      positions: shape (lanes,). Where a lane has its token replaced.
    """
    config = model.config
    rows, lanes = source_tokens.shape[0], positions.shape[0]
    apply = functools.partial(model.apply, parameters)
    source, source_mask = apply(source_tokens, lengths, method="prefill")
    position_biases = apply(steps, method="decoder_position_biases")
    cache_shape = (rows, lanes, config.num_kv_heads, steps, config.head_dim)

    def generate_token(state: dict[str, Any]) -> dict[str, Any]:
        step, finished = state["step"], state["finished"]
        # [heads, positions] -> [1, 1, heads, 1, positions]
        self_biases = [bias[:, step][None, None, :, None] for bias in position_biases]
        position = Position(step, lengths)
        source_biases = apply(source_mask, position, method="source_biases")
        hidden = apply(state["previous"], method="embed")
        cache, first_layer = [], hidden
        for layer in range(1, config.num_decoder_layers + 1):
            new = apply(hidden, layer, position=position, method="self_keys_values")
            keys_values = tuple(
                cached.at[:, :, :, step].set(values)
                for cached, values in zip(state["cache"][layer - 1], new, strict=True)
            )
            cache.append(keys_values)
            hidden = apply(
                hidden,
                layer,
                self_keys_values=keys_values,
                self_bias=of_layer(self_biases, layer),
                source_keys_values=source[layer - 1],
                source_bias=of_layer(source_biases, layer),
                position=position,
                method="decoder_layer",
            )
            if layer == 1:
                first_layer = hidden
        logits = apply(hidden, config.num_decoder_layers, method="head")
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # Until its position, a lane is lane 0; taken from there, so that rounding cannot part them before.
        token = jnp.where(step <= positions, token[:, :1], token)
        # [rows, vocabulary] -> [rows, 1]
        ranked = jax.lax.top_k(logits[:, 0], rank)[1][:, -1:]
        lowest = jnp.argmax(apply(first_layer[:, 0], 1, method="head"), axis=-1, keepdims=True).astype(jnp.int32)
        token = jnp.where(step == positions, jnp.where(is_sampling, ranked, lowest), token)
        is_finite = jnp.isfinite(jnp.max(logits, axis=-1)) | finished
        return {
            "step": step + 1,
            "previous": token,
            "finished": finished | is_end(token, config.end_ids),
            "cache": cache,
            "tokens": state["tokens"].at[:, :, step].set(jnp.where(finished, 0, token)),
            "is_finite": state["is_finite"] & jnp.all(is_finite, axis=1),
        }

    def goes_on(state: dict[str, Any]) -> jax.Array:
        is_running: jax.Array = (state["step"] < steps) & ~jnp.all(state["finished"])
        return is_running

    dtype = model.arithmetic.dtype
    state = {
        "step": jnp.int32(0),
        "previous": jnp.broadcast_to(first[:, None], (rows, lanes)),
        "finished": jnp.broadcast_to((lengths == 0)[:, None], (rows, lanes)),
        "cache": [
            (jnp.zeros(cache_shape, dtype), jnp.zeros(cache_shape, dtype)) for _ in range(config.num_decoder_layers)
        ],
        "tokens": jnp.zeros((rows, lanes, steps), jnp.int32),
        "is_finite": jnp.ones((rows,), bool),
    }
    state = jax.lax.while_loop(goes_on, generate_token, state)
    return state["tokens"], state["is_finite"]
