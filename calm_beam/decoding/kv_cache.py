"""The index of the KV cache of generated tokens: where keys and values are, and which branches share them.

The output of layer i at step t depends on the tokens so far and on the cache of layers 1 to i for the earlier tokens.
That cache depends only on min(exit_s, i - 1) for each earlier step s: above its exit layer, a token's state does not
change any more. Branches with equal keys at layer i form a *group* that computes layer i once, whichever rules they
exit by. Groups at layer i + 1 refine those at layer i, and groups only ever split, so branches that differ at an upper
layer go on sharing the lower ones.

The keys and values of one token at a layer, for one group, are a *node*: a row of that layer's store. Each branch has a
path, the nodes that it attends to. An engine gets the rows that it runs, and the paths. A split copies node numbers,
never keys and values; the nodes of a prompt are freed when it has ended.

Prompts that have one branch each share nothing. A token then has one node number, the same at every layer, whether the
layer was run for it or was skipped and filled from a state. So a layer may run for a token before it is known whether
the token needs it: propagated keys and values overwrite the layer's own.

This module does not decide what is computed, only what is computed once: any partition finer than the keys gives the
same outputs with more work.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from calm_beam.exits.propagations import PassedOn, Propagation


class Rows(NamedTuple):
    """Rows that run layers at one step, ordered by prompt.

    Attributes:
      branches: shape (rows,). The branch of each, as a number in (slots * branches).
      slots: shape (rows,). The prompt's slot.
      steps: shape (rows,). The prompt's step, from 0.
      nodes: shape (rows,). The node for this token's keys and values.
    """

    branches: np.ndarray
    slots: np.ndarray
    steps: np.ndarray
    nodes: np.ndarray


class Paths(Protocol):
    """Paths and nodes of the prompts in a batch of slots.

    The keys and values of one token at a layer are a *node*: a row of that layer's store. Each branch has a path, the
    nodes that it attends to.

    Attributes:
      step: int32, shape (slots,). The step of each prompt, from 0; changed in place, since native code reads it there.
    """

    step: np.ndarray

    @property
    def capacity(self) -> int:
        """Nodes of each layer's store."""

    def room(self) -> int:
        """Returns how many free nodes every layer has. A step takes at most one per live branch."""

    def grow(self, added: int) -> None:
        """Adds free nodes to every layer's store."""

    def admit(self, slots: np.ndarray) -> None:
        """Starts a prompt in each of `slots`, with an empty cache."""

    def release(self, slots: Sequence[int]) -> None:
        """Frees the nodes of prompts that have ended."""

    def newest(self, layers: np.ndarray, branches: np.ndarray) -> np.ndarray:
        """Returns the node of this token for each branch, a number in (slots * branches), at one layer for each."""

    def paths(self, layer: int, branches: np.ndarray, *, length: int) -> np.ndarray:
        """Returns the nodes that branches attend to at a layer, (branches, length).

        Entries beyond a branch's step are invalid.

        Args:
          layer: From 1.
          branches: Numbers in (slots * branches).
          length: Steps to return, from the first.
        """

    def all_paths(self, layer: int) -> np.ndarray:
        """Returns a view of the nodes that every branch attends to at a layer, (slots * branches, steps)."""

    def advance(self, tokens: np.ndarray, exit_layers: np.ndarray, *, alive: np.ndarray) -> None:
        """Goes to the next step.

        Args:
          tokens: shape (slots, branches). Generated at this step.
          exit_layers: shape (slots, branches). Exit layers at this step.
          alive: bool, shape (slots, branches). Branches that generated.
        """


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups that run one layer at one step.

    Attributes:
      rows: One row for each group; its branch is the group's first.
      members: shape (members,). The branches that take part, as numbers in (slots * branches), in order.
      of_member: shape (members,). The row of each member.
    """

    rows: Rows
    members: np.ndarray
    of_member: np.ndarray


class BranchTree:
    """The `Paths` of prompts with several branches, which form groups."""

    def __init__(
        self,
        *,
        slots: int,
        num_branches: int,
        steps: int,
        layers: int,
        propagation: Propagation,
        capacity: int,
        first_kept_step: int = 0,
    ) -> None:
        """Prepares free slots.

        Args:
          slots: Prompts at a time.
          num_branches: Branches of each prompt.
          steps: Most tokens of an output.
          layers: Decoder depth L.
          propagation: How skipped layers are filled, which determines the key of layer i: it has min(exit, i - 1), or
            min(exit, i) where the propagation `separates_exit`, or no exit at all where nothing is skipped.
          capacity: Nodes of each layer's store.
          first_kept_step: First step that later ones attend to; exits at earlier steps split no group.
        """
        self._shape = (slots, num_branches)
        self._layers, self._first_kept_step = layers, first_kept_step
        self._shift = 0 if propagation.separates_exit else 1
        self._exits_split_groups = propagation.passed_on is not PassedOn.NOTHING
        # Index 0 of the first axis is layer 1. Branches with equal numbers are in one group; the number is the group's
        # lowest branch when it was formed.
        self._group = np.zeros((layers, slots * num_branches), np.int32)
        # Changed in place, like `step`: native code reads this array.
        self._paths = np.zeros((layers, slots * num_branches, steps), np.int32)
        # Slot of each node's prompt, -1 where the node is free.
        self._owners = np.full((layers, 0), -1, np.int32)
        self._free = [np.zeros(0, np.int32) for _ in range(layers)]
        self.step = np.zeros(slots, np.int32)
        self.grow(capacity)

    @property
    def capacity(self) -> int:
        """Nodes of each layer's store."""
        return self._owners.shape[1]

    def room(self) -> int:
        """Returns how many free nodes every layer has. A step takes at most one per live branch."""
        return min(len(free) for free in self._free)

    def grow(self, added: int) -> None:
        """Adds free nodes to every layer's store."""
        new = np.arange(self.capacity, self.capacity + added, dtype=np.int32)
        self._owners = np.pad(self._owners, ((0, 0), (0, added)), constant_values=-1)
        self._free = [np.concatenate([free, new]) for free in self._free]

    def admit(self, slots: np.ndarray) -> None:
        """Starts a prompt in each of `slots`, with all branches in one group and an empty cache."""
        firsts = slots * self._shape[1]
        self._group.reshape(self._layers, *self._shape)[:, slots] = firsts[:, None]
        self.step[slots] = 0

    def release(self, slots: Sequence[int]) -> None:
        """Frees the nodes of prompts that have ended."""
        # The last entry is for nodes without an owner, -1.
        is_given_back = np.zeros(self._shape[0] + 1, bool)
        is_given_back[list(slots)] = True
        of_these = is_given_back[self._owners]
        self._owners[of_these] = -1
        for layer, nodes in enumerate(map(np.flatnonzero, of_these)):
            self._free[layer] = np.concatenate([self._free[layer], nodes], dtype=np.int32)

    def groups(self, layer: int, alive: np.ndarray) -> Groups:
        """Returns the groups of the branches that run a layer, and takes a node for this token for each group.

        Args:
          layer: From 1.
          alive: bool, shape (slots, branches). Branches that generate and have not exited below.
        """
        members = np.flatnonzero(alive)
        group = self._group[layer - 1, members]
        # By group: the lowest branch that takes part, since the last of several values assigned to one index stays.
        by_group = np.empty(alive.size, np.int64)
        by_group[group[::-1]] = members[::-1]
        is_first = by_group[group] == members
        branches = members[is_first]
        by_group[group[is_first]] = np.arange(len(branches))
        of_member = by_group[group]
        slots = self._slots_of(branches)
        nodes = self._new_nodes(layer, slots)
        self._set_path(layer, members, nodes[of_member])
        return Groups(Rows(branches, slots, steps=self.step[slots], nodes=nodes), members, of_member)

    def keep(self, layer: int, states: np.ndarray, *, members: np.ndarray, of_member: np.ndarray) -> np.ndarray:
        """Takes nodes for the propagated keys and values of a skipped layer, and returns them, (states,).

        Args:
          layer: The layer that was skipped.
          states: One branch for each distinct state that is propagated.
          members: The branches that skipped the layer.
          of_member: For each of them, the index of its state.
        """
        nodes = self._new_nodes(layer, self._slots_of(states))
        self._set_path(layer, members, nodes[of_member])
        return nodes

    def give_back_newest(self, layer: int, members: np.ndarray, *, others: np.ndarray) -> None:
        """Frees the nodes of this token at a layer that some branches have, and no others.

        Args:
          layer: From 1.
          members: Branches for which `keep` will take other nodes, as numbers in (slots * branches).
          others: Branches that keep their nodes.
        """
        made, kept = (
            self._paths[layer - 1, branches, self.step[self._slots_of(branches)]] for branches in (members, others)
        )
        nodes = np.setdiff1d(made, kept)
        self._owners[layer - 1, nodes] = -1
        self._free[layer - 1] = np.concatenate([self._free[layer - 1], nodes])

    def newest(self, layers: np.ndarray, branches: np.ndarray) -> np.ndarray:
        """Returns the node of this token for each branch, a number in (slots * branches), at one layer for each."""
        nodes: np.ndarray = self._paths[layers - 1, branches, self.step[self._slots_of(branches)]]
        return nodes

    def paths(self, layer: int, branches: np.ndarray, *, length: int) -> np.ndarray:
        """Returns the nodes that branches attend to at a layer, (branches, length).

        Entries beyond a branch's step are invalid.

        Args:
          layer: From 1.
          branches: Numbers in (slots * branches).
          length: Steps to return, from the first.
        """
        return self._paths[layer - 1, branches, :length]

    def all_paths(self, layer: int) -> np.ndarray:
        """Returns a view of the nodes that every branch attends to at a layer, (slots * branches, steps)."""
        paths: np.ndarray = self._paths[layer - 1]
        return paths

    def advance(self, tokens: np.ndarray, exit_layers: np.ndarray, *, alive: np.ndarray) -> None:
        """Splits the groups whose branches have come to differ, and goes to the next step.

        Args:
          tokens: shape (slots, branches). Generated at this step.
          exit_layers: shape (slots, branches). Exit layers at this step.
          alive: bool, shape (slots, branches). Branches that generated.
        """
        is_kept = (self.step >= self._first_kept_step)[:, None] & self._exits_split_groups
        kept_exits = np.where(is_kept, exit_layers, 0).reshape(-1)
        is_alive, token = alive.reshape(-1), tokens.reshape(-1).astype(np.int64) * (self._layers + 1)
        told, parted = (np.empty(self._group.shape, kind) for kind in (np.int64, bool))
        for layer, group in enumerate(self._group, start=1):
            # The layer's key for this token.
            told[layer - 1] = of_layer = token + np.minimum(kept_exits, layer - self._shift)
            parted[layer - 1] = is_alive & (of_layer != of_layer.take(group))
        parts = np.flatnonzero(parted)
        if len(parts):
            branches = parts % alive.size
            # One number for each layer, group, token and exit.
            keys = (parts - branches + self._group.flat[parts]) * (told.max() + 1) + told.flat[parts]
            _, first, of_branch = np.unique(keys, return_index=True, return_inverse=True)
            self._group.flat[parts] = branches[first][of_branch]
        self.step += alive.any(axis=1)

    def _slots_of(self, branches: np.ndarray) -> np.ndarray:
        """Returns the slots of branches, given as numbers in (slots * branches)."""
        return branches // self._shape[1]

    def _new_nodes(self, layer: int, slots: np.ndarray) -> np.ndarray:
        """Returns a free node for the prompt in each of `slots`."""
        free = self._free[layer - 1]
        rest = len(free) - len(slots)
        assert rest >= 0, "a step takes at most one node per live branch"
        self._free[layer - 1], nodes = free[:rest], free[rest:]
        self._owners[layer - 1, nodes] = slots
        return nodes

    def _set_path(self, layer: int, members: np.ndarray, nodes: np.ndarray) -> None:
        self._paths[layer - 1, members, self.step[self._slots_of(members)]] = nodes


