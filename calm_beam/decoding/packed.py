"""The decoder that runs a layer once for all that need it: several thresholds of a prompt, and many prompts.

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

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.model import architecture_of, network_of

from .admission import Request
from .batch import Batch
from .branches import Branches
from .device_groups import DeviceGroup, first_device, placed
from .engine_choice import Machine, chosen_engine
from .memory import Budget, return_freed_memory
from .padding import common_prefix, joined_widths, members_by_width, widths_up_to
from .result import KnownOutput, SweepResult
from .weights import Weights
from .work import Work

_LOGGER = logging.getLogger(__name__)


class PackedDecoder:
    """Decodes prompts, each in all lanes of a schedule, sharing the work of lanes that are in the same state.

    Attributes:
      engine: What computes rows.
      work: What has been decoded so far, counted.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rules: Sequence[ExitRule],
        *,
        thresholds: np.ndarray,
        max_input_length: int,
        budget: Budget,
        exit_head: str = "exact",
        engine: str = "auto",
        arithmetic: Arithmetic = FLOAT32,
        group: DeviceGroup | None = None,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          rules: How exits are decided: each in as many lanes, one rule after the other.
          thresholds: float32, shape (schedules, steps, lanes); +inf in a lane of the full model. A prompt is decoded at
            those of one schedule.
          max_input_length: Most tokens of a prompt.
          budget: What it may hold at a time. If the device has no room for that, it is halved.
          exit_head: One of `EXIT_HEADS`.
          engine: One of `engine_choice.ENGINE_CHOICES`: what computes rows. Engines round otherwise.
          arithmetic: In which numbers the model computes.
          group: The devices that decode; None for the first.
        """
        self._model = network_of(checkpoint.config, arithmetic=arithmetic)
        layers = checkpoint.config.num_decoder_layers
        self._branches = Branches.of(rules, lanes=thresholds.shape[2], layers=layers)
        self._thresholds = thresholds
        self._max_input_length = max_input_length
        self._budget = budget
        self._group = group = group or first_device()
        by_logits = self._branches.indices(Need.LOGITS)
        self.engine = chosen_engine(
            engine,
            # A certified head proves intervals of one measure.
            exit_head if len(by_logits) < 2 else "exact",
            config=checkpoint.config,
            rule=self._branches.rules[by_logits[0] if by_logits else 0],
            arithmetic=arithmetic,
            machine=Machine.here(group.devices[0].platform),
            model_parallelism=group.division.parts,
        )
        on_group = placed(checkpoint, group, arithmetic)
        with group.running():
            self._weights = Weights(
                on_group,
                self._model,
                group,
                steps=thresholds.shape[1],
                measures=self._branches.measures,
                engine=self.engine,
            )
        self.work = Work()

    @property
    def slots(self) -> int:
        """Most prompts that are decoded side by side."""
        return self._budget.slots

    def open_batch(self) -> Batch:
        """Returns a batch for prompts that are not known yet, with room for every width that they may have.

        It holds no more than have room to the end, so that none has to give way.
        """
        _, steps, lanes = self._thresholds.shape
        room = (self._budget.tokens - self._source_tokens()) // (steps * lanes)
        budget = dataclasses.replace(self._budget, slots=min(self.slots, max(1, room)))
        widths = {width: range(budget.slots) for width in widths_up_to(self._max_input_length)}
        counts = dict.fromkeys(joined_widths(widths, tokens=self._source_tokens()), budget.slots)
        return self._batch(budget, counts, admits_few=True)

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        known: Sequence[KnownOutput] | None = None,
        *,
        schedules: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, SweepResult]]:
        """Yields the outputs of every prompt, with its index, in the order in which they end.

        Args:
          prompts: Token ids of each prompt.
          known: Outputs at a threshold above all of these; what lanes have in common with them is not decided again.
          schedules: Index of each prompt's schedule; None for the first.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        waiting = members_by_width(prompts, self._max_input_length)
        requests = [
            Request(
                index,
                prompt,
                schedule=schedules[index] if schedules is not None else 0,
                known=known[index] if known is not None else None,
            )
            for index, prompt in enumerate(prompts)
        ]
        left = set(range(len(prompts)))
        while left:
            waiting = {width: kept for width, members in waiting.items() if (kept := [i for i in members if i in left])}
            try:
                for index, result in self._decode(requests, waiting):
                    left.remove(index)
                    yield index, result
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
    ) -> Iterator[tuple[int, SweepResult]]:
        """Yields the outputs of the given members of the requests."""
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
                yield request.index, result
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
        _, steps, lanes = self._thresholds.shape
        return self._budget.source_tokens(steps * lanes)

    def _batch(
        self,
        budget: Budget,
        counts: dict[int, int],
        *,
        prefixes: dict[int, Sequence[int]] | None = None,
        admits_few: bool = False,
    ) -> Batch:
        with self._group.running():
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
