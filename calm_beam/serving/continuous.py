"""One batch for the prompts of many callers, which join it and leave it at any step."""

import collections
import concurrent.futures
import dataclasses
import itertools
import threading
from collections.abc import Callable
from typing import Self

from calm_beam.decoding.batch import Batch, Request
from calm_beam.decoding.batch_decoder import result_of_lane
from calm_beam.decoding.padding import widths_up_to
from calm_beam.errors import CalmBeamError
from calm_beam.vocabulary import EOS_ID

from .answer import Answer, OutputError
from .generator import Generator
from .request import AnyPrompt, ServedRequest

OnToken = Callable[[int, int], None]
"""Takes a token and its exit layer."""


class BusyError(CalmBeamError, RuntimeError):
    """More prompts wait than may: come again later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ticket:
    """A prompt that somebody waits for.

    Attributes:
      served: The prompt.
      request: The same, as the batch takes it.
      future: Where the answer goes; whoever has it may cancel it.
      on_token: Called with every token but the last.
    """

    served: ServedRequest
    request: Request
    future: concurrent.futures.Future[Answer]
    on_token: OnToken | None


class ContinuousGenerator:
    """Answers prompts as they come, together with those that are being answered.

    A thread of its own runs the batch: a prompt begins at the next step if there is room for it, else when another has
    ended. Tokens and exit layers are those of one prompt at a time but at near ties, as in `Generator.generate_batch`.
    `close` it, or use it in a `with` statement.
    """

    def __init__(self, generator: Generator, *, most_waiting: int = 256) -> None:
        """Starts the thread.

        Args:
          generator: What answers; its `batch_size` is how many prompts are decoded side by side.
          most_waiting: Prompts that may wait for their turn.

        Raises:
          ValueError: If `most_waiting` is below 1.
        """
        if most_waiting < 1:
            raise ValueError(f"most_waiting must be at least 1, got {most_waiting}.")
        self._generator = generator
        self._most_waiting = most_waiting
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._waiting: collections.deque[_Ticket] = collections.deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="calm-beam-batch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes no more prompts, and waits until all that were taken are answered."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def warm_up(self) -> None:
        """Compiles what most prompts need, for every width: alone, and many together."""
        widths = widths_up_to(self._generator.max_input_length)
        together = min(self._generator.batch_decoder().slots, self._most_waiting // len(widths))
        for count in (1, max(1, together)):
            prompts = [[EOS_ID] * width for width in widths for _ in range(count)]
            for future in [self._submitted(self._generator.request(ids, name="of the warm-up")) for ids in prompts]:
                future.exception()

    def submit(
        self, prompt: AnyPrompt, *, group: str | None = None, on_token: OnToken | None = None
    ) -> concurrent.futures.Future[Answer]:
        """Returns at once, with the answer to come. If it is cancelled, decoding ends at the next step.

        Args:
          prompt: As in `Generator.generate_batch`.
          group: As there.
          on_token: Called for every token but the last as soon as it is there, with its exit layer; in the thread that
            decodes, so that it has to be quick, and may not raise. The last one is in the answer.

        Raises:
          PromptError: As in `Generator.generate_batch`. The answer may be an `OutputError`.
          BusyError: If too many prompts wait.
          RuntimeError: If it is closed.
        """
        return self._submitted(self._generator.request(prompt, name="the prompt", group=group), on_token)

    def _submitted(self, served: ServedRequest, on_token: OnToken | None = None) -> concurrent.futures.Future[Answer]:
        request = Request(next(self._numbers), served.ids, schedule=self._generator.schedule(served))
        ticket = _Ticket(served=served, request=request, future=concurrent.futures.Future(), on_token=on_token)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the generator is closed, and takes no more prompts.")
            if len(self._waiting) >= self._most_waiting:
                raise BusyError(f"{self._most_waiting} prompts wait already. Come again later.")
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket.future

    def _run(self) -> None:
        """Answers prompts until it is closed and none is left."""
        while self._waits_for_prompts():
            running: dict[int, _Ticket] = {}
            try:
                self._answer_all(running)
            except Exception as error:
                # Who came later may fare better: the next batch begins anew.
                for ticket in running.values():
                    if ticket.future.set_running_or_notify_cancel():
                        ticket.future.set_exception(error)

    def _waits_for_prompts(self) -> bool:
        """Returns once there are prompts; False if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return bool(self._waiting)

    def _answer_all(self, running: dict[int, _Ticket]) -> None:
        """Answers prompts until none is left, for good or for now.

        Args:
          running: Changed in place: what the batch has taken and not answered.
        """
        batch = self._generator.batch_decoder().open_batch()
        queues = batch.queues()
        while True:
            with self._changed:
                for _ in range(min(len(self._waiting), batch.free_slots() - sum(map(len, queues.values())))):
                    ticket = self._waiting.popleft()
                    running[ticket.request.index] = ticket
                    queues[batch.width_for(ticket.request)].append(ticket.request)
            _drop_cancelled(batch, queues, running)
            batch.admit(queues)
            for request, result in batch.step():
                ticket = running.pop(request.index)
                if ticket.future.set_running_or_notify_cancel():
                    try:
                        ticket.future.set_result(self._generator.answer(ticket.served, result_of_lane(result)))
                    except OutputError as error:
                        ticket.future.set_exception(error)
            for request, token, exit_layer in batch.newest():
                on_token = running[request.index].on_token
                if on_token is not None:
                    on_token(token, exit_layer)
            if not batch.is_busy() and not running and not self._waits_for_prompts():
                return


def _drop_cancelled(batch: Batch, queues: dict[int, collections.deque[Request]], running: dict[int, _Ticket]) -> None:
    """Takes out what nobody waits for any more."""
    for index in [index for index, ticket in running.items() if ticket.future.cancelled()]:
        ticket = running.pop(index)
        queue = queues[batch.width_for(ticket.request)]
        if ticket.request in queue:
            queue.remove(ticket.request)
        else:
            batch.drop(index)
