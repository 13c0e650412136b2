"""POST /v1/completions and GET /v1/models: the same answers for clients of OpenAI's interface for completions.

What a request may say there and would change what was calibrated is refused, and the error says why: a promise that
does not hold is worth less than none.
"""

import collections
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import fastapi
import pydantic

from calm_beam.serving import Answer, Generator
from calm_beam.serving.request import AnyPrompt

from .asking import answered, handed_in
from .desk import Desk, Ended, Pending, Token
from .event_stream import EventStream
from .generate import answer_fields
from .limits import Limits
from .refusals import COMPLETIONS_PREFIX, RefusedError, error_fields

_GREEDY = "each token is the likeliest, as it was when the threshold was calibrated"
_CHANGED_TEXT = "the promise is about the whole output, as the model gives it"
_NOT_MADE = "this service does not give that"
# What a parameter may be, besides null, and why nothing else.
_ACCEPTED: dict[str, tuple[object, str]] = {
    "temperature": (0, _GREEDY),
    "top_p": (1, _GREEDY),
    "presence_penalty": (0, _GREEDY),
    "frequency_penalty": (0, _GREEDY),
    "logit_bias": ({}, _GREEDY),
    "n": (1, f"{_GREEDY}, so that all outputs would be the same"),
    "best_of": (1, f"{_GREEDY}, so that all outputs would be the same"),
    "stop": ([], _CHANGED_TEXT),
    "suffix": ("", _CHANGED_TEXT),
    "echo": (False, _NOT_MADE),
    "logprobs": (None, _NOT_MADE),
}


class StreamOptions(pydantic.BaseModel):
    """How the events of a stream are to be."""

    model_config = pydantic.ConfigDict(extra="forbid")

    include_usage: bool = False


class Extension(pydantic.BaseModel):
    """What only this service knows."""

    model_config = pydantic.ConfigDict(extra="forbid")

    group: str | None = None


