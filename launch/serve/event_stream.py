"""Server-sent events: a response that grows while an answer is made."""

import logging
from collections.abc import AsyncIterator, Callable

import fastapi
from starlette.types import Receive, Scope, Send

from calm_beam.serving import OutputError

from .desk import GoneError, Pending

_log = logging.getLogger("uvicorn.error")


class EventStream(fastapi.Response):
    """Sends events as they come, and gives up what is pending once the client has left."""

    media_type = "text/event-stream"

    def __init__(self, pending: Pending, events: AsyncIterator[str], *, failed: Callable[[str], str]) -> None:
        """Prepares to send.

        Args:
          pending: What the events are about.
          events: Each as it is sent.
          failed: Returns the last event instead, when something broke, of which it is told in words.
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
