"""One sweep on each of several devices, with the prompts spread over them."""

import queue
import threading
from collections.abc import Iterator, Sequence

import jax

from .result import KnownOutput, SweepResult
from .shared import SharedSweep

_Indexed = tuple[int, SweepResult]


def decode_on_devices(
    sweeps: Sequence[tuple[jax.Device, SharedSweep]],
    prompts: Sequence[Sequence[int]],
    *,
    known: Sequence[KnownOutput] | None = None,
) -> Iterator[_Indexed]:
    """Yields the outputs of every prompt, with its index, in the order in which they end.

    Args:
      sweeps: A sweep for each device, with a model of its own.
      prompts: Token ids of each prompt. Dealt out by length, so that no device gets all the long ones.
      known: As in `SharedSweep.decode`.

    Raises:
      Exception: What a sweep raises, once the others have stopped, which they do at their next result. The devices are
        free by then, so that the caller can decode again.
    """
    by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    results = _Results(senders=len(sweeps))
    threads = [
        threading.Thread(
            target=_run_sweep,
            args=(device, sweep, by_length[number :: len(sweeps)], prompts, known, results),
            daemon=True,
        )
        for number, (device, sweep) in enumerate(sweeps)
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


def _run_sweep(
    device: jax.Device,
    sweep: SharedSweep,
    members: Sequence[int],
    prompts: Sequence[Sequence[int]],
    known: Sequence[KnownOutput] | None,
    results: _Results,
) -> None:
    """Sends the outputs of the given members of the prompts, and then None; or what went wrong."""
    try:
        with jax.default_device(device):
            own = [prompts[index] for index in members]
            own_known = [known[index] for index in members] if known is not None else None
            for position, result in sweep.decode(own, own_known):
                if not results.send((members[position], result)):
                    return
        results.send(None)
    except BaseException as error:
        results.send(error)
