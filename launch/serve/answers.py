"""Answers to clients of OpenAI's interface: bodies, streams of server-sent events, and refusals.

Some prompts of a request are refused, and the others are answered. A stream is a response that grows while an answer
is made. All errors have one form, that of OpenAI's interface.
"""

import collections
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from calm_beam.errors import CalmBeamError
from calm_beam.inputs.examples import AnyPrompt, prompt_size
from calm_beam.serving import Answer, OutputError, PromptError

from .desk import Desk, Ended, FullError, GoneError, NotReadyError, Pending, Token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """In which a kind of request is answered.

    Attributes:
      name: What an answer calls itself.
      event_name: What each event of a stream calls itself.
      prefix: What its id begins with.
      whole: Returns the fields of a choice that has all of a text.
      part: Returns those of a choice that adds to a text, which is None at the end.
      opening: Fields of the event that comes before all others of a prompt; None where there is no such event.
    """

    name: str
    event_name: str
    prefix: str
    whole: Callable[[str], dict[str, object]]
    part: Callable[[str | None], dict[str, object]]
    opening: dict[str, object] | None = None


COMPLETION = Form(
    name="text_completion",
    event_name="text_completion",
    prefix="cmpl",
    whole=lambda text: {"text": text},
    part=lambda text: {"text": text or ""},
)
CHAT = Form(
    name="chat.completion",
    event_name="chat.completion.chunk",
    prefix="chatcmpl",
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    part=lambda text: {"delta": {} if text is None else {"content": text}},
    opening={"delta": {"role": "assistant", "content": ""}},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The first fields of an answer, or of each of its events.

    Attributes:
      form: Of the answer.
      model: What clients call it.
      manifest: Digest of the manifest.
      has_ended: Returns whether the last token of an answer ended it.
      group: That the client named, if it did: then choices say what is promised.
      is_full_model: Whether every token runs all layers, whatever the entry of the group says.
    """

    form: Form
    model: str
    manifest: str
    has_ended: Callable[[Sequence[int]], bool]
    group: str | None
    is_full_model: bool
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def whole(self, pending: Pending, answers: Sequence[Answer]) -> dict[str, object]:
        """Returns the body of an answer that comes at once."""
        choices = [
            self._choice(place, self.form.whole(answer.text), answer=answer) for place, answer in enumerate(answers)
        ]
        usage = _usage(pending, sum(len(answer.tokens) for answer in answers))
        return {**self._body(self.form.name, choices), "usage": usage}

    async def events(self, pending: Pending, *, has_usage: bool) -> AsyncIterator[str]:
        """Yields the events of a stream: one for each token, one for the end of each prompt, and the last."""
        # Where usage was asked for, all events but the last say null.
        usage: dict[str, object] = {"usage": None} if has_usage else {}
        tokens: collections.Counter[int] = collections.Counter()
        for place in range(len(pending.requests) if self.form.opening else 0):
            yield self._event([_choice_fields(place, self.form.opening or {})], usage)
        async for event in pending.events():
            if isinstance(event, Token):
                about = {"token": event.id, "exit_layer": event.exit_layer}
                fields = {**self.form.part(event.text), "calm_beam": about}
                yield self._event([_choice_fields(event.place, fields)], usage)
            elif isinstance(event, Ended):
                tokens[event.place] = len(event.answer.tokens)
                yield self._event([self._choice(event.place, self.form.part(None), answer=event.answer)], usage)
        if has_usage:
            yield self._event([], {"usage": _usage(pending, tokens.total())})
        yield "data: [DONE]\n\n"

    def _body(self, kind: str, choices: Sequence[dict[str, object]]) -> dict[str, object]:
        return {
            "id": f"{self.form.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.manifest,
            "choices": choices,
        }

    def _event(self, choices: Sequence[dict[str, object]], more: dict[str, object]) -> str:
        return event({**self._body(self.form.event_name, choices), **more})

    def _choice(self, place: int, fields: dict[str, object], *, answer: Answer) -> dict[str, object]:
        """Returns the choice that an answer is, or the end of its events."""
        reason = "stop" if self.has_ended(answer.tokens) else "length"
        about = answer_fields(answer, group=self.group, is_full_model=self.is_full_model)
        return _choice_fields(place, {**fields, "calm_beam": about}, finish_reason=reason)


def _choice_fields(place: int, fields: dict[str, object], *, finish_reason: str | None = None) -> dict[str, object]:
    return {"index": place, **fields, "logprobs": None, "finish_reason": finish_reason}


def answer_fields(answer: Answer, *, group: str | None, is_full_model: bool) -> dict[str, Any]:
    """Returns what is told of an answer apart from its text, and the promise if a group was named: null for none.

    Args:
      answer: The answer.
      group: As the client named it. If it did not, the promise is that of every such answer, and `/manifest` has it.
      is_full_model: Whether the full model answered, whatever the entry of the group says.
    """
    fields = dataclasses.asdict(dataclasses.replace(answer, entry=None))
    # The choice has the reason itself.
    del fields["group"], fields["entry"], fields["text"], fields["finish_reason"]
    fields |= {"layers_used": answer.layers_used, "layers_saved": answer.layers_saved}
    if group is not None:
        entry = answer.entry
        fields["promise"] = (
            None
            if entry is None or entry.group != answer.group
            else {
                "group": entry.group,
                "threshold": None if is_full_model else entry.threshold,
                "delta": entry.delta,
                "epsilon": entry.epsilon,
            }
        )
    return fields


def _usage(pending: Pending, tokens: int) -> dict[str, int]:
    of_prompts = sum(len(request.ids) for request in pending.requests)
    return {"prompt_tokens": of_prompts, "completion_tokens": tokens, "total_tokens": of_prompts + tokens}


def event(data: dict[str, object]) -> str:
    """Returns an event of a stream."""
    return f"data: {json.dumps(data)}\n\n"


_log = logging.getLogger("uvicorn.error")


class EventStream(fastapi.Response):
    """Sends events as they come, and gives up what is pending once the client has left."""

    media_type = "text/event-stream"

    def __init__(self, pending: Pending, events: AsyncIterator[str], *, failed: Callable[[str], str]) -> None:
        """Prepares to send.

        Args:
          pending: What the events are about.
          events: Each as it is sent.
          failed: Returns the last event after a failure, given the failure's message.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The length is not known before the end.
        del self.headers["Content-Length"]
        self._pending = pending
        self._events = events
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events."""
        async with self._pending.given_up_when_gone(receive):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            except GoneError:
                return
            except Exception as error:
                event = self._failed(failure_in_words(error))
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def failure_in_words(error: Exception) -> str:
    """Returns what a client hears of an error that is the service's, which the log has whole."""
    if isinstance(error, OutputError):
        _log.error("no output: %s", error)
        return "the model gave no output"
    _log.error("the service broke down", exc_info=error)
    return "the service broke down"


_FIRST_STATUS_OF_OURS = 500


class RefusedError(HTTPException, CalmBeamError):
    """A request that is not answered, for a reason that has a name."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Keeps the reason.

        Args:
          status: Of HTTP.
          message: Text of the error.
          param: What of the request is wrong.
          code: The reason's name, for programs.
          retry_after: Seconds after which to come again, where that may help.
        """
        super().__init__(status, message, headers=None if retry_after is None else {"Retry-After": str(retry_after)})
        self.param = param
        self.code = code


def add_refusals(app: fastapi.FastAPI) -> None:
    """Has an app say what is wrong with a request, always in one form."""

    @app.exception_handler(HTTPException)
    async def refused(_: fastapi.Request, error: HTTPException) -> fastapi.Response:
        return refusal(error, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: fastapi.Request, error: RequestValidationError) -> fastapi.Response:
        found = "; ".join(map(_in_words, error.errors()))
        names = [str(name) for part in error.errors() for name in part["loc"][1:2] if isinstance(name, str)]
        return refusal(RefusedError(400, found, param=next(iter(names), None)))


_WHOLE_BODY = ("body",)


def _in_words(part: Mapping[str, Any]) -> str:
    """Returns what is wrong with a body, from an error of pydantic."""
    if part["type"] == "json_invalid":
        return f"the body is not JSON: {part['ctx']['error']} at character {part['loc'][-1]}"
    if part["loc"] != _WHOLE_BODY:
        name = ".".join(map(str, part["loc"][1:]))
        if part["type"] == "extra_forbidden":
            return f"unknown field {name}"
        if part["type"] == "missing":
            return f"{name} is missing"
        return f"{name}: {part['msg']}"
    found = part["input"]
    if found is None:
        return "the body is missing; it must be a JSON object"
    # A body without the header is not read as JSON.
    if isinstance(found, bytes):
        return "the body must be a JSON object, sent with the header Content-Type: application/json"
    return f"the body must be a JSON object, got {json.dumps(found):.60}"


def error_fields(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """Returns the body of an error."""
    kind = "invalid_request_error" if status < _FIRST_STATUS_OF_OURS else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class BoundedBodies:
    """Refuses bodies that are too long, or of a length that is not told, before they are read."""

    def __init__(self, app: ASGIApp, *, most_bytes: int) -> None:
        """Stands before an app."""
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is not refused."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            error = None
            if b"transfer-encoding" in headers:
                error = HTTPException(411, "Content-Length is missing")
            elif int(headers.get(b"content-length", b"0")) > self._most_bytes:
                error = HTTPException(413, f"the body is longer than {self._most_bytes} bytes")
            if error is not None:
                await refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def refusal(error: HTTPException, *, headers: Mapping[str, str] | None = None) -> fastapi.Response:
    """Returns the response to a request that is not answered."""
    # Requests may contain halves of surrogate pairs, which UTF-8 answers cannot contain.
    message = str(error.detail).encode(errors="backslashreplace").decode()
    param, code = (error.param, error.code) if isinstance(error, RefusedError) else (None, None)
    fields = error_fields(error.status_code, message, param=param, code=code)
    return fastapi.responses.JSONResponse(fields, error.status_code, headers=dict(headers or {}))


# As nginx has it in its log; nobody hears it.
_CLIENT_LEFT = 499
_SECONDS_WHILE_BUSY = 1
_SECONDS_WHILE_COMPILING = 5


def handed_in(
    desk: Desk, prompts: Sequence[AnyPrompt], *, group: str | None, tells_tokens: bool, param: str
) -> Pending:
    """Returns the results of prompts.

    Args:
      desk: Where they are handed in.
      prompts: Of one request.
      group: Group that the request names; None if it names none.
      tells_tokens: Whether each token is told as it is made.
      param: What the request calls its prompts.

    Raises:
      RefusedError: If they are not taken.
    """
    characters = desk.served.limits.prompt_characters
    if sum(map(prompt_size, prompts)) > characters:
        what = "the prompt is" if len(prompts) == 1 else "the prompts are"
        raise RefusedError(413, f"{what} longer than {characters} characters", param=param)
    try:
        return desk.hand_in(prompts, group=group, tells_tokens=tells_tokens)
    except PromptError as error:
        raise RefusedError(400, str(error), param=param) from error
    except FullError as error:
        raise RefusedError(503, "busy, try again later", code="busy", retry_after=_SECONDS_WHILE_BUSY) from error
    except NotReadyError as error:
        raise not_ready(error) from error


def not_ready(error: NotReadyError) -> RefusedError:
    """Returns the answer to requests before everything is compiled."""
    return RefusedError(503, str(error), code="not_ready", retry_after=_SECONDS_WHILE_COMPILING)


async def answered(pending: Pending, request: fastapi.Request) -> list[Answer] | fastapi.Response:
    """Returns the answers to all prompts of a request, or a response for the log if the client has disconnected.

    Raises:
      RefusedError: If there is no answer.
    """
    async with pending.given_up_when_gone(request.receive):
        try:
            return await pending.answers()
        except GoneError:
            return fastapi.Response(status_code=_CLIENT_LEFT)
        except Exception as error:
            raise RefusedError(500, failure_in_words(error)) from error
