"""Requests go from the event loop to the batch here, and their results come back.

Losses of a sample of the requests are measured in the background, so that nobody waits for them.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from starlette.types import Receive

from calm_beam.errors import CalmBeamError
from calm_beam.inputs.examples import AnyPrompt
from calm_beam.launch.flags.shared_options import watched_entry
from calm_beam.risk.monitor import RiskMonitor, WatchedPromise
from calm_beam.serving import Answer, GrowingText, ServedRequest
from calm_beam.serving.watched import shown_in_words

from .metrics import ServiceMetrics
from .request import Served

if TYPE_CHECKING:
    from calm_beam.serving import ContinuousGenerator, Generator, LossProbe


_log = logging.getLogger("uvicorn.error")

# Chance of ever raising a false alarm, the default of `calm-beam monitor`.
_ALPHA = 0.05
_SECONDS_BETWEEN_WARNINGS = 60.0
_SECONDS_BETWEEN_SHAPES = 10.0


class _Rarely:
    """Says when a line that could be logged very often, such as a warning with every request, is due again."""

    def __init__(self, seconds: float = _SECONDS_BETWEEN_WARNINGS) -> None:
        self._seconds, self._next = seconds, 0.0

    def is_due(self) -> bool:
        """Returns whether to log it now: the first time, and so many seconds after the last at the earliest."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class Measurements:
    """Decodes sampled prompts by the full model too, one at a time, in a thread of its own.

    Whether a request is measured is settled before it has an output: by its id, by its group, which has to be the
    probe's, and by whether there is room for one more that waits to be measured. A request that is not measured for
    want of room is counted in `left_out`.

    Attributes:
      left_out: How many there were.
      unwritten: How many losses were measured, and could not be added to the file.
      monitor: What the losses since the start show. `calm-beam monitor --state` also keeps what was before that.
    """

    def __init__(self, generator: "Generator", probe: "LossProbe", *, most_waiting: int) -> None:
        """Starts the thread with the first answer.

        Args:
          generator: What serves.
          probe: Of the same entry.
          most_waiting: Answers that may wait to be measured, those included that are still being made.
        """
        self.left_out = self.unwritten = 0
        self.monitor = RiskMonitor.of_promise(WatchedPromise.of(generator.manifest, generator.entry), alpha=_ALPHA)
        self._watched = watched_entry(generator.manifest, generator.entry)
        self._leaves_out, self._cannot_write = _Rarely(), _Rarely()
        self._group = generator.entry.group
        self._probe = probe
        self._places = threading.BoundedSemaphore(most_waiting)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="calm-beam-probe")

    def sampled(self, group: str | None) -> str | None:
        """Returns the id of a new request if it is to be measured, and None if not.

        Args:
          group: Of its prompt, as `ServedRequest.group` has it.
        """
        request_id = uuid.uuid4().hex
        if group != self._group or not self._probe.is_sampled(request_id):
            return None
        if not self._places.acquire(blocking=False):
            self.left_out += 1
            if self._leaves_out.is_due():
                _log.warning(
                    "not measured, since too many answers wait for that: %d so far. Lower --probe_share.", self.left_out
                )
            return None
        return request_id

    def measure(self, request_id: str, prompt: AnyPrompt, answered: concurrent.futures.Future[Answer]) -> None:
        """Measures a sampled request once it is answered, or adds its loss as missing if it has no output.

        Args:
          request_id: As `sampled` returned it.
          prompt: As it was given.
          answered: Its answer to come, which nobody may cancel: who asked could have seen what it begins with.
        """
        answered.add_done_callback(lambda done: self._thread.submit(self._measure, request_id, prompt, done))

    def close(self) -> None:
        """Measures what has been answered, and ends the thread."""
        self._thread.shutdown()

    def _measure(self, request_id: str, prompt: AnyPrompt, answered: concurrent.futures.Future[Answer]) -> None:
        # Here, since JAX takes seconds.
        from calm_beam.serving import MeasuredLoss

        try:
            error = answered.exception()
            loss = (
                MeasuredLoss.of_failure(error)
                if isinstance(error, Exception)
                else self._probe.measure(request_id, prompt, answer=answered.result())
            )
            self._observe(loss.value if loss.failure is None else None)
            self._probe.add(request_id, loss)
        except OSError as error:
            # The client gets its answer even if the disk is full.
            self.unwritten += 1
            if self._cannot_write.is_due():
                _log.error(
                    "losses could not be written: %d so far, which /metrics counts and calm-beam monitor will not "
                    "find in the file: %s",
                    self.unwritten,
                    error,
                )
        except Exception:
            _log.exception("a loss could not be measured")
        finally:
            self._places.release()

    def _observe(self, loss: float | None) -> None:
        """Counts a loss, and logs an alarm when it is raised."""
        before, self.monitor = self.monitor, self.monitor.observe([loss])
        after = self.monitor
        if (before.alarm_at, before.missing_alarm_at) != (after.alarm_at, after.missing_alarm_at):
            _log.error("%s", shown_in_words(after, self._watched).replace("\n", " "))