class SingleBranches:
    """The `Paths` of prompts with one branch each; a branch is the number of its slot."""

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
        """Returns how many free nodes there are. A step takes one per live branch."""
        return len(self._free)

    def grow(self, added: int) -> None:
        """Adds free nodes to every layer's store."""
        new = np.arange(self._capacity, self._capacity + added, dtype=np.int32)
        self._free = np.concatenate([self._free, new])
        self._capacity += added

    def admit(self, slots: np.ndarray) -> None:
        """Starts a prompt in each of `slots`, with an empty cache."""
        self.step[slots] = 0

    def release(self, slots: Sequence[int]) -> None:
        """Frees the nodes of prompts that have ended."""
        self._free = np.concatenate([self._free, *(self._paths[slot, : self.step[slot]] for slot in slots)])
        self.step[list(slots)] = 0

    def take(self, branches: np.ndarray) -> Rows:
        """Returns the rows of branches, in order, and takes a node for this token of each."""
        rest = len(self._free) - len(branches)
        assert rest >= 0, "a step takes one node per live branch"
        self._free, nodes = self._free[:rest], self._free[rest:]
        steps = self.step[branches]
        self._paths[branches, steps] = nodes
        return Rows(branches, branches, steps=steps, nodes=nodes)

    def newest(self, layers: np.ndarray, branches: np.ndarray) -> np.ndarray:
        """Returns the node of this token for each branch, which is the same at every layer."""
        nodes: np.ndarray = self._paths[branches, self.step[branches]]
        return nodes

    def paths(self, layer: int, branches: np.ndarray, *, length: int) -> np.ndarray:
        """Returns the nodes that branches attend to, (branches, length), which are the same at every layer."""
        return self._paths[branches, :length]

    def all_paths(self, layer: int) -> np.ndarray:
        """Returns a view of the nodes that every branch attends to, (slots, steps), the same at every layer."""
        return self._paths

    def advance(self, tokens: np.ndarray, exit_layers: np.ndarray, *, alive: np.ndarray) -> None:
        """Goes to the next step."""
        self.step += alive[:, 0]
