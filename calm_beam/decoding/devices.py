"""One sweep on each of several devices, with the prompts spread over them."""

import queue
import threading
from collections.abc import Iterator, Sequence

import jax

from .result import KnownOutput, SweepResult
from .shared import SharedSweep

_Item = tuple[int, SweepResult] | BaseException | None


def decode_on_devices(
    sweeps: Sequence[tuple[jax.Device, SharedSweep]],
    prompts: Sequence[Sequence[int]],
    known: Sequence[KnownOutput] | None,
) -> Iterator[tuple[int, SweepResult]]:
    """Yields the outputs of every prompt, with its index, in the order in which they end.

    Args:
      sweeps: A sweep for each device, with a model of its own.
      prompts: Token ids of each prompt. Dealt out by length, so that no device gets all the long ones.
      known: As in `SharedSweep.decode`.

    Raises:
      Exception: What a sweep raises, once the others have stopped, which they do at their next result: whoever decodes
        again finds the devices free.
    """
    # A device runs ahead of its reader by one result at most, so that results do not pile up.
    results: queue.Queue[_Item] = queue.Queue(maxsize=len(sweeps))
    is_abandoned = threading.Event()
    by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))

    def put(item: _Item) -> bool:
        while not is_abandoned.is_set():
            try:
                results.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def run(device: jax.Device, sweep: SharedSweep, members: Sequence[int]) -> None:
        try:
            with jax.default_device(device):
                own = [prompts[index] for index in members]
                own_known = [known[index] for index in members] if known is not None else None
                for position, result in sweep.decode(own, own_known):
                    if not put((members[position], result)):
                        return
            put(None)
        except BaseException as error:
            put(error)

    threads = [
        threading.Thread(target=run, args=(device, sweep, by_length[number :: len(sweeps)]), daemon=True)
        for number, (device, sweep) in enumerate(sweeps)
    ]
    for thread in threads:
        thread.start()
    try:
        running = len(sweeps)
        while running:
            item = results.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        is_abandoned.set()
        for thread in threads:
            thread.join()
