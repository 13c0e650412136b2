"""What the heads decide of packed rows: certified ones are asked first, exact ones about what those leave open."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from calm_beam.decoding.branches import Branches
from calm_beam.decoding.decisions import Decisions
from calm_beam.decoding.near_ties import NEARNESS
from calm_beam.decoding.padding import parts_of
from calm_beam.decoding.weights import Head, Weights
from calm_beam.decoding.work import Work
from calm_beam.exits.certified_head import FEW_ROWS
from calm_beam.exits.measures import Need
from calm_beam.model.interface import EarlyExitModel

from . import steps

# How certified heads are asked, whether thoroughly, before the exact ones, which read four times as many bytes. What
# they leave open is put to them again: few rows are open, and eight in a call take a third of the exact head's time.
_CERTIFYING: tuple[bool, ...] = (False, True)

LookUp = Callable[[np.ndarray, np.ndarray, int], tuple[jax.Array | np.ndarray, np.ndarray]]
"""Takes layers and lanes of states, and a size; returns an array of states, (entries, lanes, width), and where they are
in it: `AskedRows`, padded to that size and joined."""


class HeadDecisions:
    """Asks the heads of a model about states."""

    def __init__(self, model: EarlyExitModel, branches: Branches, *, weights: Weights, rows: int) -> None:
        """Prepares what is asked.

        Args:
          model: The network.
          branches: How exits of each lane are decided.
          weights: Of the model.
          rows: What states that are asked about together are padded to: whole tiles.
        """
        self._model, self._weights, self._rows = model, weights, rows
        # By one that needs no logits, heads predict tokens alone.
        asking = branches.indices(Need.LOGITS) or [0]
        self._measures = tuple(branches.rules[index].confidence for index in asking)
        self._certifying = _CERTIFYING if weights.is_certified else ()

    def of(
        self,
        look_up: LookUp,
        *,
        layers: np.ndarray,
        lanes: np.ndarray,
        of_threshold: np.ndarray | None = None,
        thresholds: np.ndarray | None = None,
    ) -> tuple[list[Decisions], Work]:
        """Returns what the heads decide of states, given by layer and lane, as `Engine.decide` does.

        Args:
          look_up: Where they are.
          layers: Of every state.
          lanes: Likewise.
          of_threshold: Which state each threshold is compared with; None if none is.
          thresholds: Those that the confidence must be told from.
        """
        count = len(lanes)
        decided, *others = (Decisions.none(count, confidence=0.0) for _ in self._measures)
        assert not (others and self._certifying), "certified heads prove the intervals of one measure"
        left = np.arange(count)
        for is_thorough in self._certifying:
            if not len(left):
                break
            tokens, low, high, is_certain = self._ask(look_up, layers[left], lanes[left], is_thorough=is_thorough)
            decided.put(left, Decisions(tokens, low=low, high=high, is_finite=is_certain))
            is_open = ~decided.is_finite
            if of_threshold is not None:
                low, high = decided.low[of_threshold], decided.high[of_threshold]
                # What is nearly at a threshold is open too: confidences of near ties are then exact, and counted.
                is_open[of_threshold[(low - NEARNESS <= thresholds) & (thresholds <= high + NEARNESS)]] = True
            left = np.flatnonzero(is_open)
        if len(left):
            tokens, confidences, is_finite = self._ask(look_up, layers[left], lanes[left])
            for of_measure, values in zip((decided, *others), confidences, strict=True):
                of_measure.put(left, Decisions.exact(tokens, confidences=values, is_finite=is_finite))
        return [decided, *others], Work(certified_rows=count if self._certifying else 0, projection_rows=len(left))

    def run_on_padding(self, look_up: LookUp) -> None:
        """Asks all that may be asked, on padding only, so that it is compiled."""
        none = np.zeros(0, np.int32)
        for head, is_thorough in itertools.product(self._weights.programs(), (*self._certifying, None)):
            self._ask_part(look_up, head, layers=none, lanes=none, is_thorough=is_thorough)

    def _ask(
        self, look_up: LookUp, layers: np.ndarray, lanes: np.ndarray, *, is_thorough: bool | None = None
    ) -> list[np.ndarray]:
        """Returns what heads make of states, given by layer and lane: what they certify, or what they decide.

        Args:
          look_up: Where the states are.
          layers: Of every state.
          lanes: Likewise.
          is_thorough: How certified heads are asked; None to ask exact ones.
        """
        most = FEW_ROWS if is_thorough else self._rows
        asked = [
            (head, chosen[part])
            for head, chosen in self._weights.heads_of(layers)
            for part in parts_of(len(chosen), most)
        ]
        # All are asked before the first answer is waited for.
        made = [
            self._ask_part(look_up, head, layers=layers[rows], lanes=lanes[rows], is_thorough=is_thorough)
            for head, rows in asked
        ]
        found = [np.empty((*values.shape[:-1], len(lanes)), values.dtype) for values in made[0]]
        for (_, rows), of_part in zip(asked, made, strict=True):
            for result, values in zip(found, of_part, strict=True):
                result[..., rows] = np.asarray(values)[..., : len(rows)]
        return found

    def _ask_part(
        self, look_up: LookUp, head: Head, *, layers: np.ndarray, lanes: np.ndarray, is_thorough: bool | None
    ) -> Sequence[jax.Array]:
        """Returns what a head makes of states, padded."""
        states, rows = look_up(layers, lanes, FEW_ROWS if is_thorough else self._rows)
        asked: dict[str, Any] = {
            "head_layer": head.layer,
            "parameters": head.parameters,
            "states": states,
            "rows": rows,
        }
        made: Sequence[jax.Array]
        if is_thorough is None:
            made = steps.decide_rows(self._model, self._measures, **asked)
        else:
            (measure,) = self._measures
            how = {"head": head.certified, "is_thorough": is_thorough}
            made = steps.certify_rows(self._model, measure, **how, **asked)
        return made
