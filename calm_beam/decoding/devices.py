"""Prompts spread over several groups of devices, each with a decoder of its own."""

import queue
import threading
from collections.abc import Iterator, Sequence

from .group_decoder import GroupDecoder
from .request import Request
from .result import PromptResult

_Ended = tuple[Request, PromptResult]


def decode_on_devices(decoders: Sequence[GroupDecoder], requests: Sequence[Request]) -> Iterator[_Ended]:
    """Yields every request with its outputs, in the order in which they end.

    Args:
      decoders: Each with devices and a model of its own.
      requests: Distinct ones. Dealt out by length, so that no decoder gets all the long ones.

    Raises:
      Exception: What a decoder raises, once the others have stopped, which they do at their next result. The devices
        are free by then, so that the caller can decode again.
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
    """Hands results from the threads of the devices to the one that reads them.

    A device runs ahead of its reader by one result at most, so that results do not pile up.
    """

    def __init__(self, *, senders: int) -> None:
        self._senders = senders
        # None is the last item of a sender that has nothing left.
        self._items: queue.Queue[_Ended | BaseException | None] = queue.Queue(maxsize=senders)
        self._is_abandoned = threading.Event()

    def send(self, item: _Ended | BaseException | None) -> bool:
        """Waits for room, and returns whether the item was taken: nobody reads it once results are abandoned."""
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
    """Sends the requests with their outputs, and then None; or what went wrong."""
    try:
        for ended in decoder.decode(requests):
            if not results.send(ended):
                return
        results.send(None)
    except BaseException as error:
        results.send(error)
