"""What becomes of the prompts of a request: what is refused, and what comes of the rest."""

from collections.abc import Sequence

import fastapi

from calm_beam.serving import Answer, PromptError
from calm_beam.serving.request import AnyPrompt

from .desk import Desk, FullError, GoneError, NotReadyError, Pending
from .event_stream import failure_in_words
from .refusals import RefusedError

# As nginx has it in its log; nobody hears it.
_CLIENT_LEFT = 499
_SECONDS_WHILE_BUSY = 1
_SECONDS_WHILE_COMPILING = 5


def handed_in(
    desk: Desk, prompts: Sequence[AnyPrompt], *, group: str | None, tells_tokens: bool, param: str
) -> Pending:
    """Returns what becomes of prompts.

    Args:
      desk: Where they are handed in.
      prompts: Of one request.
      group: That they are said to belong to; None where the request names none.
      tells_tokens: Whether each token is told as it is made.
      param: What the request calls its prompts.

    Raises:
      RefusedError: If they are not taken.
    """
    characters = desk.served.limits.prompt_characters
    if sum(map(len, prompts)) > characters:
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
    """Returns what those hear who ask before all is compiled."""
    return RefusedError(503, str(error), code="not_ready", retry_after=_SECONDS_WHILE_COMPILING)


async def answered(pending: Pending, request: fastapi.Request) -> list[Answer] | fastapi.Response:
    """Returns the answers to all prompts of a request, or a response for the log if whoever asked has left.

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