Load = Callable[[], "tuple[Generator, LossProbe | None]"]


class NotReadyError(CalmBeamError):
    """Not all is compiled yet."""


class FullError(CalmBeamError):
    """Too many prompts wait."""


class GoneError(CalmBeamError):
    """The client has disconnected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """A token of an answer that is being made.

    Attributes:
      place: Of its prompt in the request.
      id: Of the token.
      exit_layer: Layer at which it left, from 1.
      text: What it adds to the text; what all tokens add is the text of the answer.
    """

    place: int
    id: int
    exit_layer: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """A whole answer, told after the last of its tokens.

    Attributes:
      place: Of its prompt in the request.
      answer: The answer.
    """

    place: int
    answer: Answer


class Pending:
    """The submitted prompts of a request, and their results."""

    def __init__(self, requests: Sequence[ServedRequest], generator: "Generator") -> None:
        """Prepares for what the batch will tell, in the event loop that will be told."""
        self.requests = requests
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[_NewToken | _Done | None] = asyncio.Queue()
        self._for_the_client_only: list[concurrent.futures.Future[Answer]] = []
        self._outputs = [_Output(place, GrowingText(generator.vocabulary)) for place in range(len(requests))]

    def on_token(self, place: int) -> Callable[[int, int], None]:
        """Returns what takes the tokens of a prompt, in any thread."""
        return lambda token, exit_layer: self._tell(_NewToken(place, token, exit_layer=exit_layer))

    def watch(self, place: int, future: concurrent.futures.Future[Answer], *, is_measured: bool) -> None:
        """Waits for the answer to a prompt, which is made to its end if it is measured."""
        if not is_measured:
            self._for_the_client_only.append(future)
        future.add_done_callback(lambda done: self._tell(_Done(place, done)))

    async def answers(self) -> list[Answer]:
        """Returns the answers to all prompts, in their order; errors are those of `events`."""
        answers = {event.place: event.answer async for event in self.events() if isinstance(event, Ended)}
        return [answer for _, answer in sorted(answers.items())]

    async def events(self) -> AsyncIterator[Token | Ended]:
        """Yields tokens, if they were asked for, and every answer, as they come.

        Raises:
          GoneError: If the client has disconnected.
          OutputError: If a prompt has no output.
        """
        left = len(self.requests)
        while left:
            told = await self._told.get()
            if told is None:
                raise GoneError
            output = self._outputs[told.place]
            if isinstance(told, _NewToken):
                yield output.grown(told.token, told.exit_layer)
                continue
            answer = told.answered.result()
            for token in output.rest(answer):
                yield token
            yield Ended(place=told.place, answer=answer)
            left -= 1

    def give_up(self) -> None:
        """Ends what nobody waits for any more."""
        self._told.put_nowait(None)
        for future in self._for_the_client_only:
            future.cancel()

    @contextlib.asynccontextmanager
    async def given_up_when_gone(self, receive: Receive) -> AsyncIterator[None]:
        """Gives up as soon as the client has left, and at the end."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.give_up()

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            self.give_up()

    def _tell(self, news: "_NewToken | _Done") -> None:
        # A loop that has ended has nobody who listens.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._told.put_nowait, news)


