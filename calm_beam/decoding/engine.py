"""The engine, which computes the rows of a batch by XLA (`xla/`) or by native code (`cpu.py`), and its results.

The engine returns decisions for packed rows, by the head or another measure. Step by step, these become the outputs of
a batch's branches. The work of a sweep is counted in rows per layer.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from .branches import KnownOutput, PromptResult
from .kv_cache import Paths, Rows


@dataclasses.dataclass(frozen=True)
class Decisions:
    """Decisions for rows, each array of shape (rows,).

    Attributes:
      tokens: int32. Predicted tokens.
      low: float32. Lower bound of the confidence.
      high: float32. Upper bound of the confidence; equal to `low` unless a certified head decided.
      is_finite: Whether all numbers that were used are finite.
    """

    tokens: np.ndarray
    _: dataclasses.KW_ONLY
    low: np.ndarray
    high: np.ndarray
    is_finite: np.ndarray

    @classmethod
    def measured(cls, confidences: np.ndarray) -> "Decisions":
        """Returns decisions with token 0, by confidences that need no logits."""
        tokens, is_finite = np.zeros(len(confidences), np.int32), np.isfinite(confidences)
        return cls(tokens, low=confidences, high=confidences, is_finite=is_finite)

    @classmethod
    def exact(cls, tokens: np.ndarray, *, confidences: np.ndarray, is_finite: np.ndarray) -> "Decisions":
        """Returns decisions with exactly known confidences."""
        return cls(tokens, low=confidences.copy(), high=confidences.copy(), is_finite=is_finite)

    @property
    def confidences(self) -> np.ndarray:
        """The middle of every interval; the confidence itself where it is known exactly."""
        # Add halves: a sum of finite numbers could overflow, and -inf must stay -inf.
        return self.low / 2 + self.high / 2

    @classmethod
    def none(cls, rows: int, *, confidence: float) -> "Decisions":
        """Returns decisions with token 0 and one confidence, to be overwritten where rows are asked."""
        confidences = np.full(rows, confidence, np.float32)
        return cls.exact(np.zeros(rows, np.int32), confidences=confidences, is_finite=np.ones(rows, bool))

    def of_rows(self, rows: np.ndarray) -> "Decisions":
        """Returns the decisions of the rows at some indices, which may repeat."""
        return Decisions(self.tokens[rows], low=self.low[rows], high=self.high[rows], is_finite=self.is_finite[rows])

    def among(self, rows: np.ndarray, count: int) -> "Decisions":
        """Returns decisions for `count` rows: these at the given rows, ascending, and confidence -inf elsewhere."""
        if len(rows) == count:
            return self
        of_all = Decisions.none(count, confidence=-np.inf)
        of_all.put(rows, self)
        return of_all

    def put(self, rows: np.ndarray | slice, decisions: "Decisions") -> None:
        """Writes the decisions of some rows."""
        for name in ("tokens", "low", "high", "is_finite"):
            getattr(self, name)[rows] = getattr(decisions, name)


# Fields that are stored for every step, in outputs of branches and in known outputs alike.
_KEPT = ("tokens", "exit_layers", "confidences", "max_rejected_confidence")


@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """The results of one step; each of shape (slots, branches), 0 where a branch did not take part."""

    tokens: np.ndarray
    exit_layers: np.ndarray
    _: dataclasses.KW_ONLY
    confidences: np.ndarray
    max_rejected_confidence: np.ndarray
    is_finite: np.ndarray

    @classmethod
    def none(cls, shape: tuple[int, int]) -> "StepOutputs":
        """Returns the outputs of a step in which no branch has taken part yet."""
        return cls(
            tokens=np.zeros(shape, np.int32),
            exit_layers=np.zeros(shape, np.int32),
            confidences=np.zeros(shape, np.float32),
            max_rejected_confidence=np.full(shape, -np.inf, np.float32),
            is_finite=np.ones(shape, bool),
        )

    def put(self, branches: np.ndarray, decided: Decisions, *, layer: int | np.ndarray) -> None:
        """Writes the decisions for branches at a layer, or at one layer each; call it on the views of `by_branch`."""
        confidences = decided.confidences
        self.tokens[branches] = decided.tokens
        self.exit_layers[branches] = layer
        self.confidences[branches] = confidences
        self.is_finite[branches] = decided.is_finite & np.isfinite(confidences)

    def put_known(self, outputs: "Outputs", step: np.ndarray, *, is_known: np.ndarray) -> None:
        """Writes the steps of branches whose output has them already."""
        slots, branches = np.nonzero(is_known)
        at_step = slots, branches, step[slots]
        for name in _KEPT:
            getattr(self, name)[is_known] = getattr(outputs, name)[at_step]
        self.is_finite[is_known] = True

    def by_branch(self) -> "StepOutputs":
        """Returns views of the same arrays, each of shape (slots * branches,)."""
        return StepOutputs(
            self.tokens.reshape(-1),
            self.exit_layers.reshape(-1),
            confidences=self.confidences.reshape(-1),
            max_rejected_confidence=self.max_rejected_confidence.reshape(-1),
            is_finite=self.is_finite.reshape(-1),
        )


class Outputs:
    """The outputs of every slot's branches so far; each of shape (slots, branches, steps)."""

    def __init__(self, slots: int, num_branches: int, *, steps: int) -> None:
        self.tokens = np.zeros((slots, num_branches, steps), np.int32)
        self.exit_layers = np.zeros((slots, num_branches, steps), np.int32)
        self.confidences = np.zeros((slots, num_branches, steps), np.float32)
        self.max_rejected_confidence = np.zeros((slots, num_branches, steps), np.float32)

    def clear(self, slots: np.ndarray) -> None:
        """Empties slots."""
        for name in _KEPT:
            getattr(self, name)[slots] = 0

    def share(self, slot: int, known: KnownOutput, *, steps: np.ndarray) -> None:
        """Copies the first steps of a known output to the branches of a slot; `steps` has their number for each."""
        length = len(known.tokens)
        is_shared = np.arange(length) < steps[:, None]
        for name in _KEPT:
            shared = getattr(self, name)[slot, :, :length]
            shared[:] = np.where(is_shared, getattr(known, name), shared)

    def exits_at(self, step: np.ndarray, *, is_known: np.ndarray) -> np.ndarray:
        """Returns the known exit layers of branches, (slots, branches), at a step of each slot; 0 where not known."""
        exits: np.ndarray = np.where(is_known, self.exit_layers[np.arange(len(step)), :, step], 0)
        return exits

    def append(self, new: StepOutputs, step: np.ndarray, *, live: np.ndarray) -> None:
        """Adds the results of a step to the outputs of the live branches."""
        slots, branches = np.nonzero(live)
        at_step = slots, branches, step[slots]
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
    """Counts of the work of a sweep; counts of several sweeps are added.

    Attributes:
      prompts: Prompts decoded.
      steps: Steps of a batch, each with any number of prompts; 0 where they are not counted.
      tokens: Tokens of the full model's outputs.
      layer_rows: Rows that ran a decoder layer. One pass of the full model takes `tokens` times L.
      ahead_rows: Rows of `layer_rows` that ran a layer above their token's exit, before the exit was known.
      projection_rows: Rows that were projected onto the vocabulary by the exact head. One pass of the full model takes
        `tokens`.
      certified_rows: Rows that a certified head was asked about; rows that it left open also count in
        `projection_rows`.
      ahead_decisions: How many of the rows that heads were asked about were above their token's exit.
      fill_rows: Keys and values computed from propagated states for skipped layers.
      padded_rows: Padding rows that ran layers, not counted in `layer_rows`.
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
    """The slots of a batch, with the place and length of each prompt; each array of shape (slots,).

    Attributes:
      tree: Paths of the branches.
      num_branches: Branches of each slot.
      steps: Most tokens of an output.
      sources: How many places there are for sources, by padded width.
      prefixes: By width, the common prefix of its prompts, where it is prefilled once for all of them.
      widths: Padded width of each slot's prompt.
      places: Place of its source among the sources of its width.
      lengths: Tokens of the prompt.
    """

    tree: Paths
    _: dataclasses.KW_ONLY
    num_branches: int
    steps: int
    sources: Mapping[int, int]
    prefixes: Mapping[int, Sequence[int]]
    widths: np.ndarray
    places: np.ndarray
    lengths: np.ndarray

    @property
    def total_branches(self) -> int:
        """Branches of all slots together."""
        return len(self.places) * self.num_branches


class RunStep(Protocol):
    """Runs layers for prompts that have one branch each, until every row has exited."""

    def __call__(self, rows: Rows, *, thresholds: np.ndarray, known_exits: np.ndarray | None, new: StepOutputs) -> Work:
        """Writes the results of a step to `new`, and returns the work counted; see `Step.run`.

        Args:
          rows: Rows whose embeddings are in entry 0.
          thresholds: shape (slots, 1).
          known_exits: shape (slots, 1), or None.
          new: Empty outputs, as `StepOutputs.none` returns them.
        """


class Engine(Protocol):
    """Holds the states of every branch after every layer, and keys and values of nodes and sources; computes with them.

    States are indexed by layer and branch: entry 0 is the embedding, a branch is a number in (slots * branches).
    """

    @property
    def whole_step(self) -> RunStep | None:
        """Runs a whole step in one call; None if a step is run in parts, by `run_layers` and `decide`."""

    def prefill(self, width: int, source_tokens: np.ndarray, *, lengths: np.ndarray, places: np.ndarray) -> None:
        """Prefills prompts and stores their keys and values at places.

        Args:
          width: Padded width of the sources.
          source_tokens: int32, shape (rows, encoded width). 0-padded.
          lengths: int32, shape (rows,). Tokens of each prompt.
          places: int32, shape (rows,). Beyond the last for rows of padding.
        """

    def grow(self, added: int) -> None:
        """Adds nodes to the store of every layer."""

    def embed(self, branches: np.ndarray, tokens: np.ndarray) -> None:
        """Writes the embeddings of tokens, (rows,), to entry 0."""

    def run_layers(self, layers: range, rows: Rows, *, below: np.ndarray) -> tuple[np.ndarray, Work]:
        """Runs layers for rows, one after the other.

        Args:
          layers: Layers to run, ascending without gaps; several only where no two branches share anything.
          rows: All rows that run them.
          below: shape (rows,). Branches of the inputs in the entry below the first layer; each further layer reads the
            outputs of the layer before.

        Returns:
          float32, shape (measures, layers, rows): confidences by the measures of states, 0 by others; and the work
          counted.
        """

    def decide(self, layers: np.ndarray, branches: np.ndarray, **compared: np.ndarray) -> tuple[list[Decisions], Work]:
        """Returns the heads' decisions for states, and the work counted; `compared` as in `HeadDecisions.of`.

        There is one `Decisions` for each measure of logits, in order, which differ in their confidences; without such a
        measure, there is one with confidence 0.
        """

    def keep_skipped(self, layers: np.ndarray, branches: np.ndarray, nodes: np.ndarray) -> None:
        """Computes keys and values of skipped layers from states, and stores them at nodes.

        Args:
          layers: shape (rows,). Layers of the states.
          branches: shape (rows,). Branches of the states.
          nodes: int32, shape (layers - 1, rows). Nodes of layers 2 to L; beyond the store where a layer was not
            skipped.
        """

    def copy_skipped(self, layers: np.ndarray, branches: np.ndarray, nodes: np.ndarray) -> None:
        """Copies keys and values of each state's own layer to nodes of skipped layers; arguments as `keep_skipped`."""

    def run_on_padding(self) -> None:
        """Compiles everything that prompts may need, by running every step once on padding only."""
