"""Decodes on one group of devices, running a layer once for all that need it: branches of a prompt, and many prompts.

Prompts occupy the slots of a batch, and all of them take one step at a time. At each layer, the
groups of lanes that are in one state (see `lanes`) are packed into rows, whichever prompt they belong to; lanes that
exit leave, and the others go on to the next layer. Logits are made only where a lane has to decide. A slot whose lanes
have all ended is given the next prompt.
"""

import collections
import dataclasses
import logging
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from calm_beam.model import architecture_of
from calm_beam.model.interface import EarlyExitModel

from .batch import Batch
from .branches import Branches
from .memory import Budget, return_freed_memory
from .padding import common_prefix, joined_widths, members_by_width, widths_up_to
from .request import Request
from .result import PromptResult
from .weights import Weights
from .work import Work

_LOGGER = logging.getLogger(__name__)


class GroupDecoder:
    """Decodes prompts, each in all of its lanes, sharing the work of lanes that are in the same state.

    Attributes:
      work: What has been decoded so far, counted.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        branches: Branches,
        *,
        weights: Weights,
        thresholds: np.ndarray,
        max_input_length: int,
        budget: Budget,
    ) -> None:
        """Prepares a decoder.

        Args:
          model: The network.
          branches: How exits of each lane are decided.
          weights: Of the model, on the group.
          thresholds: float32, shape (steps, lanes). Those of requests that name no others.
          max_input_length: Most tokens of a prompt.
          budget: What it may hold at a time. If the device has no room for that, it is halved.
        """
        self._model, self._branches, self._weights, self._thresholds = model, branches, weights, thresholds
        self._max_input_length = max_input_length
        self._budget = budget
        self.work = Work()

    @property
    def slots(self) -> int:
        """Most prompts that are decoded side by side."""
        return self._budget.slots

    def open_batch(self) -> Batch:
        """Returns a batch for prompts that are not known yet, with room for every width that they may have.

        It holds no more than have room to the end, so that none has to give way.
        """
        steps, lanes = self._thresholds.shape
        room = (self._budget.tokens - self._source_tokens()) // (steps * lanes)
        budget = dataclasses.replace(self._budget, slots=min(self.slots, max(1, room)))
        widths = {width: range(budget.slots) for width in widths_up_to(self._max_input_length)}
        counts = dict.fromkeys(joined_widths(widths, tokens=self._source_tokens()), budget.slots)
        return self._batch(budget, counts, admits_few=True)

    def decode(self, requests: Sequence[Request]) -> Iterator[tuple[Request, PromptResult]]:
        """Yields every request, which must be distinct, with its outputs, in the order in which they end.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        waiting = members_by_width([request.ids for request in requests], self._max_input_length)
        left = dict.fromkeys(requests)
        while left:
            waiting = {
                width: kept
                for width, members in waiting.items()
                if (kept := [index for index in members if requests[index] in left])
            }
            try:
                for request, result in self._decode(requests, waiting):
                    del left[request]
                    yield request, result
            except (jax.errors.JaxRuntimeError, MemoryError) as error:
                lacks_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
                if not lacks_memory or self._budget == self._budget.halved():
                    raise
                self._budget = self._budget.halved()
                _LOGGER.warning(
                    "the device has no memory left; going on with half the budget: %d prompts and %d tokens at a time",
                    self._budget.slots,
                    self._budget.tokens,
                )
            finally:
                return_freed_memory()

    def _decode(
        self, requests: Sequence[Request], members_by_width: dict[int, list[int]]
    ) -> Iterator[tuple[Request, PromptResult]]:
        """Yields the given members of the requests with their outputs."""
        members_by_width = joined_widths(members_by_width, tokens=self._source_tokens())
        counts = {width: len(members) for width, members in members_by_width.items()}
        batch = self._batch(self._budget, counts, prefixes=self._prefixes(requests, members_by_width))
        # Long prompts tend to have long outputs: begun first, they do not run alone at the end.
        waiting = {
            width: collections.deque(
                sorted((requests[index] for index in members), key=lambda request: -len(request.ids))
            )
            for width, members in sorted(members_by_width.items(), reverse=True)
        }
        while any(waiting.values()) or batch.is_busy():
            batch.admit(waiting)
            for request in batch.make_room():
                waiting[batch.width_for(request)].appendleft(request)
            self.work += Work(steps=1)
            for request, result in batch.step():
                self.work += Work(prompts=1, tokens=int(result.lengths[0])) + batch.take_work()
                yield request, result
        self.work += batch.take_work()

    def _prefixes(
        self, requests: Sequence[Request], members_by_width: dict[int, list[int]]
    ) -> dict[int, Sequence[int]]:
        """Returns by width what all prompts begin with, where it pays to go through it once."""
        if not architecture_of(self._model.config).shares_prefixes:
            return {}
        found = {
            width: common_prefix([requests[index].ids for index in members], width=width)
            for width, members in members_by_width.items()
        }
        return {width: prefix for width, prefix in found.items() if prefix}

    def _source_tokens(self) -> int:
        steps, lanes = self._thresholds.shape
        return self._budget.source_tokens(steps * lanes)

    def _batch(
        self,
        budget: Budget,
        counts: dict[int, int],
        *,
        prefixes: dict[int, Sequence[int]] | None = None,
        admits_few: bool = False,
    ) -> Batch:
        with self._weights.group.running():
            return Batch(
                self._model,
                self._branches,
                weights=self._weights,
                thresholds=self._thresholds,
                budget=budget,
                counts=counts,
                prefixes=prefixes,
                admits_few=admits_few,
            )
