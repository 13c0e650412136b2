"""The decoder: prompts in; tokens, exit layers and confidences out, by every branch of each prompt.

A sweep is a decoder with a branch for every threshold. A serving decoder has a single branch, and its requests may
name other thresholds: prompts in one batch then exit at their own.

Prompts are spread over groups of devices. Each group has a decoder that runs a layer once for everything that needs
it: branches of a prompt, and many prompts. Prompts occupy the slots of a batch, and all of them take one step at a
time. At each layer, the groups of branches that share a state (see `kv_cache`) are packed into rows, from any prompt;
branches that exit drop out, and the others go on to the next layer. Logits are computed only where a branch has to
decide. A slot whose branches have all ended takes the next prompt.
"""

import collections
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Self

import jax
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.measures import Need
from calm_beam.model import architecture_of, network_of
from calm_beam.model.interface import EarlyExitModel
from calm_beam.precision import FLOAT32, Precision

from .batch import Batch, ExpectedPrompts
from .branches import Branch, Branches, BranchResult, EndsOutput, NearTies, PromptResult, Request
from .compilation import common_prefix, joined_widths, members_by_width, widths_up_to
from .device_groups import device_groups, placed
from .engine import Work
from .engine_choice import Machine, chosen_engine, near_ties_of
from .memory import Budget, check_devices, choose_budget, return_freed_memory
from .settings import check_decodable
from .weights import Weights

_LOGGER = logging.getLogger(__name__)


class GroupDecoder:
    """Decodes prompts, each in all of its branches, sharing the work of branches that are in the same state.

    Attributes:
      work: Counts of the work so far.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        branch_rules: Branches,
        *,
        weights: Weights,
        thresholds: np.ndarray,
        max_input_length: int,
        budget: Budget,
        ends_output: EndsOutput | None = None,
    ) -> None:
        """Prepares a decoder.

        Args:
          model: The network.
          branch_rules: How exits of each branch are decided.
          weights: The model's weights, on the group.
          thresholds: float32, shape (steps, branches). Default for requests that name no others.
          max_input_length: Most tokens of a prompt.
          budget: How many prompts and cached tokens fit at a time. It is halved whenever the device runs out of memory.
          ends_output: What ends an output besides end tokens; None for nothing.
        """
        self._model, self._branch_rules, self._weights, self._thresholds = model, branch_rules, weights, thresholds
        self._max_input_length = max_input_length
        self._budget = budget
        self._ends_output = ends_output
        self.work = Work()

    @property
    def slots(self) -> int:
        """Most prompts that are decoded at the same time."""
        return self._budget.slots

    def open_batch(self) -> Batch:
        """Returns a batch for prompts that are not known yet, with room for every width that they may have.

        It admits only as many prompts as fit without preemption.
        """
        steps, num_branches = self._thresholds.shape
        room = (self._budget.tokens - self._source_tokens()) // (steps * num_branches)
        budget = dataclasses.replace(self._budget, slots=min(self.slots, max(1, room)))
        widths = {width: range(budget.slots) for width in widths_up_to(self._max_input_length)}
        counts = dict.fromkeys(joined_widths(widths, tokens=self._source_tokens()), budget.slots)
        return self._batch(budget, ExpectedPrompts(counts, {}), admits_few=True)

    def decode(self, requests: Sequence[Request]) -> Iterator[tuple[Request, PromptResult]]:
        """Yields every request with its outputs, in the order in which they end; the requests must be distinct.

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
        batch = self._batch(self._budget, ExpectedPrompts(counts, self._prefixes(requests, members_by_width)))
        # Long prompts tend to have long outputs: started first, they do not run alone at the end.
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
        """Returns by width the common prefix of its prompts, where prefilling it once pays."""
        if not architecture_of(self._model.config).shares_prefixes:
            return {}
        found = {
            width: common_prefix([requests[index].ids for index in members], width=width)
            for width, members in members_by_width.items()
        }
        return {width: prefix for width, prefix in found.items() if prefix}

    def _source_tokens(self) -> int:
        steps, num_branches = self._thresholds.shape
        return self._budget.source_tokens(steps * num_branches)

    def _batch(self, budget: Budget, expected: ExpectedPrompts, *, admits_few: bool = False) -> Batch:
        with self._weights.group.running():
            return Batch(
                self._model,
                self._branch_rules,
                weights=self._weights,
                thresholds=self._thresholds,
                budget=budget,
                expected=expected,
                admits_few=admits_few,
                ends_output=self._ends_output,
            )


_Ended = tuple[Request, PromptResult]


