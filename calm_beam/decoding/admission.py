"""Prompts on their way into slots: gone through several at a time, and ahead of the slots that become free."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .engine import Engine
from .padding import admitted_together, encoded_rows, encoded_width, padded
from .request import Request

# Of the slots, as many prompts are gone through together: fewer take longer for each.
_CHUNK_SHARE = 4
# For each slot, places for prompts that are gone through before there is a slot for them: two chunks, of which one may
# be on its way.
AHEAD_SHARE = 0.5


Waiting = Mapping[int, collections.deque[Request]]
"""Requests that wait for a slot, by the width that they are padded to; one queue for each width of the batch."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A prompt that has been given to the engine, and where its source stands: at a place among those of a width."""

    request: Request
    width: int
    place: int


class Admission:
    """Gives prompts places, and has the engine go through them."""

    def __init__(self, engine: Engine, *, places: Mapping[int, int], slots: int, admits_few: bool) -> None:
        """Prepares free places.

        Args:
          engine: What goes through prompts.
          places: How many there are, by width.
          slots: How many prompts are decoded at a time.
          admits_few: Whether prompts are gone through as soon as there is a slot for them, and not several together and
            ahead of that: they wait less, for more programs to compile.
        """
        self._engine, self._places, self._slots, self._admits_few = engine, places, slots, admits_few
        self._free = {width: list(range(count)) for width, count in places.items()}
        self._prepared: collections.deque[Prepared] = collections.deque()

    def has_prepared(self) -> bool:
        """Returns whether prompts wait that have been gone through."""
        return bool(self._prepared)

    def take(self, waiting: Waiting, *, room: int) -> list[Prepared]:
        """Returns prompts for free slots, at most `room`, in order; has those that follow gone through ahead."""
        taken: list[Prepared] = []
        while True:
            while self._prepared and len(taken) < room:
                taken.append(self._prepared.popleft())
            if not self._prepare(waiting, room=room - len(taken)):
                return taken

    def give_back(self, width: int, place: int) -> None:
        """Takes back the place of a prompt that has ended."""
        self._free[width].append(place)

    def chunk(self, width: int) -> int:
        """Returns how many prompts of a width are gone through together at most."""
        return max(1, min(self._places[width], self._slots) // _CHUNK_SHARE)

    def _prepare(self, waiting: Waiting, *, room: int) -> bool:
        """Has some waiting prompts gone through, all of one width; returns whether there were some for now."""
        for width, queue in waiting.items():
            if not queue:
                continue
            places, count = self._free[width], min(self.chunk(width), len(queue))
            if self._admits_few:
                count = min(count, room, len(places))
                if not count:
                    continue
            elif len(self._prepared) >= count:
                # As many as are gone through together are ahead already.
                return False
            elif len(places) < count:
                # In order, so that widths follow each other and are not all in use at once.
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
        """Yields prompts that are gone through together, after the width and the number of rows for that."""
        by_width: dict[int, list[Prepared]] = {}
        for each in chosen:
            by_width.setdefault(encoded_width(len(each.request.ids), width), []).append(each)
        for encoded, left in sorted(by_width.items()):
            while left:
                rows = admitted_together(len(left)) if self._admits_few else encoded_rows(self.chunk(width))
                yield encoded, rows, left[:rows]
                left = left[rows:]

    def prefill(self, width: int, together: Sequence[Prepared], *, encoded: int, rows: int) -> None:
        """Gives places the keys and values of prompts, `rows` or fewer, gone through at a width."""
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
