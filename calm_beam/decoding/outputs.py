"""What the lanes of a batch generate, step by step."""

import dataclasses

import numpy as np

from .decisions import Decisions
from .result import KnownOutput, PromptResult

# What is kept of every step, of a lane and of a known output alike.
_KEPT = ("tokens", "exit_layers", "confidences", "max_rejected_confidence")


@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """What one step gave every lane; each of shape (slots, lanes), 0 where a lane did not take part."""

    tokens: np.ndarray
    exit_layers: np.ndarray
    _: dataclasses.KW_ONLY
    confidences: np.ndarray
    max_rejected_confidence: np.ndarray
    is_finite: np.ndarray

    @classmethod
    def none(cls, shape: tuple[int, int]) -> "StepOutputs":
        """Returns outputs of lanes that have not taken part yet."""
        return cls(
            tokens=np.zeros(shape, np.int32),
            exit_layers=np.zeros(shape, np.int32),
            confidences=np.zeros(shape, np.float32),
            max_rejected_confidence=np.full(shape, -np.inf, np.float32),
            is_finite=np.ones(shape, bool),
        )

    def put(self, lanes: np.ndarray, decided: Decisions, *, layer: int | np.ndarray) -> None:
        """Writes what is decided of lanes at a layer, or each at its own; both are those of `by_lane`."""
        confidences = decided.confidences
        self.tokens[lanes] = decided.tokens
        self.exit_layers[lanes] = layer
        self.confidences[lanes] = confidences
        self.is_finite[lanes] = decided.is_finite & np.isfinite(confidences)

    def put_known(self, outputs: "Outputs", step: np.ndarray, *, is_known: np.ndarray) -> None:
        """Writes what stands in the output of lanes already."""
        slots, lanes = np.nonzero(is_known)
        at_step = slots, lanes, step[slots]
        for name in _KEPT:
            getattr(self, name)[is_known] = getattr(outputs, name)[at_step]
        self.is_finite[is_known] = True

    def by_lane(self) -> "StepOutputs":
        """Returns views of the same, each of shape (slots * lanes,)."""
        return StepOutputs(
            self.tokens.reshape(-1),
            self.exit_layers.reshape(-1),
            confidences=self.confidences.reshape(-1),
            max_rejected_confidence=self.max_rejected_confidence.reshape(-1),
            is_finite=self.is_finite.reshape(-1),
        )


class Outputs:
    """What the lanes of every slot have generated so far; each of shape (slots, lanes, steps)."""

    def __init__(self, slots: int, lanes: int, *, steps: int) -> None:
        self.tokens = np.zeros((slots, lanes, steps), np.int32)
        self.exit_layers = np.zeros((slots, lanes, steps), np.int32)
        self.confidences = np.zeros((slots, lanes, steps), np.float32)
        self.max_rejected_confidence = np.zeros((slots, lanes, steps), np.float32)

    def clear(self, slots: np.ndarray) -> None:
        """Empties slots."""
        for name in _KEPT:
            getattr(self, name)[slots] = 0

    def share(self, slot: int, known: KnownOutput, *, steps: np.ndarray) -> None:
        """Copies the first steps of a known output to the lanes of a slot, for each lane as many as are given."""
        length = len(known.tokens)
        is_shared = np.arange(length) < steps[:, None]
        for name in _KEPT:
            shared = getattr(self, name)[slot, :, :length]
            shared[:] = np.where(is_shared, getattr(known, name), shared)

    def exits_at(self, step: np.ndarray, *, is_known: np.ndarray) -> np.ndarray:
        """Returns the exit layers that stand in the output of lanes, (slots, lanes), at a step of each slot; else 0."""
        exits: np.ndarray = np.where(is_known, self.exit_layers[np.arange(len(step)), :, step], 0)
        return exits

    def append(self, new: StepOutputs, step: np.ndarray, *, live: np.ndarray) -> None:
        """Adds what a step gave the live lanes."""
        slots, lanes = np.nonzero(live)
        at_step = slots, lanes, step[slots]
        for name in _KEPT:
            getattr(self, name)[at_step] = getattr(new, name)[live]

    def result(self, slot: int, *, is_finite: bool) -> PromptResult:
        """Returns the outputs of a prompt that has ended."""
        return PromptResult(
            tokens=self.tokens[slot].copy(),
            exit_layers=self.exit_layers[slot].copy(),
            confidences=self.confidences[slot].copy(),
            lengths=(self.exit_layers[slot] > 0).sum(axis=1, dtype=np.int32),
            is_finite=is_finite,
            max_rejected_confidence=self.max_rejected_confidence[slot].copy(),
        )
