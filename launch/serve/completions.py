"""POST /v1/completions and /v1/chat/completions, GET /v1/models: for clients of OpenAI's interface."""

import time
from collections.abc import Sequence
from typing import Any

import fastapi

from calm_beam.serving.request import AnyPrompt

from .answers import CHAT, COMPLETION, Form, Head, event
from .asking import answered, handed_in
from .chats import user_text
from .desk import Desk
from .event_stream import EventStream
from .parameters import ChatQuestion, CompletionQuestion, Question, check_model, check_parameters
from .refusals import RefusedError, error_fields
from .served import Served

_PREFIX = "/v1/"


def add_completions(app: fastapi.FastAPI, desk: Desk) -> None:
    """Has an app answer as clients of OpenAI's interface expect it.

    Args:
      app: The app.
      desk: Where prompts are handed in.
    """
    served = desk.served
    since = int(time.time())

    @app.get(f"{_PREFIX}models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [_model(served, since=since)]}

    @app.get(f"{_PREFIX}models/{{name}}")
    async def one_model(name: str) -> dict[str, object]:
        check_model(name, served.name)
        return _model(served, since=since)

    @app.post(f"{_PREFIX}completions", response_model=None)
    async def complete(question: CompletionQuestion, request: fastapi.Request) -> dict[str, Any] | fastapi.Response:
        check_model(question.model, served.name)
        prompts = _prompts(question.prompt, most=served.limits.prompts)
        return await _answer(desk, question, request, prompts=prompts, form=COMPLETION, param="prompt")

    @app.post(f"{_PREFIX}chat/completions", response_model=None)
    async def chat(question: ChatQuestion, request: fastapi.Request) -> dict[str, Any] | fastapi.Response:
        check_model(question.model, served.name)
        prompts = [user_text(question.messages, served.manifest)]
        return await _answer(desk, question, request, prompts=prompts, form=CHAT, param="messages")


async def _answer(
    desk: Desk, question: Question, request: fastapi.Request, *, prompts: Sequence[AnyPrompt], form: Form, param: str
) -> dict[str, Any] | fastapi.Response:
    """Returns the answer to a request, or the stream of it.

    Args:
      desk: Where prompts are handed in.
      question: The request's body.
      request: The request.
      prompts: Of it.
      form: Of the answer.
      param: What the request calls its prompts.
    """
    served = desk.served
    check_parameters(question, most_tokens=served.manifest.decode.max_decode_length)
    group = question.calm_beam.group
    pending = handed_in(desk, prompts, group=group, tells_tokens=bool(question.stream), param=param)
    head = Head(
        form=form, model=served.name, manifest=served.manifest.digest, end_ids=desk.generator.end_ids, group=group
    )
    if question.stream:
        return EventStream(
            pending,
            head.events(pending, has_usage=question.has_usage),
            failed=lambda message: event(error_fields(500, message)),
        )
    answers = await answered(pending, request)
    return answers if isinstance(answers, fastapi.Response) else head.whole(pending, answers)


def _model(served: Served, *, since: int) -> dict[str, object]:
    entry, manifest = served.entry, served.manifest
    about = {
        "fingerprint": manifest.model.fingerprint,
        "manifest": manifest.digest,
        "max_tokens": manifest.decode.max_decode_length,
        "max_prompt_tokens": manifest.decode.max_input_length,
        "threshold": entry.threshold,
        "delta": entry.delta,
        "epsilon": entry.epsilon,
    }
    return {"id": served.name, "object": "model", "created": since, "owned_by": "calm-beam", "calm_beam": about}


def _prompts(given: Any, *, most: int) -> list[AnyPrompt]:
    """Returns the prompts of a request: a text, some texts, token ids, or some lists of those."""
    prompts: list[AnyPrompt] = [given] if isinstance(given, str) or _is_ids(given) else given
    if (
        not isinstance(prompts, list)
        or not prompts
        or not (all(isinstance(prompt, str) for prompt in prompts) or all(map(_is_ids, prompts)))
    ):
        raise RefusedError(
            400, "prompt must be a text, a list of texts, a list of token ids, or a list of such lists", param="prompt"
        )
    if len(prompts) > most:
        raise RefusedError(400, f"a request may have {most} prompts, got {len(prompts)}", param="prompt")
    return prompts


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(index) is int for index in given)
