"""What computes the rows of a batch: by XLA (`xla/`) or by native code (`cpu/`)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from .decisions import Decisions
from .outputs import StepOutputs
from .paths import Paths, Rows
from .work import Work


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
