"""The sweep with shared work: what several thresholds of a prompt have in common is computed once.

Prompts occupy the slots of a batch, and all of them take one step at a time. At each layer, the
groups of lanes that are in one state (see `lanes`) are packed into rows, whichever prompt they belong to; lanes that
exit leave, and the others go on to the next layer. Logits are made only where a lane has to decide. A slot whose lanes
have all ended is given the next prompt.
"""

import collections
import logging
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.rule import ExitRule

from .batch import Batch
from .memory import Budget, return_freed_memory
from .padding import joined_widths, members_by_width
from .result import KnownOutput, SweepResult
from .weights import Weights
from .work import Work

_LOGGER = logging.getLogger(__name__)


class SharedSweep:
    """Decodes prompts at all thresholds of a grid, sharing the work of lanes that are in the same state."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        rule: ExitRule,
        *,
        thresholds: np.ndarray,
        max_input_length: int,
        budget: Budget,
        exit_head: str = "exact",
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          rule: How exits are decided; not one that needs the full model.
          thresholds: float32, shape (steps, lanes); +inf in a lane of the full model.
          max_input_length: Most tokens of a prompt.
          budget: What it may hold at a time. If the device has no room for that, it is halved.
          exit_head: One of `EXIT_HEADS`.
        """
        assert not rule.needs_full_model()
        self._config = checkpoint.config
        self._rule = rule
        self._thresholds = thresholds
        self._max_input_length = max_input_length
        self._budget = budget
        self._weights = Weights(checkpoint, steps=len(thresholds), measure=rule.measure(), exit_head=exit_head)
        self.work = Work()

    @property
    def slots(self) -> int:
        """Most prompts that are decoded side by side."""
        return self._budget.slots

    def decode(
        self, prompts: Sequence[Sequence[int]], known: Sequence[KnownOutput] | None = None
    ) -> Iterator[tuple[int, SweepResult]]:
        """Yields the outputs of every prompt, with its index, in the order in which they end.

        Args:
          prompts: Token ids of each prompt.
          known: Outputs at a threshold above all of these; what lanes have in common with them is not decided again.
        """
        waiting = members_by_width(prompts, self._max_input_length)
        while waiting:
            left = {index for members in waiting.values() for index in members}
            try:
                for index, result in self._decode(prompts, waiting, known):
                    left.remove(index)
                    yield index, result
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or self._budget == self._budget.halved():
                    raise
                self._budget = self._budget.halved()
                _LOGGER.warning(
                    "the device has no memory left; going on with half the budget: %d prompts and %d tokens at a time",
                    self._budget.slots,
                    self._budget.tokens,
                )
            finally:
                return_freed_memory()
            waiting = {width: kept for width, members in waiting.items() if (kept := [i for i in members if i in left])}

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        members_by_width: Mapping[int, Sequence[int]],
        known: Sequence[KnownOutput] | None,
    ) -> Iterator[tuple[int, SweepResult]]:
        """Yields the outputs of the given members of the prompts."""
        members_by_width = joined_widths(members_by_width, tokens=self._budget.source_tokens(self._thresholds.size))
        batch = Batch(
            self._config,
            self._rule,
            weights=self._weights,
            thresholds=self._thresholds,
            budget=self._budget,
            members_by_width=members_by_width,
        )
        # Long prompts tend to have long outputs: begun first, they do not run alone at the end.
        waiting = {
            width: collections.deque(sorted(members, key=lambda index: -len(prompts[index])))
            for width, members in sorted(members_by_width.items(), reverse=True)
        }
        while any(waiting.values()) or batch.is_busy():
            batch.admit(waiting, prompts, known=known)
            for width, index in batch.make_room():
                waiting[width].appendleft(index)
            self.work += Work(steps=1)
            for index, result in batch.step():
                self.work += Work(prompts=1, tokens=int(result.lengths[0])) + batch.take_work()
                yield index, result
        self.work += batch.take_work()
