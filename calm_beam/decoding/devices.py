"""A packed decoder on each of several groups of devices, with the prompts spread over them."""

import queue
import threading
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import EngineRecord

from .batch import Batch
from .device_groups import device_groups, placed
from .memory import check_devices, choose_budget
from .packed import PackedDecoder
from .result import KnownOutput, SweepResult
from .work import Work

_Indexed = tuple[int, SweepResult]


class PackedDecoders:
    """Decodes on the devices of this process, with a model on each, or on each group of them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        rules: Sequence[ExitRule],
        *,
        thresholds: np.ndarray,
        max_input_length: int,
        batch_size: int | None,
        token_budget: int | None,
        exit_head: str,
        engine: str = "auto",
        arithmetic: Arithmetic = FLOAT32,
        devices: Sequence[jax.Device] | None = None,
        model_parallelism: int = 1,
    ) -> None:
        """Prepares a decoder for each group of devices.

        Args:
          checkpoint: The model.
          rules: As in `PackedDecoder`.
          thresholds: As in `PackedDecoder`.
          max_input_length: Most tokens of a prompt.
          batch_size: Most prompts decoded at the same time; None for as many as memory and speed recommend.
          token_budget: Most positions held at a time; None for a share of the device's memory.
          exit_head: One of `EXIT_HEADS`.
          engine: One of `engine_choice.ENGINE_CHOICES`: what computes rows. Engines round otherwise.
          arithmetic: In which numbers the model computes.
          devices: Of JAX's default platform; None for all of this process.
          model_parallelism: Devices that share one model.

        Raises:
          ValueError: If the budget has no room for one prompt, a device is of another platform, or the devices cannot
            share the model so.
        """
        _, steps, lanes = thresholds.shape
        self._decoders: list[PackedDecoder] = []
        for group in device_groups(checkpoint.config, model_parallelism=model_parallelism, devices=devices):
            check_devices(checkpoint.config, group, arithmetic)
            # Before the budget: what is free is what the weights leave.
            on_group = placed(checkpoint, group, arithmetic)
            budget = choose_budget(
                checkpoint.config,
                group,
                lanes=lanes,
                steps=steps,
                source=max_input_length,
                batch_size=batch_size,
                token_budget=token_budget,
                arithmetic=arithmetic,
            )
            decoder = PackedDecoder(
                on_group,
                rules,
                group=group,
                thresholds=thresholds,
                max_input_length=max_input_length,
                budget=budget,
                exit_head=exit_head,
                engine=engine,
                arithmetic=arithmetic,
            )
            self._decoders.append(decoder)

    @property
    def work(self) -> Work:
        """What has been decoded so far, counted."""
        return sum((decoder.work for decoder in self._decoders), Work())

    @property
    def engine(self) -> EngineRecord:
        """What computes rows, on each group alike."""
        return self._decoders[0].engine

    @property
    def slots(self) -> int:
        """Most prompts that are decoded side by side, on all devices together."""
        return sum(decoder.slots for decoder in self._decoders)

    def open_batch(self) -> Batch:
        """Returns a batch for prompts that are not known yet, on the first group of devices."""
        return self._decoders[0].open_batch()

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        known: Sequence[KnownOutput] | None = None,
        *,
        schedules: Sequence[int] | None = None,
    ) -> Iterator[_Indexed]:
        """Yields the outputs of every prompt, with its index, in the order in which they end.

        Args:
          prompts: Token ids of each prompt.
          known: As in `PackedDecoder.decode`.
          schedules: As there.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        if len(self._decoders) == 1:
            yield from self._decoders[0].decode(prompts, known, schedules=schedules)
            return
        yield from decode_on_devices(self._decoders, prompts, known=known, schedules=schedules)


def decode_on_devices(
    decoders: Sequence[PackedDecoder],
    prompts: Sequence[Sequence[int]],
    *,
    known: Sequence[KnownOutput] | None = None,
    schedules: Sequence[int] | None = None,
) -> Iterator[_Indexed]:
    """Yields the outputs of every prompt, with its index, in the order in which they end.

    Args:
      decoders: Each with devices and a model of its own.
      prompts: Token ids of each prompt. Dealt out by length, so that no decoder gets all the long ones.
      known: As in `PackedDecoder.decode`.
      schedules: As there.

    Raises:
      Exception: What a decoder raises, once the others have stopped, which they do at their next result. The devices
        are free by then, so that the caller can decode again.
    """
    by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    results = _Results(senders=len(decoders))
    threads = [
        threading.Thread(
            target=_run_decoder,
            args=(decoder, by_length[number :: len(decoders)], prompts, known, schedules, results),
            daemon=True,
        )
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
    """Hands results from the threads of the devices to the one that reads them.

    A device runs ahead of its reader by one result at most, so that results do not pile up.
    """

    def __init__(self, *, senders: int) -> None:
        self._senders = senders
        # None is the last item of a sender that has nothing left.
        self._items: queue.Queue[_Indexed | BaseException | None] = queue.Queue(maxsize=senders)
        self._is_abandoned = threading.Event()

    def send(self, item: _Indexed | BaseException | None) -> bool:
        """Waits for room, and returns whether the item was taken: nobody reads it once results are abandoned."""
        while not self._is_abandoned.is_set():
            try:
                self._items.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def received(self) -> Iterator[_Indexed]:
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


def _run_decoder(
    decoder: PackedDecoder,
    members: Sequence[int],
    prompts: Sequence[Sequence[int]],
    known: Sequence[KnownOutput] | None,
    schedules: Sequence[int] | None,
    results: _Results,
) -> None:
    """Sends the outputs of the given members of the prompts, and then None; or what went wrong."""
    try:
        own_known = [known[index] for index in members] if known is not None else None
        own_schedules = [schedules[index] for index in members] if schedules is not None else None
        own = [prompts[index] for index in members]
        for position, result in decoder.decode(own, own_known, schedules=own_schedules):
            if not results.send((members[position], result)):
                return
        results.send(None)
    except BaseException as error:
        results.send(error)
