"""A batch of prompts whose branches take one step at a time, sharing what they have in common.

With one branch per prompt, this is continuous batching by depth: layers are run for the prompts that still need them,
and a prompt that has ended frees its slot for the next. Prompts are prefilled several at a time, and ahead of the slots
that become free.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calm_beam.model import architecture_of
from calm_beam.model.interface import EarlyExitModel

from .branches import Branches, EndsOutput, PromptResult, Request, is_end
from .compilation import (
    admitted_together,
    buffer_bucket,
    encoded_rows,
    encoded_width,
    encoded_widths,
    padded,
    places_by_width,
)
from .cpu import NativeEngine
from .engine import Engine, Outputs, Slots, StepOutputs, Work
from .kv_cache import BranchTree, Paths, SingleBranches
from .memory import Budget
from .step import SharedStep, SingleStep, Step
from .weights import Weights
from .xla.engine import XlaEngine

# Prefill a quarter of the slots per call; smaller calls cost more per prompt.
_CHUNK_SHARE = 4
# Extra KV room for prefilling ahead, in places per slot: two chunks, of which one may still be computing.
AHEAD_SHARE = 0.5


Waiting = Mapping[int, collections.deque[Request]]
"""Requests that wait for a slot, by padded width; one queue for each width of the batch."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A prefilled prompt, and where its KV cache is: at a place among the sources of a padded width."""

    request: Request
    width: int
    place: int