class Desk:
    """Takes the prompts of requests into one batch, a bounded number of them, once all is compiled.

    Attributes:
      served: What is promised.
      phase: The current phase, as text.
      error: Why it could not be opened; None if it could, or may still.
      on_failure: Called once there is an error, in the thread that opens.
    """

    def __init__(self, served: Served, *, load: Load, metrics: ServiceMetrics | None = None) -> None:
        """Prepares to be opened.

        Args:
          served: What is promised.
          load: Returns what answers, and what measures losses, if anything does; takes seconds.
          metrics: Counts what is answered.
        """
        self.served = served
        self.phase = "loading the model"
        self.error: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._load = load
        self._metrics = metrics
        self._generator: Generator | None = None
        self._batch: ContinuousGenerator | None = None
        self._measurements: Measurements | None = None
        self._is_ready = False
        self._compiling_told = _Rarely(_SECONDS_BETWEEN_SHAPES)
        self._opening: threading.Thread | None = None

    def open(self) -> None:
        """Begins to load and to compile, in a thread of its own; returns at once."""
        # A running compilation cannot be stopped: ending the service abandons the thread.
        self._opening = threading.Thread(target=self._open_or_say_why, name="calm-beam-opening", daemon=True)
        self._opening.start()

    def _open_or_say_why(self) -> None:
        try:
            self._open()
        except BaseException as error:
            self.error = error
            self.on_failure()

    def _open(self) -> None:
        start = time.monotonic()
        generator, probe = self._load()
        # Here, since JAX takes seconds, and the port is to be open before.
        from calm_beam.serving import ContinuousGenerator

        self._generator, limits = generator, self.served.limits
        batch = ContinuousGenerator(generator, most_waiting=limits.waiting)
        if not self.served.is_lazy:
            _log.info("Compiling for every width of prompt: minutes the first time, seconds from the cache.")
            batch.warm_up(on_shape=self._tell_shape)
            if probe is not None:
                self.phase = "compiling what measures losses"
                probe.warm_up(on_shape=functools.partial(self._tell_shape, what=" what measures losses"))
        if probe is not None:
            self._measurements = Measurements(generator, probe, most_waiting=limits.measuring)
        self._batch = batch
        self._is_ready, self.phase = True, "ready"
        _log.info("Ready after %.0f s.", time.monotonic() - start)

    def _tell_shape(self, done: int, total: int, *, what: str = "") -> None:
        self.phase = f"compiling{what}: {done} of {total} shapes"
        if self._compiling_told.is_due():
            _log.info("%s", self.phase)

    @property
    def is_ready(self) -> bool:
        """Whether prompts are taken."""
        return self._is_ready

    @property
    def is_opening(self) -> bool:
        """Whether it still loads or compiles."""
        return self._opening is not None and self._opening.is_alive()

    def close(self) -> None:
        """Waits for what was handed in, and for what is measured of it; leaves behind what is still compiling."""
        if self._batch is not None:
            self._batch.close()
        if self._measurements is not None:
            self._measurements.close()

    @property
    def generator(self) -> "Generator":
        """Returns the generator that answers.

        Raises:
          NotReadyError: If it is not loaded yet.
        """
        if self._generator is None:
            raise NotReadyError(f"not ready: {self.phase}")
        return self._generator

    @property
    def batch(self) -> "ContinuousGenerator | None":
        """The batch that decodes, with its queue and its counts; None before everything is compiled."""
        return self._batch

    @property
    def measurements(self) -> Measurements | None:
        """The loss meter; None if losses are not measured, or before everything is compiled."""
        return self._measurements

    def hand_in(self, prompts: Sequence[AnyPrompt], *, group: str | None, tells_tokens: bool) -> Pending:
        """Returns at once, in the event loop, the pending results of a request's prompts: all are accepted, or none.

        Args:
          prompts: Of one request.
          group: The group that the request names, for `Generator.entry_for`.
          tells_tokens: Whether each token is told as it is made.

        Raises:
          NotReadyError: If not all is compiled yet.
          PromptError: If a prompt is refused.
          FullError: If too many wait.
        """
        batch, generator = self._batch, self.generator
        if batch is None:
            raise NotReadyError(f"not ready: {self.phase}")
        names = ["the prompt"] if len(prompts) == 1 else [f"prompt {place}" for place in range(len(prompts))]
        requests = generator.requests(prompts, names=names, groups=[group] * len(prompts))
        # Only the event loop hands in, so that the room does not shrink between here and there.
        if batch.room < len(requests):
            raise FullError
        pending = Pending(requests, generator)
        for place, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            measured_as = None if self._measurements is None else self._measurements.sampled(request.group)
            future = batch.submit_request(request, on_token=pending.on_token(place) if tells_tokens else None)
            if self._metrics is not None:
                self._metrics.watch(len(request.ids), future)
            pending.watch(place, future, is_measured=measured_as is not None)
            if self._measurements is not None and measured_as is not None:
                self._measurements.measure(measured_as, prompt, future)
        return pending


@dataclasses.dataclass(frozen=True)
class _NewToken:
    """A token, as the batch reports it."""

    place: int
    token: int
    _: dataclasses.KW_ONLY
    exit_layer: int


@dataclasses.dataclass(frozen=True)
class _Done:
    """The end of a prompt, as the batch reports it."""

    place: int
    answered: concurrent.futures.Future[Answer]


class _Output:
    """The tokens of a prompt that have been told so far."""

    def __init__(self, place: int, text: GrowingText) -> None:
        self._place = place
        self._text = text
        self._told = 0

    def grown(self, token: int, exit_layer: int) -> Token:
        """Returns what one more token is."""
        self._told += 1
        return Token(place=self._place, id=token, exit_layer=exit_layer, text=self._text.add(token))

    def rest(self, answer: Answer) -> Iterator[Token]:
        """Yields what has not been told of an answer; the last token has all that is left of the text."""
        for token, exit_layer in list(zip(answer.tokens, answer.exit_layers, strict=True))[self._told :]:
            last = self.grown(token, exit_layer)
            if self._told == len(answer.tokens):
                last = dataclasses.replace(last, text=last.text + self._text.end())
            yield last
