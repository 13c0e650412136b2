"""What asking for one answer and asking for many have in common: what is refused, and what comes of the rest."""

from collections.abc import Sequence

import fastapi
from starlette.exceptions import HTTPException

from calm_beam.serving import Answer, BusyError, PromptError
from calm_beam.serving.request import AnyPrompt

from .desk import Desk, GoneError, Pending
from .event_stream import failure_in_words
from .limits import Limits
from .refusals import RefusedError

# As nginx has it in its log; nobody hears it.
_CLIENT_LEFT = 499


def handed_in(
    desk: Desk, prompts: Sequence[AnyPrompt], *, group: str | None, tells_tokens: bool, limits: Limits, refused: int
) -> Pending:
    """Returns what becomes of prompts; arguments are those of `Desk.hand_in` but for the last two.

    Args:
      desk: Where they are handed in.
      prompts: Of one request.
      group: As there.
      tells_tokens: As there.
      limits: What the service takes upon itself.
      refused: Status for a prompt that cannot be answered.

    Raises:
      HTTPException: If they are not taken.
    """
    if sum(map(len, prompts)) > limits.prompt_characters:
        what = "the prompt is" if len(prompts) == 1 else "the prompts are"
        raise RefusedError(413, f"{what} longer than {limits.prompt_characters} characters", param="prompt")
    try:
        return desk.hand_in(prompts, group=group, tells_tokens=tells_tokens)
    except PromptError as error:
        raise RefusedError(refused, str(error), param="prompt") from error
    except BusyError as error:
        raise HTTPException(503, "busy, try again later", headers={"Retry-After": "1"}) from error


async def answered(pending: Pending, request: fastapi.Request) -> list[Answer] | fastapi.Response:
    """Returns the answers to all prompts of a request, or a response for the log if whoever asked has left.

    Raises:
      HTTPException: If there is no answer.
    """
    async with pending.given_up_when_gone(request.receive):
        try:
            return await pending.answers()
        except GoneError:
            return fastapi.Response(status_code=_CLIENT_LEFT)
        except Exception as error:
            raise HTTPException(500, failure_in_words(error)) from error
