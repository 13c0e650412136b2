"""One batch for the prompts of many callers, which join it and leave it at any step."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Self

from calm_beam.decoding.batch import Batch, OnShape
from calm_beam.decoding.branches import Request
from calm_beam.decoding.engine import Work
from calm_beam.errors import CalmBeamError
from calm_beam.inputs.examples import AnyPrompt

from .answer import Answer, OutputError, ServedRequest
from .generator import Generator, log_shapes, named_while_waiting

OnToken = Callable[[int, int], None]
"""Takes a token and its exit layer."""
_Queues = dict[int, collections.deque[Request]]
_COMPILING = "calm-beam: compiling all that batches of prompts may need, once"


class BusyError(CalmBeamError, RuntimeError):
    """More prompts wait than may: come again later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ticket:
    """A prompt that a caller waits for.

    Attributes:
      served: The prompt.
      request: The same, as the batch takes it.
      future: Receives the answer; its holder may cancel it.
      on_token: Called with every token but the last.
    """

    served: ServedRequest
    request: Request
    future: concurrent.futures.Future[Answer]
    on_token: OnToken | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WarmUp:
    """A compilation that a caller waits for.

    Attributes:
      compiled: Ends with it.
      on_shape: Hears how far it is.
    """

    compiled: concurrent.futures.Future[None]
    on_shape: OnShape

    def run(self, batch: Batch) -> None:
        """Compiles what a batch may need, and resolves the future of the caller that waits for it."""
        try:
            batch.warm_up(on_shape=self.on_shape)
        except Exception as error:
            self.compiled.set_exception(error)
            raise
        self.compiled.set_result(None)


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
          most_waiting: Prompts that may queue, in addition to those that the batch has room for.

        Raises:
          ValueError: If `most_waiting` is below 1.
        """
        if most_waiting < 1:
            raise ValueError(f"most_waiting must be at least 1, got {most_waiting}.")
        self._generator = generator
        self._most_waiting = most_waiting
        self._changed = threading.Condition()
        self._waiting: collections.deque[_Ticket] = collections.deque()
        # Prompts that the batch has taken and not answered; how many more it has room for.
        self._running: dict[Request, _Ticket] = {}
        self._room = 0
        # Futures of callers that wait until everything is compiled.
        self._warm_up: _WarmUp | None = None
        self._work = Work()
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

    @property
    def waiting(self) -> int:
        """How many prompts wait for their turn."""
        with self._changed:
            self._forget_cancelled()
            return len(self._waiting)

    @property
    def running(self) -> int:
        """How many prompts are being decoded."""
        return len(self._running)

    @property
    def room(self) -> int:
        """How many more prompts are taken now."""
        with self._changed:
            self._forget_cancelled()
            return self._most_waiting + self._room - len(self._waiting)

    @property
    def work(self) -> Work:
        """The model's work for prompts so far."""
        return self._work

    def warm_up(self, *, on_shape: OnShape | None = None) -> None:
        """Compiles all that prompts may need, so that none has to wait for that.

        Args:
          on_shape: Called in the thread that compiles, as `Batch.warm_up` calls it; of several callers, the first's.
            `log_shapes()` if omitted.

        Raises:
          RuntimeError: If it is closed.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the generator is closed, and takes no more prompts.")
            if self._warm_up is None:
                self._warm_up = _WarmUp(compiled=concurrent.futures.Future(), on_shape=on_shape or log_shapes())
            compiled = self._warm_up.compiled
            self._changed.notify()
        with contextlib.nullcontext() if on_shape else named_while_waiting(_COMPILING):
            compiled.result()

    def submit(
        self, prompt: AnyPrompt, *, group: str | None = None, on_token: OnToken | None = None
    ) -> concurrent.futures.Future[Answer]:
        """Returns at once, with the answer to come. If it is cancelled, decoding ends at the next step.

        Args:
          prompt: A text, to which the manifest's task prefix is added; or token ids, which are used unchanged.
          group: The group that the prompt belongs to; None for none.
          on_token: Called for every token but the last as soon as it is there, with its exit layer; in the thread that
            decodes, so that it has to be quick, and may not raise. The last one is in the answer.

        Raises:
          PromptError: As in `Generator.generate_batch`. The answer may be an `OutputError`.
          BusyError: If too many prompts wait.
          RuntimeError: If it is closed.
        """
        return self.submit_request(self._generator.request(prompt, name="the prompt", group=group), on_token=on_token)

    def submit_request(
        self, request: ServedRequest, *, on_token: OnToken | None = None
    ) -> concurrent.futures.Future[Answer]:
        """Returns at once, as `submit` does, for a prompt that `Generator.request` has found fit to be decoded.

        Args:
          request: The prompt.
          on_token: As in `submit`.

        Raises:
          BusyError: As `submit`.
          RuntimeError: Likewise.
        """
        ticket = _Ticket(
            served=request,
            request=self._generator.to_decode(request),
            future=concurrent.futures.Future(),
            on_token=on_token,
        )
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the generator is closed, and takes no more prompts.")
            if len(self._waiting) >= self._most_waiting + self._room:
                self._forget_cancelled()
                if len(self._waiting) >= self._most_waiting + self._room:
                    raise BusyError(f"{len(self._waiting)} prompts wait already. Come again later.")
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket.future

    def _forget_cancelled(self) -> None:
        """Takes prompts that nobody waits for any more out of those that wait, so that they keep nobody out."""
        if any(ticket.future.cancelled() for ticket in self._waiting):
            self._waiting = collections.deque(ticket for ticket in self._waiting if not ticket.future.cancelled())

    def _run(self) -> None:
        """Answers prompts until it is closed and none is left."""
        while self._waits_for_work():
            self._running = {}
            try:
                self._answer_all(self._running)
            except Exception as error:
                # Later prompts may succeed: the next batch starts from the beginning.
                failed, self._running, self._room = self._running, {}, 0
                for ticket in failed.values():
                    if ticket.future.set_running_or_notify_cancel():
                        ticket.future.set_exception(error)

    def _waits_for_work(self) -> bool:
        """Returns once there is something to do; False if there will be nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_work() or self._is_closed)
            return self._has_work()

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._warm_up is not None

    def _answer_all(self, running: dict[Request, _Ticket]) -> None:
        """Answers prompts until none is left, for good or for now.

        Args:
          running: Changed in place: what the batch has taken and not answered.
        """
        batch = self._generator.batch_decoder().open_batch()
        queues = batch.queues()
        while True:
            self._take(batch, queues, running)
            _drop_cancelled(batch, queues, running)
            batch.admit(queues)
            for request, result in batch.step():
                ticket = running.pop(request)
                if ticket.future.set_running_or_notify_cancel():
                    try:
                        ticket.future.set_result(self._generator.answer(ticket.served, result.branch(0)))
                    except OutputError as error:
                        ticket.future.set_exception(error)
            self._work += batch.take_work()
            for request, token, exit_layer in batch.newest():
                on_token = running[request].on_token
                if on_token is not None:
                    on_token(token, exit_layer)
            if not batch.is_busy() and not running:
                self._room = batch.free_slots()
                if not self._waits_for_work():
                    return

    def _take(self, batch: Batch, queues: _Queues, running: dict[Request, _Ticket]) -> None:
        """Gives a batch the prompts that it has room for, having compiled what it needs if a caller waits for that."""
        with self._changed:
            room = batch.free_slots() - sum(map(len, queues.values()))
            taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), room))]
            self._room = room - len(taken)
            warm_up, self._warm_up = self._warm_up, None
        for ticket in taken:
            running[ticket.request] = ticket
            queues[batch.width_for(ticket.request)].append(ticket.request)
        if warm_up is not None:
            warm_up.run(batch)


def _drop_cancelled(batch: Batch, queues: _Queues, running: dict[Request, _Ticket]) -> None:
    """Takes out what nobody waits for any more."""
    for request in [request for request, ticket in running.items() if ticket.future.cancelled()]:
        del running[request]
        queue = queues[batch.width_for(request)]
        if request in queue:
            queue.remove(request)
        else:
            batch.drop(request)