def decode_on_devices(decoders: Sequence[GroupDecoder], requests: Sequence[Request]) -> Iterator[_Ended]:
    """Yields every request with its outputs, in the order in which they end.

    Args:
      decoders: One per device group, each with its own copy of the model.
      requests: Distinct requests. They are dealt out by length, so that no decoder gets all the long ones.

    Raises:
      Exception: The error of a decoder, raised once the others have stopped at their next result. The devices are free
        by then, so that the caller can decode again.
    """
    if len(decoders) == 1:
        yield from decoders[0].decode(requests)
        return
    by_length = sorted(requests, key=lambda request: -len(request.ids))
    results = _Results(senders=len(decoders))
    threads = [
        threading.Thread(target=_run_decoder, args=(decoder, by_length[number :: len(decoders)], results), daemon=True)
        for number, decoder in enumerate(decoders)
    ]
    for thread in threads:
        thread.start()
    try:
        yield from results.received()
    finally:
        results.abandon()
        for thread in threads:
            thread.join()


class _Results:
    """Passes results from the threads of the devices to the thread that reads them.

    A device runs ahead of the reader by at most one result, so that results do not pile up.
    """

    def __init__(self, *, senders: int) -> None:
        self._senders = senders
        # None is the last item of a sender that has nothing left.
        self._items: queue.Queue[_Ended | BaseException | None] = queue.Queue(maxsize=senders)
        self._is_abandoned = threading.Event()

    def send(self, item: _Ended | BaseException | None) -> bool:
        """Waits for room, and returns whether the item was queued; nothing is queued once results are abandoned."""
        while not self._is_abandoned.is_set():
            try:
                self._items.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def received(self) -> Iterator[_Ended]:
        """Yields results until every sender is done; raises the first exception that was sent."""
        running = self._senders
        while running:
            item = self._items.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item

    def abandon(self) -> None:
        """Stops the senders at their next result."""
        self._is_abandoned.set()


def _run_decoder(decoder: GroupDecoder, requests: Sequence[Request], results: _Results) -> None:
    """Sends the requests with their outputs, and then None; or sends the exception."""
    try:
        for ended in decoder.decode(requests):
            if not results.send(ended):
                return
        results.send(None)
    except BaseException as error:
        results.send(error)


