"""What an engine is told of lanes: the rows that it runs, and the nodes that they attend to."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Rows(NamedTuple):
    """Rows that go through layers at one step, ordered by prompt.

    Attributes:
      lanes: shape (rows,). The entry of each, as a number in (slots * lanes).
      slots: shape (rows,). The prompt's slot.
      steps: shape (rows,). The prompt's step, from 0.
      nodes: shape (rows,). The node that a layer makes of this token.
    """

    lanes: np.ndarray
    slots: np.ndarray
    steps: np.ndarray
    nodes: np.ndarray


class Paths(Protocol):
    """Nodes of the prompts in a batch of slots.

    What a layer has kept of one token is a *node*: a row of that layer's store of keys and values. Each lane has its
    path, the nodes that it attends to.

    Attributes:
      step: int32, shape (slots,). The step of each prompt, from 0; changed in place, since native code reads it there.
    """

    step: np.ndarray

    @property
    def capacity(self) -> int:
        """Nodes of each layer's store."""

    def room(self) -> int:
        """Returns how many nodes every layer has left. A step takes at most one per live lane."""

    def grow(self, added: int) -> None:
        """Adds free nodes to every layer's store."""

    def admit(self, slots: np.ndarray) -> None:
        """Starts a prompt in each of `slots`: nothing kept."""

    def release(self, slots: Sequence[int]) -> None:
        """Gives back the nodes of prompts that have ended."""

    def newest(self, layers: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Returns the node that each lane, as a number in (slots * lanes), has of this token at a layer of its own."""

    def paths(self, layer: int, lanes: np.ndarray, *, length: int) -> np.ndarray:
        """Returns the nodes that lanes attend to at a layer, (lanes, length); those beyond a lane's step are no nodes.

        Args:
          layer: From 1.
          lanes: Numbers in (slots * lanes).
          length: Steps to return, from the first.
        """

    def all_paths(self, layer: int) -> np.ndarray:
        """Returns the nodes that every lane attends to at a layer, (slots * lanes, steps), as they stand."""

    def advance(self, tokens: np.ndarray, exit_layers: np.ndarray, *, alive: np.ndarray) -> None:
        """Goes to the next step.

        Args:
          tokens: shape (slots, lanes). Generated at this step.
          exit_layers: shape (slots, lanes). Exit layers at this step.
          alive: bool, shape (slots, lanes). Lanes that generated.
        """
