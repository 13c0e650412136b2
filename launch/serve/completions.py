"""POST /v1/completions and /v1/chat/completions, GET /v1/models: endpoints for clients of OpenAI's interface.

Parameters that would change what was calibrated are refused, and the error says why: a promise that does not hold
is worth less than none. The messages of a chat must be what was calibrated: a system prompt, and one text of a
user, or several turns where chats of several were calibrated.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import fastapi
import pydantic

from calm_beam.inputs.examples import AnyPrompt, Turns, messages_of, role_and_text
from calm_beam.inputs.prompts import ONE_TURN
from calm_beam.manifest import Manifest

from .answers import CHAT, COMPLETION, EventStream, Form, Head, RefusedError, answered, error_fields, event, handed_in
from .desk import Desk
from .request import Served

_GREEDY = "each token is the likeliest, as it was when the threshold was calibrated"
_CHANGED_TEXT = "the promise is about the whole output, as the model gives it"
_NOT_MADE = "this service does not give that"
# Allowed values of parameters other than null, and why no others are allowed.
_ACCEPTED: dict[str, tuple[tuple[object, ...], str]] = {
    "temperature": ((0,), _GREEDY),
    "top_p": ((1,), _GREEDY),
    "presence_penalty": ((0,), _GREEDY),
    "frequency_penalty": ((0,), _GREEDY),
    "logit_bias": (({},), _GREEDY),
    "n": ((1,), f"{_GREEDY}, so that all outputs would be the same"),
    "best_of": ((1,), f"{_GREEDY}, so that all outputs would be the same"),
    "suffix": (("",), _CHANGED_TEXT),
    "echo": ((False,), _NOT_MADE),
    "logprobs": ((), _NOT_MADE),
    "top_logprobs": ((), _NOT_MADE),
    "response_format": (({"type": "text"},), _CHANGED_TEXT),
    "tools": (([],), _NOT_MADE),
    "tool_choice": (("none",), _NOT_MADE),
}


class StreamOptions(pydantic.BaseModel):
    """How the events of a stream are to be."""

    model_config = pydantic.ConfigDict(extra="forbid")

    include_usage: bool = False


class Extension(pydantic.BaseModel):
    """The fields that only this service has."""

    model_config = pydantic.ConfigDict(extra="forbid")

    group: str | None = None


class Question(pydantic.BaseModel):
    """The fields that the bodies of both kinds of request share."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str | None = None
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
    stop: Any = None
    logprobs: Any = None
    calm_beam: Extension = Extension()

    @property
    def has_usage(self) -> bool:
        """Whether a stream is to end with what it took."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionQuestion(Question):
    """The body of POST /v1/completions."""

    prompt: Any
    best_of: Any = None
    suffix: Any = None
    echo: Any = None


class ChatQuestion(Question):
    """The body of POST /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    top_logprobs: Any = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None


def check_model(name: str | None, served: str) -> None:
    """Refuses another model than the one that is served; a request need not name any.

    Raises:
      RefusedError: If it is another one.
    """
    if name not in (None, served):
        raise RefusedError(
            404, f"the model {name!r} is not served here, but {served!r} is", param="model", code="model_not_found"
        )


def check_parameters(question: Question, *, most_tokens: int, stop_strings: Sequence[str] = ()) -> None:
    """Refuses what is not as it was calibrated.

    Args:
      question: The body of a request.
      most_tokens: With how many an output was ended, when the threshold was calibrated.
      stop_strings: Texts that ended an output then.

    Raises:
      RefusedError: If anything is other than that.
    """
    for name, (accepted, reason) in _ACCEPTED.items():
        value = getattr(question, name, None)
        if value is None or value in accepted or (name == "logprobs" and value is False):
            continue
        code = "not_supported" if reason is _NOT_MADE else "not_calibrated"
        instead = f"Leave {name} out" + (f", or pass {json.dumps(accepted[0])}" if accepted else "")
        message = f"{name} {value!r:.40} is refused: {reason}. {instead}."
        raise RefusedError(400, message, param=name, code=code)
    for name in ("max_tokens", "max_completion_tokens"):
        asked = getattr(question, name, None)
        if asked not in (None, most_tokens):
            message = (
                f"{name} {asked} is refused: outputs were calibrated with at most {most_tokens} tokens, and the "
                f"promise is neither about longer ones nor about their beginnings. Leave {name} "
                f"out, or pass {most_tokens}."
            )
            raise RefusedError(400, message, param=name, code="not_calibrated")
    _check_stop(question.stop, stop_strings)
    if question.stream_options is not None and not question.stream:
        raise RefusedError(400, "stream_options are for streams: pass stream=true", param="stream_options")


