"""The cost of one wrong token, by its position (CALM, "Sensitivity to local errors", Figure 2a).

The full model's greedy outputs are decoded again with one token replaced, for many positions at once. The replacements
are read from a pass over the full model's output. Each output with a replacement is decoded as a separate request
that starts with the given tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import Branch, BranchResult, KnownOutput, Request
from calm_beam.decoding.compilation import members_by_width
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.isolation import DecodeError
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.vocabularies.vocabulary import output_text
from calm_beam.model import architecture_of, network_of
from calm_beam.model.interface import EarlyExitModel, Taught
from calm_beam.precision import FLOAT32, Precision
from calm_beam.training.batches import BatchShape, pad_batch

from .performance import Estimate, Task, estimated_mean

if TYPE_CHECKING:
    pass


KINDS = ("sampling", "layer")
"""Kinds of replacement: the last layer's token of a given rank, or the first layer's prediction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The effect of replacing the token at one position on the whole output.

    Attributes:
      kind: One of `KINDS`.
      position: Position of the token, from 0.
      similarity: Score of the perturbed output against the unperturbed one, over the prompts whose output is that long.
      replaced: Share of those prompts whose token was replaced by another; the first layer may predict the same one.
    """

    kind: str
    position: int
    similarity: Estimate
    replaced: float


def measure_sensitivity(
    task: Task, decoder: "PerturbationDecoder", *, decoded: Callable[[], None]
) -> list[Sensitivity]:
    """Returns the sensitivity of every kind and position that some output has, kind by kind, positions ascending.

    Args:
      task: Prompts and metric.
      decoder: Replaces the tokens.
      decoded: Called after every prompt.

    Raises:
      DecodeError: If logits are not finite; names the example.
      MetricError: If the metric fails or leaves [0, 1]; names the example.
    """
    similarities: dict[tuple[str, int], list[float]] = {}
    replacements: dict[tuple[str, int], int] = {}
    for index, perturbed in decoder.decode([prompt.ids for prompt in task.prompts]):
        for lane, similarity in _similarities(task, index, perturbed=perturbed).items():
            similarities.setdefault(lane, []).append(similarity)
            is_other = perturbed.outputs[lane][lane[1]] != perturbed.unperturbed[lane[1]]
            replacements[lane] = replacements.get(lane, 0) + is_other
        decoded()
    return [
        Sensitivity(
            kind=kind,
            position=position,
            similarity=estimated_mean(similarities[kind, position]),
            replaced=replacements[kind, position] / len(similarities[kind, position]),
        )
        for kind, position in sorted(similarities, key=lambda lane: (KINDS.index(lane[0]), lane[1]))
    ]


def _similarities(task: Task, index: int, *, perturbed: "Perturbed") -> dict[tuple[str, int], float]:
    """Returns the score of every perturbed output of a prompt against the unperturbed one."""
    example = task.prompts[index].example
    if not perturbed.is_finite:
        raise DecodeError(f"{example.in_words()}: the model gave logits that are not finite. Check the checkpoint.")
    texts = {lane: output_text(tokens, task.vocabulary) for lane, tokens in perturbed.outputs.items()}
    scores = task.scores(example.id, texts.values(), references=(output_text(perturbed.unperturbed, task.vocabulary),))
    return {lane: scores[text] for lane, text in texts.items()}


# Outputs per call that predicts all their tokens.
_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perturbed:
    """The outputs of one prompt. Token ids end with eos if it was generated.

    Attributes:
      unperturbed: The full model's greedy output.
      outputs: By kind and position (from 0), the whole output if the token there is replaced; only positions that the
        unperturbed output has.
      is_finite: Whether all logits that were used are finite numbers.
    """

    unperturbed: tuple[int, ...]
    outputs: Mapping[tuple[str, int], tuple[int, ...]]
    is_finite: bool


class PerturbationDecoder:
    """Decodes prompts with single tokens replaced."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        positions: Sequence[int],
        rank: int,
        max_decode_length: int,
        max_input_length: int = 512,
        batch_size: int | None = None,
        precision: Precision = FLOAT32,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          positions: Positions at which to replace a token, from 0, one at a time.
          rank: Rank of the last layer's token that replaces its first choice in the kind `sampling`, from 1.
          max_decode_length: Largest number of tokens to generate, eos included.
          max_input_length: Largest number of tokens of a prompt.
          batch_size: Largest number of outputs decoded together; None for as many as memory and speed recommend.
          precision: Precision in which the model computes.

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
        self._model = network_of(checkpoint.config, precision=precision)
        self._parameters = jax.device_put({"params": checkpoint.parameters(precision)})
        self._lanes = tuple((kind, position) for kind in KINDS for position in positions)
        self._rank = rank
        self._steps = max_decode_length
        self._max_input_length = max_input_length
        self._decoder = Decoder(
            checkpoint,
            [Branch.at(ExitRule(), None, max_decode_length=max_decode_length)],
            max_input_length=max_input_length,
            batch_size=batch_size,
            precision=precision,
        )

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Perturbed]]:
        """Yields the outputs of every prompt, with its index, not in order.

        Args:
          prompts: Token ids of each prompt, 1 to `max_input_length` of them.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        unperturbed = dict(self._decoded(prompts))
        replacements = self._replacements(prompts, unperturbed)
        lanes = [
            (index, (kind, position))
            for index, result in sorted(unperturbed.items())
            for kind, position in self._lanes
            if position < result.length
        ]
        requests = [
            Request(
                prompts[index],
                known=KnownOutput.beginning(
                    [*_tokens(unperturbed[index])[:position], int(replacements[index][kind][position])],
                    layers=self._model.config.num_decoder_layers,
                ),
            )
            for index, (kind, position) in lanes
        ]
        missing = {index: sum(owner == index for owner, _ in lanes) for index in unperturbed}
        found: dict[int, dict[tuple[str, int], BranchResult]] = {index: {} for index in unperturbed}
        yield from (
            (index, _perturbed(unperturbed[index], {})) for index, count in sorted(missing.items()) if not count
        )
        for request, result in self._decoded(requests):
            index, lane = lanes[request]
            found[index][lane] = result
            if len(found[index]) == missing[index]:
                in_order = {lane: found[index][lane] for lane in self._lanes if lane in found[index]}
                yield index, _perturbed(unperturbed[index], in_order)

    def _decoded(self, prompts: Sequence[Request | Sequence[int]]) -> Iterator[tuple[int, BranchResult]]:
        for index, result in self._decoder.decode(prompts):
            yield index, result.branch(0)

    def _replacements(
        self, prompts: Sequence[Sequence[int]], outputs: Mapping[int, BranchResult]
    ) -> dict[int, dict[str, np.ndarray]]:
        """Returns by prompt and kind the replacement of each token of an output, int32 of shape (steps,)."""
        architecture = architecture_of(self._model.config)
        found = {}
        for members in members_by_width(prompts, self._max_input_length).values():
            pairs = [
                (architecture.taught_source(prompts[i], tokens), tokens)
                for i in members
                for tokens in [_tokens(outputs[i])]
            ]
            longest = max(len(source) for source, _ in pairs)
            shape = BatchShape(rows=_ROWS, source=longest, target=self._steps)
            for start in range(0, len(members), _ROWS):
                batch = pad_batch(pairs[start : start + _ROWS], shape)
                ranked, lowest = jax.device_get(_predicted(self._model, self._rank, self._parameters, batch))
                for row, index in enumerate(members[start : start + _ROWS]):
                    found[index] = {"sampling": ranked[row], "layer": lowest[row]}
        return found


def _tokens(result: BranchResult) -> list[int]:
    tokens: list[int] = result.tokens[: result.length].tolist()
    return tokens


def _perturbed(unperturbed: BranchResult, outputs: Mapping[tuple[str, int], BranchResult]) -> Perturbed:
    return Perturbed(
        unperturbed=tuple(_tokens(unperturbed)),
        outputs={lane: tuple(_tokens(output)) for lane, output in outputs.items()},
        is_finite=unperturbed.is_finite and all(output.is_finite for output in outputs.values()),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _predicted(model: EarlyExitModel, rank: int, parameters: Any, batch: Taught) -> tuple[jax.Array, jax.Array]:
    """Returns the last layer's token of a rank, and the first layer's token, after each prefix of an output.

    Both int32, shape (rows, target).
    """
    apply = functools.partial(model.apply, parameters)
    states = apply(batch, method="teacher_forced")
    ranked = jax.lax.top_k(apply(states[-1], model.config.num_decoder_layers, method="head"), rank)[1][..., -1]
    return ranked, jnp.argmax(apply(states[0], 1, method="head"), axis=-1).astype(jnp.int32)
