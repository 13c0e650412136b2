"""The engine, which computes the rows of a batch by XLA (`xla/`) or by native code (`cpu.py`), and its results.

Of packed rows, the head or another measure makes decisions; step by step, these become what the branches of a batch
generate. The work of a sweep is counted in rows that went through the model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from .branches import KnownOutput, PromptResult
from .kv_cache import Paths, Rows


@dataclasses.dataclass(frozen=True)
class Decisions:
    """Decisions of rows, each array of shape (rows,).

    Attributes:
      tokens: int32.
      low: float32. The confidence is at least this.
      high: float32. And at most this; the same number unless a certified head decided.
      is_finite: Whether all numbers that were used are finite.
    """

    tokens: np.ndarray
    _: dataclasses.KW_ONLY
    low: np.ndarray
    high: np.ndarray
    is_finite: np.ndarray

    @classmethod
    def measured(cls, confidences: np.ndarray) -> "Decisions":
        """Returns decisions by confidences that need no logits, for token 0."""
        tokens, is_finite = np.zeros(len(confidences), np.int32), np.isfinite(confidences)
        return cls(tokens, low=confidences, high=confidences, is_finite=is_finite)

    @classmethod
    def exact(cls, tokens: np.ndarray, *, confidences: np.ndarray, is_finite: np.ndarray) -> "Decisions":
        """Returns decisions by confidences that are known."""
        return cls(tokens, low=confidences.copy(), high=confidences.copy(), is_finite=is_finite)

    @property
    def confidences(self) -> np.ndarray:
        """The middle of every interval; the confidence itself where that is known."""
        # Halves of what is finite: a sum could overflow, and -inf stays what it is.
        return self.low / 2 + self.high / 2

    @classmethod
    def none(cls, rows: int, *, confidence: float) -> "Decisions":
        """Returns decisions for token 0 with one confidence, to be written over where rows are asked."""
        confidences = np.full(rows, confidence, np.float32)
        return cls.exact(np.zeros(rows, np.int32), confidences=confidences, is_finite=np.ones(rows, bool))

    def of_rows(self, rows: np.ndarray) -> "Decisions":
        """Returns the decisions of some rows, or of rows again and again."""
        return Decisions(self.tokens[rows], low=self.low[rows], high=self.high[rows], is_finite=self.is_finite[rows])

    def among(self, rows: np.ndarray, count: int) -> "Decisions":
        """Returns decisions of so many rows: these of some of them, ascending, and nothing of others (-inf)."""
        if len(rows) == count:
            return self
        of_all = Decisions.none(count, confidence=-np.inf)
        of_all.put(rows, self)
        return of_all

    def put(self, rows: np.ndarray | slice, decisions: "Decisions") -> None:
        """Writes the decisions of some rows."""
        for name in ("tokens", "low", "high", "is_finite"):
            getattr(self, name)[rows] = getattr(decisions, name)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Counts of a sweep; those of several are added.

    Attributes:
      prompts: Prompts decoded.
      steps: Steps that prompts were decoded in side by side, whatever their number; 0 where nobody counts them.
      tokens: Tokens of the full model's outputs.
      layer_rows: Rows that went through a decoder layer. One pass of the full model takes `tokens` times L.
      ahead_rows: Those of them that went through a layer above the one that their token left at, before that was known.
      projection_rows: Rows that were projected onto the vocabulary by the exact head. One pass of the full model takes
        `tokens`.
      certified_rows: Rows that a certified head was asked about; what it left open is in `projection_rows` too.
      ahead_decisions: How many of the rows that heads were asked about were such.
      fill_rows: Keys and values made of propagated states for a layer that was skipped.
      padded_rows: Rows of padding that went through layers beside `layer_rows`.
    """

    prompts: int = 0
    steps: int = 0
    tokens: int = 0
    layer_rows: int = 0
    ahead_rows: int = 0
    projection_rows: int = 0
    certified_rows: int = 0
    ahead_decisions: int = 0
    fill_rows: int = 0
    padded_rows: int = 0

    def __add__(self, other: "Work") -> "Work":
        # Written out: it is called at every layer of every step.
        return Work(
            prompts=self.prompts + other.prompts,
            steps=self.steps + other.steps,
            tokens=self.tokens + other.tokens,
            layer_rows=self.layer_rows + other.layer_rows,
            ahead_rows=self.ahead_rows + other.ahead_rows,
            projection_rows=self.projection_rows + other.projection_rows,
            certified_rows=self.certified_rows + other.certified_rows,
            ahead_decisions=self.ahead_decisions + other.ahead_decisions,
            fill_rows=self.fill_rows + other.fill_rows,
            padded_rows=self.padded_rows + other.padded_rows,
        )

    def __sub__(self, other: "Work") -> "Work":
        return Work(**{name: getattr(self, name) - getattr(other, name) for name in _NAMES})


