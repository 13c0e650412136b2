"""What a request may say besides its prompt.

Whatever would change what was calibrated is refused, and the error says why: a promise that does not hold is worth less
than none.
"""

import json
from typing import Any

import pydantic

from .refusals import RefusedError

_GREEDY = "each token is the likeliest, as it was when the threshold was calibrated"
_CHANGED_TEXT = "the promise is about the whole output, as the model gives it"
_NOT_MADE = "this service does not give that"
# What a parameter may be, besides null, and why nothing else.
_ACCEPTED: dict[str, tuple[tuple[object, ...], str]] = {
    "temperature": ((0,), _GREEDY),
    "top_p": ((1,), _GREEDY),
    "presence_penalty": ((0,), _GREEDY),
    "frequency_penalty": ((0,), _GREEDY),
    "logit_bias": (({},), _GREEDY),
    "n": ((1,), f"{_GREEDY}, so that all outputs would be the same"),
    "best_of": ((1,), f"{_GREEDY}, so that all outputs would be the same"),
    "stop": (([],), _CHANGED_TEXT),
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
    """What only this service knows."""

    model_config = pydantic.ConfigDict(extra="forbid")

    group: str | None = None


class Question(pydantic.BaseModel):
    """What the bodies of both kinds of request have in common."""

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


def check_parameters(question: Question, *, most_tokens: int) -> None:
    """Refuses what is not as it was calibrated.

    Args:
      question: The body of a request.
      most_tokens: With how many an output was ended, when the threshold was calibrated.

    Raises:
      RefusedError: If anything is other than that.
    """
    for name, (accepted, reason) in _ACCEPTED.items():
        value = getattr(question, name, None)
        if value is None or value in accepted or (name == "logprobs" and value is False):
            continue
        code = "not_supported" if reason is _NOT_MADE else "not_calibrated"
        instead = f"Pass {json.dumps(accepted[0])} or leave it out" if accepted else "Leave it out"
        message = f"{name} {value!r:.40} is refused: {reason}. {instead}."
        raise RefusedError(400, message, param=name, code=code)
    for name in ("max_tokens", "max_completion_tokens"):
        asked = getattr(question, name, None)
        if asked not in (None, most_tokens):
            message = (
                f"{name} {asked} is refused: outputs were calibrated with at most {most_tokens} tokens, and the "
                f"promise is neither about longer ones nor about their beginnings. Pass {most_tokens} or leave it out."
            )
            raise RefusedError(400, message, param=name, code="not_calibrated")
    if question.stream_options is not None and not question.stream:
        raise RefusedError(400, "stream_options are for streams: pass stream=true", param="stream_options")
