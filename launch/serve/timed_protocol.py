"""A protocol for uvicorn that waits for no request for ever, and refuses in the service's form of errors."""

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Limits
from .refusals import error_fields


class TimedProtocol(H11Protocol):
    """HTTP for requests that arrive in time.

    uvicorn itself waits for ever: clients that send a byte now and then would hold all connections that there are.

    Attributes:
      arrival_seconds: How long a request may take to arrive.
    """

    arrival_seconds: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Takes a part of a request."""
        # Bytes of the next request on the same connection start the time anew.
        self._start_timer()
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no longer."""
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP."""
        self._refuse("400 Bad Request", msg)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.arrival_seconds, self._end_connection)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_connection(self) -> None:
        # Unless it has been answered already, say for being too long.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse("408 Request Timeout", f"the request did not arrive within {self.arrival_seconds:g} seconds")
        self.transport.close()

    def _refuse(self, status: str, message: str) -> None:
        """Answers what never became a request of the app's, and ends the connection."""
        body = json.dumps(error_fields(int(status.split()[0]), message))
        head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/json"
        self.transport.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        self.transport.close()


def protocol_with(limits: Limits) -> type[TimedProtocol]:
    """Returns the protocol for uvicorn (its option `http`) that waits for no request longer than the limits say."""
    return type("LimitedProtocol", (TimedProtocol,), {"arrival_seconds": limits.arrival_seconds})
