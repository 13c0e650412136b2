"""POST /generate: a prompt in, text, tokens and exit layers out, whole or as they are made."""

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import fastapi
import pydantic

from calm_beam.serving import Answer

from .asking import answered, handed_in
from .desk import Desk, Pending, Token
from .event_stream import EventStream
from .limits import Limits


class Question(pydantic.BaseModel):
    """The body of POST /generate."""

    model_config = pydantic.ConfigDict(extra="forbid")

    prompt: str
    group: str | None = None
    stream: bool = False


def add_generate(app: fastapi.FastAPI, desk: Desk, *, limits: Limits) -> None:
    """Has an app answer prompts, one a request."""

    @app.post("/generate", response_model=None)
    async def generate(question: Question, request: fastapi.Request) -> dict[str, object] | fastapi.Response:
        pending = handed_in(
            desk, [question.prompt], group=question.group, tells_tokens=question.stream, limits=limits, refused=422
        )
        if question.stream:
            return EventStream(
                pending,
                _events(pending, group=question.group),
                failed=lambda message: _event("error", {"detail": message}),
            )
        answers = await answered(pending, request)
        return answers if isinstance(answers, fastapi.Response) else answer_fields(answers[0], group=question.group)


def answer_fields(answer: Answer, *, group: str | None) -> dict[str, Any]:
    """Returns an answer as clients get it; with the promise, null for none, if they said what group the prompt is of.

    Args:
      answer: The answer.
      group: As the client named it. If it did not, the promise is that of every such answer, and `/health` says it.
    """
    fields = dataclasses.asdict(dataclasses.replace(answer, entry=None))
    del fields["group"], fields["entry"]
    fields |= {"layers_used": answer.layers_used, "layers_saved": answer.layers_saved}
    if group is not None:
        entry = answer.entry
        fields["promise"] = (
            None
            if entry is None or entry.group != answer.group
            else {
                "group": entry.group,
                "threshold": entry.threshold,
                "delta": entry.delta,
                "epsilon": entry.epsilon,
            }
        )
    return fields


async def _events(pending: Pending, *, group: str | None) -> AsyncIterator[str]:
    async for event in pending.events():
        if isinstance(event, Token):
            yield _event("token", {"token": event.id, "text": event.text, "exit_layer": event.exit_layer})
        else:
            yield _event("answer", answer_fields(event.answer, group=group))


def _event(name: str, data: dict[str, object]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