_NAMES = tuple(field.name for field in dataclasses.fields(Work))


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """Room for the prompts of a batch, and where they stand; each array of shape (slots,).

    Attributes:
      tree: Their lanes.
      lanes: How many each has.
      steps: Most tokens of an output.
      sources: How many places there are for sources, by the width that they are padded to.
      prefixes: What all prompts of a width begin with, where it is gone through once for all of them.
      widths: What the prompt of each slot is padded to.
      places: Where its source stands among those of its width.
      lengths: Tokens of the prompt.
    """

    tree: Paths
    _: dataclasses.KW_ONLY
    lanes: int
    steps: int
    sources: Mapping[int, int]
    prefixes: Mapping[int, Sequence[int]]
    widths: np.ndarray
    places: np.ndarray
    lengths: np.ndarray

    @property
    def num_lanes(self) -> int:
        """Lanes of all slots together."""
        return len(self.places) * self.lanes


class RunStep(Protocol):
    """Takes the rows of prompts that have one lane each through layers until each has left."""

    def __call__(self, rows: Rows, *, thresholds: np.ndarray, known_exits: np.ndarray | None, new: StepOutputs) -> Work:
        """Writes what a step gives rows to `new`, and returns what was done for it; arguments are those of `Step.run`.

        Args:
          rows: With embeddings in entry 0.
          thresholds: shape (slots, 1).
          known_exits: Likewise, or None.
          new: As of `StepOutputs.none`.
        """


class Engine(Protocol):
    """States of every lane after every layer, keys and values of nodes and sources, and what is computed of them.

    States are given by layer and lane: entry 0 is the embedding, a lane is a number in (slots * lanes).
    """

    @property
    def whole_step(self) -> RunStep | None:
        """What runs a step as one; None where it is run in parts, by `run_layers` and `decide`."""

    def prefill(self, width: int, source_tokens: np.ndarray, *, lengths: np.ndarray, places: np.ndarray) -> None:
        """Gives places keys and values of prompts.

        Args:
          width: Which sources.
          source_tokens: int32, shape (rows, encoded width). 0-padded.
          lengths: int32, shape (rows,). Tokens of each prompt.
          places: int32, shape (rows,). Beyond the last for rows of padding.
        """

    def grow(self, added: int) -> None:
        """Adds nodes to the store of every layer."""

    def embed(self, lanes: np.ndarray, tokens: np.ndarray) -> None:
        """Puts the embeddings of tokens, (rows,), into entry 0."""

    def run_layers(self, layers: range, rows: Rows, *, below: np.ndarray) -> tuple[np.ndarray, Work]:
        """Runs layers for rows, one after the other.

        Args:
          layers: Which, ascending without gaps; several only where no two lanes share anything.
          rows: All that go through them.
          below: shape (rows,). Where their inputs stand in the entry below the first; each layer leaves its outputs
            where the next one looks for them.

        Returns:
          float32, shape (measures, layers, rows): confidences by the measures that are made of states, 0 by others; and
          what was done for it.
        """

    def decide(self, layers: np.ndarray, lanes: np.ndarray, **compared: np.ndarray) -> tuple[list[Decisions], Work]:
        """Returns what the heads decide of states, and what was asked for it; `compared` as in `HeadDecisions.of`.

        The decisions differ in their confidences: there is one for each measure of logits, in order, and one of
        confidence 0 where there is none.
        """

    def keep_skipped(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        """Gives nodes of the layers that tokens skipped what these make of states.

        Args:
          layers: shape (rows,). Of the states.
          lanes: Likewise.
          nodes: int32, shape (layers - 1, rows). Of layers 2 to L; beyond the store where a layer was not skipped.
        """

    def copy_skipped(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray) -> None:
        """Gives them what the layer of each state has kept itself, as `keep_skipped` is told."""

    def run_on_padding(self) -> None:
        """Compiles whatever prompts may need: every step is run once, on padding only."""
