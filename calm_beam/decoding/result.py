"""What decoders give back for one prompt."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Outputs of one prompt in every lane; lane 0 is the full model, lane k the k-th threshold.

    Attributes:
      tokens: int32, shape (lanes, max_decode_length). 0 after the output's end; eos is part of the output.
      exit_layers: int32, shape of `tokens`. Layers used, counted from 1; 0 after the end.
      confidences: float32, shape of `tokens`. Confidence at the exit layer; 0 after the end. It is the
        last layer's in the full model's lane, and wherever a token went that far. Where a certified head decided, it is
        the middle of an interval that contains the confidence.
      lengths: int32, shape (lanes,). Number of tokens, eos included.
      is_finite: Whether all logits and confidences that were used are finite numbers.
      runner_ups: float32, shape of `tokens`. Largest confidence, or end of an interval that contains it, at the layers
        below the exit layer that may exit: down to a threshold above it the step stays as it is. -inf where there is
        none or, in the full model's lane, nobody asked. None from a sweep that does not tell.
      near_ties: bool, shape (lanes,). Which outputs are known to have hung on a near tie, as in `near_ties`; None where
        that is not told of any.
    """

    tokens: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    lengths: np.ndarray
    is_finite: bool
    runner_ups: np.ndarray | None = None
    near_ties: np.ndarray | None = None

    def by_rule(self, count: int) -> "list[SweepResult]":
        """Returns the outputs by each of so many rules, which have as many lanes each, one rule after the other."""
        arrays = (self.tokens, self.exit_layers, self.confidences, self.lengths, self.runner_ups, self.near_ties)
        parts = ([None] * count if values is None else np.split(values, count) for values in arrays)
        return [
            SweepResult(
                tokens=tokens,
                exit_layers=exit_layers,
                confidences=confidences,
                lengths=lengths,
                is_finite=self.is_finite,
                runner_ups=runner_ups,
                near_ties=near_ties,
            )
            for tokens, exit_layers, confidences, lengths, runner_ups, near_ties in zip(*parts, strict=True)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyExitResult:
    """The output of one prompt.

    Attributes:
      tokens: int32, shape (max_decode_length,). 0 after the output's end; eos is part of the output.
      exit_layers: int32, shape of `tokens`. Layers used, counted from 1; 0 after the end.
      confidences: float32, shape of `tokens`. Confidence at the exit layer, or the middle of an interval that contains
        it (`exit_head`); 0 after the end. The full model asks the last layer alone: `patience` gives 1 / k there.
      length: Number of tokens, eos included.
      is_finite: Whether all logits and confidences that were used are finite numbers; if not, the tokens mean nothing.
      runner_ups: float32, shape of `tokens`, as in `SweepResult`; None from a decoder that does not tell.
    """

    tokens: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    length: int
    is_finite: bool
    runner_ups: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownOutput:
    """The output of a prompt at a threshold above all that are to be decoded.

    Attributes:
      tokens: int32, shape (length,).
      exit_layers: int32, shape (length,).
      confidences: float32, shape (length,).
      runner_ups: float32, shape (length,).
      goes_on: Whether outputs that share all of it have more tokens, which are to be decoded.
    """

    tokens: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    runner_ups: np.ndarray
    goes_on: bool = False

    @classmethod
    def beginning(cls, tokens: Sequence[int], *, layers: int) -> Self:
        """Returns the first tokens of an output by the full model, of so many layers, which goes on after them."""
        count = len(tokens)
        return cls(
            tokens=np.array(tokens, np.int32),
            exit_layers=np.full(count, layers, np.int32),
            confidences=np.zeros(count, np.float32),
            runner_ups=np.full(count, -np.inf, np.float32),
            goes_on=True,
        )

    def steps_shared(self, thresholds: np.ndarray) -> np.ndarray:
        """Returns how many of its first steps each lane has in common with it.

        A layer below the exit layer whose confidence does not reach a threshold is no exit at that threshold either,
        and the exit layer is one at every lower threshold.

        Args:
          thresholds: float32, shape (steps, lanes). Below those of the known output.

        Returns:
          int, shape (lanes,), up to the output's length.
        """
        parts = self.runner_ups[:, None] >= thresholds[: len(self.tokens)]
        return np.where(parts.any(axis=0), parts.argmax(axis=0), len(self.tokens))
