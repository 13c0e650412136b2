"""Nodes of prompts that have one lane each.

No lane shares anything with another, so that a token has one node, the same at every layer: whether a layer was run for
it, or was skipped and given keys and values of a state, it keeps them there. So a layer may be run for a token before
it is known whether it is needed: what is propagated is written over it.
"""

from collections.abc import Sequence

import numpy as np

from .paths import Rows


class SingleLanes:
    """See `Paths`; a lane is the number of its slot."""

    def __init__(self, *, slots: int, steps: int, capacity: int) -> None:
        """Prepares free slots.

        Args:
          slots: Prompts at a time.
          steps: Most tokens of an output.
          capacity: Nodes of each layer's store.
        """
        self._paths = np.zeros((slots, steps), np.int32)
        self._free = np.zeros(0, np.int32)
        self._capacity = 0
        self.step = np.zeros(slots, np.int32)
        self.grow(capacity)

    @property
    def capacity(self) -> int:
        """Nodes of each layer's store."""
        return self._capacity

    def room(self) -> int:
        """Returns how many nodes are left. A step takes one per live lane."""
        return len(self._free)

    def grow(self, added: int) -> None:
        """Adds free nodes to every layer's store."""
        new = np.arange(self._capacity, self._capacity + added, dtype=np.int32)
        self._free = np.concatenate([self._free, new])
        self._capacity += added

    def admit(self, slots: np.ndarray) -> None:
        """Starts a prompt in each of `slots`: nothing kept."""
        self.step[slots] = 0

    def release(self, slots: Sequence[int]) -> None:
        """Gives back the nodes of prompts that have ended."""
        self._free = np.concatenate([self._free, *(self._paths[slot, : self.step[slot]] for slot in slots)])
        self.step[list(slots)] = 0

    def take(self, lanes: np.ndarray) -> Rows:
        """Returns the rows of lanes, in order, with a node for this token of each."""
        rest = len(self._free) - len(lanes)
        assert rest >= 0, "a step takes one node per live lane"
        self._free, nodes = self._free[:rest], self._free[rest:]
        steps = self.step[lanes]
        self._paths[lanes, steps] = nodes
        return Rows(lanes, lanes, steps=steps, nodes=nodes)

    def newest(self, layers: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Returns the node that each lane has of this token, at whatever layer."""
        nodes: np.ndarray = self._paths[lanes, self.step[lanes]]
        return nodes

    def paths(self, layer: int, lanes: np.ndarray, *, length: int) -> np.ndarray:
        """Returns the nodes that lanes attend to at whatever layer, (lanes, length)."""
        return self._paths[lanes, :length]

    def all_paths(self, layer: int) -> np.ndarray:
        """Returns the nodes that every lane attends to at whatever layer, (slots, steps), as they stand."""
        return self._paths

    def advance(self, tokens: np.ndarray, exit_layers: np.ndarray, *, alive: np.ndarray) -> None:
        """Goes to the next step."""
        self.step += alive[:, 0]