class Decoder:
    """Decodes prompts, each by some branches; neither prompts nor branches ever influence each other.

    Branches of a prompt share the work that they have in common, and prompts share layer runs: a layer is run for all
    that need it. Decoding is batch-invariant: a prompt gives the same bits in any batch; docs/guarantee.md has the
    exceptions. Threads may share a decoder, but only one of them may decode at a time.

    Attributes:
      engine: The engine that computes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        branches: Sequence[Branch],
        *,
        max_input_length: int = 512,
        batch_size: int | None = None,
        max_cache_tokens: int | None = None,
        exit_head: str = "exact",
        engine: str = "auto",
        precision: Precision = FLOAT32,
        devices: Sequence[jax.Device] | None = None,
        model_parallelism: int = 1,
        ends_output: EndsOutput | None = None,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          branches: Branches by which every prompt is decoded, at least one. Requests may name other thresholds.
          max_input_length: Most tokens of a prompt.
          batch_size: Most prompts decoded at the same time; None to choose by memory and speed.
          max_cache_tokens: Most positions in the KV cache at a time, those of the sources included; None for a share of
            the device's memory.
          exit_head: Form of the head that decides, one of `EXIT_HEADS`. Tokens and exit layers depend on it only at
            near ties. Where several measures use logits, the exact head decides.
          engine: The engine that computes rows, one of `engine_choice.ENGINE_CHOICES`. Engines round differently.
          precision: Precision in which the model computes.
          devices: Devices of JAX's default platform, each with a copy of the model; None for all of this process.
          model_parallelism: Devices that share one model, each with a part of its heads, feed-forward layers and
            vocabulary; the number of devices must be a multiple of it.
          ends_output: What ends an output besides end tokens, such as stop strings; None for nothing.

        Raises:
          ValueError: If a rule does not fit the model (no exit classifier, `min_exit_layer` too high), branches cannot
            share their work (`Branches.of` says which can), a number is below 1, the model has too few positions, the
            budget has no room for one prompt, a device is of another platform, or the model cannot be divided among so
            many devices.
          UsageError: If `engine` is `native` and native code cannot decode this model here.
        """
        config, steps = checkpoint.config, len(branches[0].thresholds)
        self._rules = [branch.rule for branch in branches]
        check_decodable(
            config,
            self._rules,
            max_decode_length=steps,
            max_input_length=max_input_length,
            batch_size=batch_size,
            max_cache_tokens=max_cache_tokens,
        )
        self._branch_rules = Branches.of(self._rules, layers=config.num_decoder_layers)
        # [steps, branches]
        self._thresholds = np.stack([branch.thresholds for branch in branches], axis=1)
        groups = device_groups(config, model_parallelism=model_parallelism, devices=devices)
        by_logits = self._branch_rules.indices(Need.LOGITS)
        self.engine = chosen_engine(
            engine,
            # A certified head proves intervals for one measure only.
            exit_head if len(by_logits) < 2 else "exact",
            config=config,
            rule=self._branch_rules.rules[by_logits[0] if by_logits else 0],
            precision=precision,
            machine=Machine.of(groups[0].devices[0]),
            model_parallelism=model_parallelism,
        )
        model = network_of(config, precision=precision)
        self._decoders: list[GroupDecoder] = []
        for group in groups:
            check_devices(config, group, precision)
            # Place the weights before choosing the budget, which divides the memory that they leave free.
            on_group = placed(checkpoint, group, precision)
            budget = choose_budget(
                config,
                group,
                num_branches=len(branches),
                steps=steps,
                source=max_input_length,
                batch_size=batch_size,
                max_cache_tokens=max_cache_tokens,
                precision=precision,
            )
            with group.running():
                weights = Weights(
                    on_group, model, group, steps=steps, measures=self._branch_rules.measures, engine=self.engine
                )
            self._decoders.append(
                GroupDecoder(
                    model,
                    self._branch_rules,
                    weights=weights,
                    thresholds=self._thresholds,
                    max_input_length=max_input_length,
                    budget=budget,
                    ends_output=ends_output,
                )
            )

    @property
    def work(self) -> Work:
        """Counts of the work so far."""
        return sum((decoder.work for decoder in self._decoders), Work())

    @property
    def slots(self) -> int:
        """Most prompts that are decoded at the same time, on all devices together."""
        return sum(decoder.slots for decoder in self._decoders)

    def decode(self, prompts: Sequence[Request | Sequence[int]]) -> Iterator[tuple[int, PromptResult]]:
        """Yields the outputs of every prompt, with its index, in the order in which they end.

        Args:
          prompts: Requests, or plain token ids, which are decoded by the decoder's own branches.

        Raises:
          ValueError: If a prompt is empty or too long, or the branches of a request have other rules or steps than the
            decoder's.
        """
        # A prompt that is given twice is decoded twice.
        index_of = {self._request(prompt): index for index, prompt in enumerate(prompts)}
        for request, result in decode_on_devices(self._decoders, list(index_of)):
            find = functools.partial(self._near_ties, request)
            yield index_of[request], dataclasses.replace(result, find_near_ties=find)

    def open_batch(self) -> Batch:
        """Returns a batch, on the first group of devices, for prompts that arrive while others are decoded."""
        return self._decoders[0].open_batch()

    def _near_ties(self, request: Request, result: PromptResult) -> NearTies | None:
        return near_ties_of(result, self._branch_rules, thresholds=request.thresholds(self._thresholds))

    def _request(self, prompt: Request | Sequence[int]) -> Request:
        """Returns a new request for a prompt."""
        if not isinstance(prompt, Request):
            return Request(prompt)
        if prompt.branches is not None:
            shapes = [(branch.rule, len(branch.thresholds)) for branch in prompt.branches]
            if shapes != [(rule, len(self._thresholds)) for rule in self._rules]:
                raise ValueError(
                    "the branches of a request must have the exit rules of the decoder's, in their order, and as many "
                    f"steps ({len(self._thresholds)})."
                )
        return dataclasses.replace(prompt, known=None if self._branch_rules.decides_after_last_layer else prompt.known)


class BranchDecoder:
    """Decodes prompts by one branch, with a decoder of batches; threads that share it take turns.

    Attributes:
      engine: The engine that computes.
    """

    def __init__(self, decoder: Decoder, branch: Branch, *, turn: threading.Lock) -> None:
        """Takes a decoder.

        Args:
          decoder: A decoder with one branch.
          branch: Branch of the same rule and length, by which prompts are decoded.
          turn: Held while the decoder decodes.
        """
        self._decoder, self._branch, self._turn = decoder, branch, turn
        self.engine = decoder.engine

    def at(self, branch: Branch) -> Self:
        """Returns a decoder that shares everything but the branch."""
        return type(self)(self._decoder, branch, turn=self._turn)

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, BranchResult]]:
        """Yields the output of every prompt with its index, in the order in which they end.

        Args:
          prompts: Token ids of each prompt, 1 to `max_input_length` of them.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        with self._turn:
            results = list(self._decoder.decode([Request(ids, branches=[self._branch]) for ids in prompts]))
        for index, result in results:
            yield index, result.branch(0)