def _check_stop(stop: Any, calibrated: Sequence[str]) -> None:
    """Refuses other stop strings than the calibrated ones, in any order; none given, those hold in any case."""
    given = [stop] if isinstance(stop, str) else stop or []
    is_texts = isinstance(given, list) and all(isinstance(text, str) for text in given)
    if given and not (is_texts and set(given) == set(calibrated)):
        ended = f"with the stop strings {json.dumps(list(calibrated))}" if calibrated else "without stop strings"
        message = (
            f"stop {stop!r:.80} is refused: outputs were calibrated {ended}, and {_CHANGED_TEXT}. Leave stop out"
            f"{', or pass these' if calibrated else ''}."
        )
        raise RefusedError(400, message, param="stop", code="not_calibrated")


_SHAPE = (
    'messages must be [{"role": "user", "content": "..."}], after the calibrated system message or without one: what '
    "was calibrated are answers to one text of a user"
)
_SHAPE_OF_TURNS = (
    "messages must be of user and assistant in turn, the first and the last of the user, after the calibrated system "
    "message or without one"
)


def chat_prompt(messages: Sequence[Any], manifest: Manifest) -> AnyPrompt:
    """Returns the text of the user, or all turns if there are several, which the calibrated template makes a prompt of.

    Args:
      messages: Of the request.
      manifest: What was calibrated.

    Raises:
      RefusedError: If the manifest has no chat template, or the messages are other than what was calibrated.
    """
    chat = None if manifest.vocabulary is None else manifest.vocabulary.chat
    if chat is None:
        raise RefusedError(
            400,
            "the model was calibrated without a chat template, on prompts as they are: POST /v1/completions, or "
            "calibrate with --chat_template",
            param="messages",
            code="not_calibrated",
        )
    try:
        said = [role_and_text(message) for message in messages]
    except ValueError as error:
        raise RefusedError(400, str(error), param="messages") from error
    system, turns = None, list(messages)
    if said and said[0][0] in ("system", "developer"):
        (_, system), turns = said[0], turns[1:]
    takes_several = manifest.takes_several_turns
    try:
        found = Turns.of(turns)
    except ValueError:
        found = None
    if found is None or found.answer is not None:
        shape = _SHAPE_OF_TURNS if takes_several else _SHAPE
        raise RefusedError(400, shape, param="messages", code="not_calibrated")
    if found.earlier and not takes_several:
        raise RefusedError(400, f"the chat {ONE_TURN}", param="messages", code="not_calibrated")
    if system is not None and system != (chat.system or ""):
        calibrated = "without one" if chat.system is None else f"with {chat.system!r:.200}"
        raise RefusedError(
            400,
            f"the system message is not the one that was calibrated: chats were calibrated {calibrated}. Leave it out: "
            "the calibrated one stands before the text in any case",
            param="messages",
            code="not_calibrated",
        )
    return messages_of(found.text, found.earlier) if found.earlier else found.text


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
        prompts = [chat_prompt(question.messages, served.manifest)]
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
    vocabulary = served.manifest.vocabulary
    check_parameters(
        question,
        most_tokens=served.manifest.decode.max_decode_length,
        stop_strings=() if vocabulary is None else vocabulary.stop_strings or (),
    )
    group = question.calm_beam.group
    pending = handed_in(desk, prompts, group=group, tells_tokens=bool(question.stream), param=param)
    head = Head(
        form=form,
        model=served.name,
        manifest=served.manifest.digest,
        has_ended=desk.generator.has_ended,
        group=group,
        is_full_model=desk.served.is_full_model,
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
        "threshold": served.threshold,
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