class CompletionQuestion(pydantic.BaseModel):
    """The body of POST /v1/completions."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str
    prompt: Any
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    # Neither changes an answer.
    seed: int | None = None
    user: str | None = None
    temperature: Any = None
    top_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    n: Any = None
    best_of: Any = None
    stop: Any = None
    suffix: Any = None
    echo: Any = None
    logprobs: Any = None
    calm_beam: Extension = Extension()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Head:
    """What the body of a completion, or each of its events, begins with."""

    model: str
    manifest: str
    end_ids: tuple[int, ...]
    id: str = dataclasses.field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[dict[str, object]], **more: object) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.manifest,
            "choices": choices,
            **more,
        }


def add_completions(app: fastapi.FastAPI, desk: Desk, *, limits: Limits, model: str) -> None:
    """Has an app answer as clients of OpenAI's interface expect it.

    Args:
      app: The app.
      desk: Where prompts are handed in.
      limits: What the service takes upon itself.
      model: What clients call the model.
    """
    generator = desk.generator
    most_tokens = generator.manifest.decode.max_decode_length
    since = int(time.time())

    @app.get(f"{COMPLETIONS_PREFIX}models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [_model(generator, model, since=since)]}

    @app.get(f"{COMPLETIONS_PREFIX}models/{{name}}")
    async def one_model(name: str) -> dict[str, object]:
        _check_model(name, model)
        return _model(generator, model, since=since)

    @app.post(f"{COMPLETIONS_PREFIX}completions", response_model=None)
    async def complete(question: CompletionQuestion, request: fastapi.Request) -> dict[str, Any] | fastapi.Response:
        _check_model(question.model, model)
        _check_parameters(question, most_tokens=most_tokens)
        prompts = _prompts(question.prompt, most=limits.prompts)
        group = question.calm_beam.group
        pending = handed_in(desk, prompts, group=group, tells_tokens=bool(question.stream), limits=limits, refused=400)
        head = _Head(model=model, manifest=generator.manifest.digest, end_ids=generator.end_ids)
        if question.stream:
            has_usage = question.stream_options is not None and question.stream_options.include_usage
            return EventStream(
                pending,
                _events(pending, head, group=group, has_usage=has_usage),
                failed=lambda message: _event(error_fields(500, message)),
            )
        answers = await answered(pending, request)
        if isinstance(answers, fastapi.Response):
            return answers
        choices = [
            _choice(place, answer.text, answer, group=group, end_ids=head.end_ids)
            for place, answer in enumerate(answers)
        ]
        return head.body(choices, usage=_usage(pending, sum(len(answer.tokens) for answer in answers)))


def _model(generator: Generator, name: str, *, since: int) -> dict[str, object]:
    entry, manifest = generator.entry, generator.manifest
    about = {
        "fingerprint": manifest.model.fingerprint,
        "manifest": manifest.digest,
        "max_tokens": manifest.decode.max_decode_length,
        "max_prompt_tokens": manifest.decode.max_input_length,
        "threshold": entry.threshold,
        "delta": entry.delta,
        "epsilon": entry.epsilon,
    }
    return {"id": name, "object": "model", "created": since, "owned_by": "calm-beam", "calm_beam": about}


def _check_model(name: str, served: str) -> None:
    if name != served:
        raise RefusedError(
            404, f"the model {name!r} is not served here, but {served!r} is", param="model", code="model_not_found"
        )


def _check_parameters(question: CompletionQuestion, *, most_tokens: int) -> None:
    """Refuses what is not as it was calibrated."""
    for name, (accepted, reason) in _ACCEPTED.items():
        value = getattr(question, name)
        if value is not None and value != accepted:
            code = "not_supported" if reason is _NOT_MADE else "not_calibrated"
            instead = "Leave it out" if accepted is None else f"Pass {json.dumps(accepted)} or leave it out"
            message = f"{name} {value!r:.40} is refused: {reason}. {instead}."
            raise RefusedError(400, message, param=name, code=code)
    if question.max_tokens not in (None, most_tokens):
        message = (
            f"max_tokens {question.max_tokens} is refused: outputs were calibrated with at most {most_tokens} tokens, "
            f"and the promise is neither about longer ones nor about their beginnings. Pass {most_tokens} or leave it "
            "out."
        )
        raise RefusedError(400, message, param="max_tokens", code="not_calibrated")
    if question.stream_options is not None and not question.stream:
        raise RefusedError(400, "stream_options are for streams: pass stream=true", param="stream_options")


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


async def _events(pending: Pending, head: _Head, *, group: str | None, has_usage: bool) -> AsyncIterator[str]:
    # Where usage was asked for, all events but the last say null.
    usage: dict[str, object] = {"usage": None} if has_usage else {}
    tokens: collections.Counter[int] = collections.Counter()
    async for event in pending.events():
        if isinstance(event, Token):
            about = {"token": event.id, "exit_layer": event.exit_layer}
            yield _event(head.body([_part(event.place, event.text, calm_beam=about)], **usage))
        elif isinstance(event, Ended):
            tokens[event.place] = len(event.answer.tokens)
            choice = _choice(event.place, "", event.answer, group=group, end_ids=head.end_ids)
            yield _event(head.body([choice], **usage))
    if has_usage:
        yield _event(head.body([], usage=_usage(pending, tokens.total())))
    yield "data: [DONE]\n\n"


def _choice(place: int, text: str, answer: Answer, *, group: str | None, end_ids: tuple[int, ...]) -> dict[str, object]:
    about = answer_fields(answer, group=group)
    del about["text"]
    reason = "stop" if answer.tokens and answer.tokens[-1] in end_ids else "length"
    return _part(place, text, calm_beam=about, finish_reason=reason)


def _part(place: int, text: str, *, calm_beam: dict[str, Any], finish_reason: str | None = None) -> dict[str, object]:
    return {
        "text": text,
        "index": place,
        "logprobs": None,
        "finish_reason": finish_reason,
        "calm_beam": calm_beam,
    }


def _usage(pending: Pending, tokens: int) -> dict[str, int]:
    of_prompts = sum(len(request.ids) for request in pending.requests)
    return {"prompt_tokens": of_prompts, "completion_tokens": tokens, "total_tokens": of_prompts + tokens}


def _event(data: dict[str, object]) -> str:
    return f"data: {json.dumps(data)}\n\n"
