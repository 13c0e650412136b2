"""The bodies of answers and of their streams, as clients of OpenAI's interface read them."""

import collections
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from calm_beam.serving import Answer

from .desk import Ended, Pending, Token


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
    """What an answer, or each of its events, begins with.

    Attributes:
      form: Of the answer.
      model: What clients call it.
      manifest: Digest of the manifest.
      end_ids: Token ids of which each ends an output.
      group: That the client named, if it did: then choices say what is promised.
    """

    form: Form
    model: str
    manifest: str
    end_ids: tuple[int, ...]
    group: str | None
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
        reason = "stop" if answer.tokens and answer.tokens[-1] in self.end_ids else "length"
        about = answer_fields(answer, group=self.group)
        return _choice_fields(place, {**fields, "calm_beam": about}, finish_reason=reason)


def _choice_fields(place: int, fields: dict[str, object], *, finish_reason: str | None = None) -> dict[str, object]:
    return {"index": place, **fields, "logprobs": None, "finish_reason": finish_reason}


def answer_fields(answer: Answer, *, group: str | None) -> dict[str, Any]:
    """Returns what is told of an answer besides its text; with the promise, null for none, if the client named a group.

    Args:
      answer: The answer.
      group: As the client named it. If it did not, the promise is that of every such answer, and `/manifest` has it.
    """
    fields = dataclasses.asdict(dataclasses.replace(answer, entry=None))
    del fields["group"], fields["entry"], fields["text"]
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


def _usage(pending: Pending, tokens: int) -> dict[str, int]:
    of_prompts = sum(len(request.ids) for request in pending.requests)
    return {"prompt_tokens": of_prompts, "completion_tokens": tokens, "total_tokens": of_prompts + tokens}


def event(data: dict[str, object]) -> str:
    """Returns an event of a stream."""
    return f"data: {json.dumps(data)}\n\n"