class Admission:
    """Assigns KV places to prompts and prefills them, ahead of the slots that become free."""

    def __init__(self, engine: Engine, *, places: Mapping[int, int], slots: int, admits_few: bool) -> None:
        """Prepares free places.

        Args:
          engine: The engine that prefills.
          places: Number of places, by width.
          slots: How many prompts are decoded at a time.
          admits_few: Whether to prefill a prompt as soon as it has a slot, instead of several together and ahead:
            prompts wait less, at the cost of more compiled programs.
        """
        self._engine, self._places, self._slots, self._admits_few = engine, places, slots, admits_few
        self._free = {width: list(range(count)) for width, count in places.items()}
        self._prepared: collections.deque[Prepared] = collections.deque()

    def has_prepared(self) -> bool:
        """Returns whether any prefilled prompt waits for a slot."""
        return bool(self._prepared)

    def take(self, waiting: Waiting, *, room: int) -> list[Prepared]:
        """Returns prompts for free slots, at most `room`, in order; prefills the next ones ahead."""
        taken: list[Prepared] = []
        while True:
            while self._prepared and len(taken) < room:
                taken.append(self._prepared.popleft())
            if not self._prepare(waiting, room=room - len(taken)):
                return taken

    def give_back(self, width: int, place: int) -> None:
        """Frees the place of a prompt that has ended."""
        self._free[width].append(place)

    def chunk(self, width: int) -> int:
        """Returns the most prompts of a width that one prefill call takes."""
        return max(1, min(self._places[width], self._slots) // _CHUNK_SHARE)

    def _prepare(self, waiting: Waiting, *, room: int) -> bool:
        """Prefills some waiting prompts, all of one width; returns whether it prefilled any."""
        for width, queue in waiting.items():
            if not queue:
                continue
            places, count = self._free[width], min(self.chunk(width), len(queue))
            if self._admits_few:
                count = min(count, room, len(places))
                if not count:
                    continue
            elif len(self._prepared) >= count:
                # A whole chunk is prefilled ahead already.
                return False
            elif len(places) < count:
                # Keep the order: widths then follow each other and are not all in use at once.
                return False
            chosen = [Prepared(queue.popleft(), width, places.pop()) for _ in range(count)]
            for encoded, rows, together in self._by_encoded_width(width, chosen):
                self.prefill(width, together, encoded=encoded, rows=rows)
            self._prepared.extend(chosen)
            return True
        return False

    def _by_encoded_width(
        self, width: int, chosen: Sequence[Prepared]
    ) -> Iterator[tuple[int, int, Sequence[Prepared]]]:
        """Yields the calls of a prefill: encoded width, number of rows, and the prompts."""
        by_width: dict[int, list[Prepared]] = {}
        for each in chosen:
            by_width.setdefault(encoded_width(len(each.request.ids), width), []).append(each)
        for encoded, left in sorted(by_width.items()):
            while left:
                rows = admitted_together(len(left)) if self._admits_few else encoded_rows(self.chunk(width))
                yield encoded, rows, left[:rows]
                left = left[rows:]

    def prefill(self, width: int, together: Sequence[Prepared], *, encoded: int, rows: int) -> None:
        """Prefills prompts, `rows` or fewer, at an encoded width, and stores their keys and values at their places."""
        source_tokens = np.zeros((rows, encoded), np.int32)
        for row, each in enumerate(together):
            source_tokens[row, : len(each.request.ids)] = each.request.ids
        lengths = np.array([len(each.request.ids) for each in together], np.int32)
        places = np.array([each.place for each in together], np.int32)
        self._engine.prefill(
            width,
            source_tokens,
            lengths=padded(lengths, rows),
            places=padded(places, rows, fill=self._places[width]),
        )


def engine_for(model: EarlyExitModel, branch_rules: Branches, *, weights: Weights, slots: Slots) -> Engine:
    """Returns the native engine if the weights are packed for it, else XLA's; arguments are those of `XlaEngine`."""
    engine = XlaEngine if weights.native is None else NativeEngine
    return engine(model, branch_rules, weights=weights, slots=slots)


OnShape = Callable[[int, int], None]
"""Called with the number of shapes compiled so far, and the total."""


class ExpectedPrompts(NamedTuple):
    """The prompts that a batch prepares for, by the width that they are padded to.

    Attributes:
      counts: Number of prompts at a time.
      prefixes: The tokens that all prompts begin with, of widths where they are to be prefilled only once.
    """

    counts: Mapping[int, int]
    prefixes: Mapping[int, Sequence[int]]


class Batch:
    """Slots of prompts, with the tokens that their branches have generated."""

    def __init__(
        self,
        model: EarlyExitModel,
        branch_rules: Branches,
        *,
        weights: Weights,
        thresholds: np.ndarray,
        budget: Budget,
        expected: ExpectedPrompts,
        admits_few: bool = False,
        ends_output: EndsOutput | None = None,
    ) -> None:
        """Prepares free slots.

        Args:
          model: The network.
          branch_rules: How exits of each branch are decided.
          weights: Of the model.
          thresholds: float32, shape (steps, branches); +inf in a branch of the full model. Default for requests that
            name no others.
          budget: How many prompts and cached tokens fit at a time.
          expected: The prompts to prepare for.
          admits_few: See `Admission`.
          ends_output: What ends an output besides end tokens; None for nothing.
        """
        self._model, self._weights, self._ends_output = model, weights, ends_output
        config, counts = model.config, expected.counts
        self._architecture = architecture_of(config)
        steps, num_branches = self._steps, _ = thresholds.shape
        # Buffer sizes are part of the compiled shapes, so only a few sizes exist for any number of prompts.
        slots = min(budget.slots, buffer_bucket(sum(counts.values())))
        ahead = 0 if admits_few else int(AHEAD_SHARE * slots)
        places = places_by_width(counts, tokens=budget.source_tokens(num_branches * steps), slots=slots + ahead)
        self._most_nodes = max(
            num_branches * steps, budget.tokens - sum(width * count for width, count in places.items())
        )
        first_kept_step = self._architecture.first_kept_step
        capacity = min(slots * min(num_branches * steps, max(num_branches, 2 * steps)), self._most_nodes)
        tree: BranchTree | SingleBranches
        if num_branches == 1 and not branch_rules.decides_after_last_layer:
            tree = SingleBranches(slots=slots, steps=steps, capacity=capacity)
        else:
            tree = BranchTree(
                slots=slots,
                num_branches=num_branches,
                steps=steps,
                layers=config.num_decoder_layers,
                propagation=branch_rules.rules[0].propagation(),
                first_kept_step=first_kept_step,
                capacity=capacity,
            )
        self._tree: Paths = tree
        self._is_crowded = False
        self._requests: list[Request | None] = [None] * slots
        self._is_held = np.zeros(slots, bool)
        self._usual_thresholds = thresholds
        # [slots, steps, branches]
        self._thresholds = np.repeat(thresholds[None], slots, axis=0)
        self._slots = Slots(
            self._tree,
            num_branches=num_branches,
            steps=steps,
            sources=places,
            prefixes=expected.prefixes,
            widths=np.zeros(slots, np.int32),
            places=np.zeros(slots, np.int32),
            lengths=np.ones(slots, np.int32),
        )
        self._live = np.zeros((slots, num_branches), bool)
        self._previous = np.zeros((slots, num_branches), np.int32)
        self._is_finite = np.ones(slots, bool)
        self._outputs = Outputs(slots, num_branches, steps=steps)
        # How many first steps of each branch are copied from a known output when the prompt is admitted.
        self._shared_steps = np.zeros((slots, num_branches), np.int32)
        self._engine = engine_for(model, branch_rules, weights=weights, slots=self._slots)
        self._admission = Admission(self._engine, places=places, slots=slots, admits_few=admits_few)
        self._step: Step
        if isinstance(tree, SingleBranches):
            self._step = SingleStep(branch_rules, engine=self._engine, paths=tree, first_kept_step=first_kept_step)
        else:
            self._step = SharedStep(branch_rules, engine=self._engine, paths=tree, first_kept_step=first_kept_step)

    def take_work(self) -> Work:
        """Returns the work counted since the last call."""
        return self._step.take_work()

    def is_busy(self) -> bool:
        """Returns whether any prompt in the batch has not ended."""
        return bool(self._is_held.any()) or self._admission.has_prepared()

    def free_slots(self) -> int:
        """Returns how many more prompts fit; 0 if no place is free for the source of another one."""
        return 0 if self._is_crowded else len(self._requests) - int(self._is_held.sum())

    def queues(self) -> dict[int, collections.deque[Request]]:
        """Returns an empty queue for each width."""
        return {width: collections.deque() for width in self._slots.sources}

    def width_for(self, request: Request) -> int:
        """Returns the width that a prompt is padded to."""
        return min(width for width in self._slots.sources if width >= len(request.ids))

    def admit(self, waiting: Waiting) -> None:
        """Moves waiting prompts into free slots."""
        if not self._is_crowded:
            with self._weights.group.running():
                self._admit(waiting)

    def _admit(self, waiting: Waiting) -> None:
        free = np.flatnonzero(~self._is_held)
        taken = self._admission.take(waiting, room=len(free))
        if not taken:
            return
        slots = free[: len(taken)]
        for slot, prepared in zip(slots.tolist(), taken, strict=True):
            self._requests[slot] = request = prepared.request
            self._thresholds[slot] = request.thresholds(self._usual_thresholds)
            self._slots.widths[slot], self._slots.places[slot] = prepared.width, prepared.place
            self._slots.lengths[slot] = len(request.ids)
            self._previous[slot] = self._architecture.first_input(self._model.config, request.ids)
        self._is_held[slots] = self._live[slots] = self._is_finite[slots] = True
        self._shared_steps[slots] = 0
        self._tree.admit(slots)
        self._outputs.clear(slots)
        for slot in slots.tolist():
            self._share(slot)

    def warm_up(self, *, on_shape: OnShape | None = None) -> None:
        """Compiles every shape that prompts may need in a batch of one branch, so that none waits for the compiler.

        Runs every step once, on padding only: the batch's contents do not change.

        Args:
          on_shape: Called before the first shape is compiled and after each; None to call nothing.
        """
        shapes = [
            (width, encoded, count)
            for above, width in itertools.pairwise((0, *sorted(self._slots.sources)))
            for encoded, count in itertools.product(
                encoded_widths(width, above=above),
                {admitted_together(count) for count in range(1, self._admission.chunk(width) + 1)},
            )
        ]
        report = on_shape or report_nothing
        # The decoding steps count as one more shape.
        total = len(shapes) + 1
        with self._weights.group.running():
            for done, (width, encoded, count) in enumerate(shapes):
                report(done, total)
                self._admission.prefill(width, (), encoded=encoded, rows=count)
            report(total - 1, total)
            self._engine.run_on_padding()
        report(total, total)

    def step(self) -> Iterator[tuple[Request, PromptResult]]:
        """Generates one token in every live branch, and yields the prompts that have ended."""
        with self._weights.group.running():
            goes_on = self._generate()
        ended = np.flatnonzero(self._is_held & ~goes_on.any(axis=1)).tolist()
        if not ended:
            return
        results = [self._outputs.result(slot, is_finite=bool(self._is_finite[slot])) for slot in ended]
        self._is_crowded = False
        yield from zip(self._vacate(ended), results, strict=True)

    def _generate(self) -> np.ndarray:
        """Generates one token in every live branch, and returns which branches go on."""
        live = self._live
        new = self._run_layers()
        goes_on: np.ndarray = (
            live & ~is_end(new.tokens, self._model.config.end_ids) & (self._tree.step < self._steps - 1)[:, None]
        )
        self._outputs.append(new, self._tree.step, live=live)
        if self._ends_output is not None:
            self._stop(goes_on, self._ends_output)
        self._step.propagate(new.exit_layers, goes_on)
        self._is_finite &= (new.is_finite | ~live).all(axis=1)
        self._tree.advance(new.tokens, new.exit_layers, alive=live)
        self._previous, self._live = new.tokens, goes_on
        return goes_on

    def _stop(self, goes_on: np.ndarray, ends_output: EndsOutput) -> None:
        """Takes branches that their newest token has ended out of those that go on, bool of shape (slots, branches)."""
        for slot, branch in np.argwhere(goes_on).tolist():
            if ends_output(self._outputs.tokens[slot, branch, : self._tree.step[slot] + 1].tolist()):
                goes_on[slot, branch] = False

    def _share(self, slot: int) -> None:
        """Copies to a slot's branches the steps that they share with a known output, which may be all of it."""
        request = self._requests[slot]
        if request is None or request.known is None:
            return
        known = request.known
        shared = known.steps_shared(self._thresholds[slot])
        self._shared_steps[slot] = shared
        self._live[slot] = known.goes_on | (shared < len(known.tokens))
        self._outputs.share(slot, known, steps=shared)

    def newest(self) -> Iterator[tuple[Request, int, int]]:
        """Yields every prompt that goes on, with the newest token and exit layer of its first branch."""
        for slot in np.flatnonzero(self._live[:, 0] & (self._tree.step > 0)).tolist():
            request = self._requests[slot]
            assert request is not None, "only slots that hold a prompt are live"
            at_step = slot, 0, self._tree.step[slot] - 1
            yield request, int(self._outputs.tokens[at_step]), int(self._outputs.exit_layers[at_step])

    def drop(self, request: Request) -> None:
        """Frees the slot of a cancelled prompt, if it has one."""
        if request in self._requests:
            self._vacate([self._requests.index(request)])
            self._is_crowded = False

    def make_room(self) -> Iterator[Request]:
        """Ensures that every layer has a free node for each live branch, and yields the prompts preempted for that.

        Stores grow as far as the budget allows. Beyond that, the youngest prompts are preempted and start again later;
        no prompt is admitted until another has ended.
        """
        while self._tree.room() < self._live.sum():
            added = min(self._tree.capacity, self._most_nodes - self._tree.capacity)
            if added:
                self._tree.grow(added)
                with self._weights.group.running():
                    self._engine.grow(added)
                continue
            busy = np.flatnonzero(self._is_held)
            assert len(busy) > 1, "the budget has room for one prompt"
            youngest = busy.tolist()[int(np.argmin(self._tree.step[busy]))]
            self._is_crowded = True
            yield from self._vacate([youngest])

    def _vacate(self, slots: Sequence[int]) -> list[Request]:
        """Frees slots, and returns the requests that they held."""
        self._tree.release(slots)
        return [self._vacated(slot) for slot in slots]

    def _vacated(self, slot: int) -> Request:
        request = self._requests[slot]
        assert request is not None, "only slots that hold a prompt are vacated"
        self._requests[slot] = None
        self._is_held[slot] = self._live[slot] = False
        self._admission.give_back(int(self._slots.widths[slot]), int(self._slots.places[slot]))
        return request

    def _run_layers(self) -> StepOutputs:
        """Runs this step's layers, and returns the new token of every branch with its exit layer and confidences."""
        step = np.minimum(self._tree.step, self._steps - 1)
        # Branches whose step is known: their output has it already.
        is_known = self._live & (self._tree.step[:, None] < self._shared_steps)
        has_known = bool(is_known.any())
        new = self._step.run(
            self._live,
            previous=self._previous,
            thresholds=self._thresholds[np.arange(len(step)), step],
            known_exits=self._outputs.exits_at(step, is_known=is_known) if has_known else None,
        )
        if has_known:
            new.put_known(self._outputs, step, is_known=is_known)
        return new


def report_nothing(done: int, total: int) -> None:
    """The `OnShape` of a caller that gives none."""
