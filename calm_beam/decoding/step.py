"""One step of all lanes of a batch: which layers they go through, where they leave, and what skipped layers keep."""

import abc

import numpy as np

from calm_beam.exits.measures import Need
from calm_beam.exits.propagations import PassedOn

from .branches import Branches
from .decisions import Decisions
from .engine import Engine
from .outputs import StepOutputs
from .paths import Paths, Rows
from .work import Work


class Step(abc.ABC):
    """What steps of one lane a prompt and of several have in common."""

    def __init__(self, branches: Branches, *, engine: Engine, paths: Paths, first_kept_step: int) -> None:
        """Prepares steps.

        Args:
          branches: How exits of each lane are decided.
          engine: What computes rows.
          paths: Nodes of the lanes.
          first_kept_step: First step that later ones attend to.
        """
        self._branches, self._engine, self._layers = branches, engine, branches.layers
        self._passed_on = branches.passed_on
        self._step, self._first_kept_step = paths.step, first_kept_step
        self._work = Work()

    @abc.abstractmethod
    def run(
        self, live: np.ndarray, *, previous: np.ndarray, thresholds: np.ndarray, known_exits: np.ndarray | None
    ) -> StepOutputs:
        """Returns what a step gives lanes.

        Args:
          live: bool, shape (slots, lanes). Those that generate.
          previous: int32, likewise. The token that each goes on from.
          thresholds: float32, likewise. +inf in a lane of the full model.
          known_exits: int32, likewise. Where each leaves, if that is known already; else 0. None if none is. What else
            is known of these lanes is left to the caller.
        """

    @abc.abstractmethod
    def propagate(self, exit_layers: np.ndarray, goes_on: np.ndarray) -> None:
        """Gives the layers that tokens skipped what they keep of them (CALM, "State propagation").

        Args:
          exit_layers: int32, shape (slots, lanes). Where each token left.
          goes_on: bool, likewise. Lanes that will attend to it.
        """

    def take_work(self) -> Work:
        """Returns what was counted since the last call."""
        taken, self._work = self._work, Work()
        return taken

    def _run_layers(self, layers: range, rows: Rows, *, below: np.ndarray) -> np.ndarray:
        """Runs layers for rows, and returns the confidences, (measures, layers, rows), that need no logits."""
        measured, work = self._engine.run_layers(layers, rows, below=below)
        self._work += work
        for index in self._branches.indices(Need.LAYER):
            for of_layer, layer in zip(measured[index], layers, strict=True):
                of_layer[:] = self._branches.measures[index].confidence(layer, self._layers)
        return measured

    def _project(self, layers: np.ndarray, lanes: np.ndarray, **compared: np.ndarray) -> list[Decisions]:
        """Returns what the heads decide of states, given by layer and lane, as `Engine.decide` does."""
        decided, work = self._engine.decide(layers, lanes, **compared)
        self._work += work
        return decided

    def _is_read(self, new: StepOutputs, known_exits: np.ndarray | None) -> np.ndarray:
        """Returns which lanes have left, so that their tokens are to be read where nothing else tells them."""
        has_left: np.ndarray = new.exit_layers > 0
        return has_left if known_exits is None else has_left & (known_exits == 0)

    def _to_propagate(self, exit_layers: np.ndarray, goes_on: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns lanes that left early and are attended to, their exit layers, and the layers of what they pass on."""
        is_kept = (self._step >= self._first_kept_step)[:, None]
        members = np.flatnonzero((exit_layers < self._layers) & goes_on & is_kept)
        exits = exit_layers.flat[members]
        is_first = self._passed_on is PassedOn.FIRST_STATE
        return members, exits, np.full_like(exits, self._branches.first_exit) if is_first else exits

    def _keep(self, layers: np.ndarray, lanes: np.ndarray, nodes: np.ndarray, *, is_skipped: np.ndarray) -> None:
        """Gives nodes of skipped layers, (layers - 1, states), what is passed on of states."""
        if self._passed_on is PassedOn.KEYS_VALUES:
            self._engine.copy_skipped(layers, lanes, nodes)
        else:
            self._work += Work(fill_rows=int(is_skipped.sum()))
            self._engine.keep_skipped(layers, lanes, nodes)
