"""Clients that send a byte now and then hold no connection that others need."""

import asyncio
import socket

import fastapi
import pytest

from examples.web_service.limits import Limits
from tests.examples.web_service.served import served


def _heard(port: int, *parts: bytes) -> bytes:
    """Sends parts of requests, and returns all that the service says until it ends the connection."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        while received := connection.recv(4096):
            heard += received
    return heard


_HEAD = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 30\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /gen", _HEAD, _HEAD + b"\r\n", _HEAD + b'\r\n{"prompt": "the'],
    ids=["nothing", "a line", "a head", "no body", "half a body"],
)
def test_slow_clients_hold_no_connection(sent: bytes) -> None:
    """A request of which the rest never comes is answered with 408, wherever it stopped, and its connection ends."""
    app = fastapi.FastAPI()

    @app.post("/generate")
    async def generate(body: dict[str, str]) -> dict[str, str]:
        return body

    with served(app, Limits(arrival_seconds=0.2)) as port:
        assert _heard(port, sent).startswith(b"HTTP/1.1 408 ")


def test_answers_may_take_longer_than_requests() -> None:
    """The limit is for what arrives: an answer that takes longer is heard, and so is the next one on the connection."""
    app = fastapi.FastAPI()

    @app.get("/{seconds}")
    async def slow(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "answer"

    with served(app, Limits(arrival_seconds=1)) as port:
        heard = _heard(
            port,
            b"GET /1.5 HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET /0 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        )
    assert heard.count(b"HTTP/1.1 200 OK") == 2
    assert heard.count(b'"answer"') == 2
    assert b"408" not in heard
