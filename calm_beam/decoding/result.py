"""What decoders give back for one prompt."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

NearTies = tuple[bool | None, ...]
"""Of each branch of a prompt, whether its output hung on a near tie (`near_ties`), or None where that is not seen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchResult:
    """The output of one prompt by one branch.

    Attributes:
      tokens: int32, shape (max_decode_length,). 0 after the output's end; eos is part of the output.
      exit_layers: int32, shape of `tokens`. Layers used, counted from 1; 0 after the end.
      confidences: float32, shape of `tokens`. Confidence at the exit layer, or the middle of an interval that contains
        it (`exit_head`); 0 after the end. The full model asks the last layer alone: `patience` gives 1 / k there.
      length: Number of tokens, eos included.
      is_finite: Whether all logits and confidences that were used are finite numbers; if not, the tokens mean nothing.
      max_rejected_confidence: float32, shape of `tokens`, as in `PromptResult`; None from a decoder that does not tell.
    """

    tokens: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    length: int
    is_finite: bool
    max_rejected_confidence: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptResult:
    """The outputs of one prompt by all of its branches.

    Attributes:
      tokens: int32, shape (branches, max_decode_length). 0 after the output's end; eos is part of the output.
      exit_layers: int32, shape of `tokens`. Layers used, counted from 1; 0 after the end.
      confidences: float32, shape of `tokens`. Confidence at the exit layer; 0 after the end. It is the last layer's by
        the full model, and wherever a token went that far. Where a certified head decided, it is the middle of an
        interval that contains the confidence.
      lengths: int32, shape (branches,). Number of tokens, eos included.
      is_finite: Whether all logits and confidences that were used are finite numbers.
      max_rejected_confidence: float32, shape of `tokens`. Largest confidence, or end of an interval that contains it,
        at the layers below the exit layer that may exit: down to a threshold above it the step stays as it is. -inf
        where there is none, or where the full model tested none. None from a decoder that does not tell.
      find_near_ties: Returns `near_ties` of a result; None from a decoder that does not tell.
    """

    tokens: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    lengths: np.ndarray
    is_finite: bool
    max_rejected_confidence: np.ndarray | None = None
    find_near_ties: "Callable[[PromptResult], NearTies | None] | None" = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @classmethod
    def joined(cls, results: "Sequence[PromptResult]") -> Self:
        """Returns the outputs of one prompt, given those by some branches and those by others, all by one decoder."""
        told = [result.max_rejected_confidence for result in results if result.max_rejected_confidence is not None]
        near_ties = [result.near_ties for result in results]
        return cls(
            tokens=np.concatenate([result.tokens for result in results]),
            exit_layers=np.concatenate([result.exit_layers for result in results]),
            confidences=np.concatenate([result.confidences for result in results]),
            lengths=np.concatenate([result.lengths for result in results]),
            is_finite=all(result.is_finite for result in results),
            max_rejected_confidence=np.concatenate(told) if told else None,
            find_near_ties=lambda _: None if None in near_ties else tuple(itertools.chain(*filter(None, near_ties))),
        )

    @functools.cached_property
    def near_ties(self) -> NearTies | None:
        """Whether each output hung on a near tie, or None where that is not seen; None where it is told of none."""
        return None if self.find_near_ties is None else self.find_near_ties(self)

    def branch(self, index: int) -> BranchResult:
        """Returns the output by one branch."""
        rejected = self.max_rejected_confidence
        return BranchResult(
            tokens=self.tokens[index],
            exit_layers=self.exit_layers[index],
            confidences=self.confidences[index],
            length=int(self.lengths[index]),
            is_finite=self.is_finite,
            max_rejected_confidence=None if rejected is None else rejected[index],
        )

    def by_rule(self, count: int) -> list[Self]:
        """Returns the outputs by each of so many rules, which have as many branches each, one rule after the other."""
        each, rest = divmod(len(self.lengths), count)
        assert not rest, "every rule has as many branches"
        return [self._some(slice(first, first + each)) for first in range(0, len(self.lengths), each)]

    def _some(self, chosen: slice) -> Self:
        rejected = self.max_rejected_confidence
        return dataclasses.replace(
            self,
            tokens=self.tokens[chosen],
            exit_layers=self.exit_layers[chosen],
            confidences=self.confidences[chosen],
            lengths=self.lengths[chosen],
            max_rejected_confidence=None if rejected is None else rejected[chosen],
            find_near_ties=lambda _: None if self.near_ties is None else self.near_ties[chosen],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownOutput:
    """The output of a prompt at a threshold above all that are to be decoded.

    Attributes:
      tokens: int32, shape (length,).
      exit_layers: int32, shape (length,).
      confidences: float32, shape (length,).
      max_rejected_confidence: float32, shape (length,).
      goes_on: Whether outputs that share all of it have more tokens, which are to be decoded.
    """

    tokens: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    max_rejected_confidence: np.ndarray
    goes_on: bool = False

    @classmethod
    def beginning(cls, tokens: Sequence[int], *, layers: int) -> Self:
        """Returns the first tokens of an output by the full model, of so many layers, which goes on after them."""
        count = len(tokens)
        return cls(
            tokens=np.array(tokens, np.int32),
            exit_layers=np.full(count, layers, np.int32),
            confidences=np.zeros(count, np.float32),
            max_rejected_confidence=np.full(count, -np.inf, np.float32),
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
        parts = self.max_rejected_confidence[:, None] >= thresholds[: len(self.tokens)]
        return np.where(parts.any(axis=0), parts.argmax(axis=0), len(self.tokens))
