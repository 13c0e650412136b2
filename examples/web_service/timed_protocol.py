"""A protocol for uvicorn that waits for no request for ever."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Limits


def protocol_with(limits: Limits) -> type[H11Protocol]:
    """Returns a protocol for uvicorn (its option `http`) that waits for no request longer than the limits say.

    uvicorn itself waits for ever: clients that send a byte now and then would hold all connections that there are.
    """

    class TimedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            # Bytes of the next request on the same connection start the time anew.
            self._start_timer()
            super().data_received(data)
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(limits.arrival_seconds, self._end_connection)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _end_connection(self) -> None:
            # Unless it has been answered already, say for being too long.
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()

    return TimedProtocol
