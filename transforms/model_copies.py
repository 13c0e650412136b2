"""The copies of a model that one process keeps, lent to one thread at a time."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ModelCopies(Generic[T]):
    """At most so many copies of a model, the first loaded at once, the others when more threads want one.

    A thread that finds all copies lent out waits: two threads that decode with one copy would need the memory of two.
    """

    def __init__(self, load: Callable[[], T], *, most: int) -> None:
        """Loads the first copy.

        Args:
          load: Loads one.
          most: How many there may be, at least 1.
        """
        self._load = load
        self._most = most
        self._loaded = 1
        self._lock = threading.Lock()
        # The last one given back is lent first, so that others stay unused if they are not needed.
        self._idle: queue.LifoQueue[T] = queue.LifoQueue()
        self._load_msecs: list[int] = []
        self._idle.put(self._timed_load())

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[T]:
        """Lends a copy for the block."""
        copy = self._take()
        try:
            yield copy
        finally:
            self._idle.put(copy)

    def take_load_msecs(self) -> list[int]:
        """Returns how long each load took that has not been returned before."""
        with self._lock:
            taken, self._load_msecs = self._load_msecs, []
        return taken

    def _take(self) -> T:
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        with self._lock:
            may_load = self._loaded < self._most
            self._loaded += may_load
        if not may_load:
            return self._idle.get()
        try:
            return self._timed_load()
        except BaseException:
            with self._lock:
                self._loaded -= 1
            raise

    def _timed_load(self) -> T:
        start = time.perf_counter()
        copy = self._load()
        with self._lock:
            self._load_msecs.append(round(1000 * (time.perf_counter() - start)))
        return copy
