"""Clients that send a byte now and then do not block connections that others need."""

import asyncio
import json
import socket

import fastapi
import pytest

from calm_beam.launch.serve.request import Limits
from tests.launch.serve.served import served


def _heard(port: int, *parts: bytes) -> bytes:
    """Sends parts of requests, and returns all that the service sends until it closes the connection."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        while received := connection.recv(4096):
            heard += received
    return heard


_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 30\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1", _HEAD, _HEAD + b"\r\n", _HEAD + b'\r\n{"prompt": "the'],
    ids=["nothing", "a line", "a head", "no body", "half a body"],
)
def test_slow_clients_hold_no_connection(sent: bytes) -> None:
    """A request that stays incomplete is answered with 408, wherever it stopped, and its connection is closed."""
    app = fastapi.FastAPI()

    @app.post("/v1/completions")
    async def generate(body: dict[str, str]) -> dict[str, str]:
        return body

    with served(app, Limits(arrival_seconds=0.2), waits=False) as port:
        heard = _heard(port, sent)
        assert heard.startswith(b"HTTP/1.1 408 ")
        assert json.loads(heard.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_what_is_no_http_is_refused_in_the_same_form() -> None:
    """Data that are not HTTP get the service's error form, and the connection is closed."""
    with served(fastapi.FastAPI(), Limits(), waits=False) as port:
        heard = _heard(port, b"nonsense\r\n\r\n")
        assert heard.startswith(b"HTTP/1.1 400 ")
        assert json.loads(heard.partition(b"\r\n\r\n")[2])["error"]["message"] == "Invalid HTTP request received."


def test_answers_may_take_longer_than_requests() -> None:
    """The time limit is for receiving requests: an answer that takes longer arrives, as does the next one."""
    app = fastapi.FastAPI()

    @app.get("/{seconds}")
    async def slow(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "answer"

    with served(app, Limits(arrival_seconds=1), waits=False) as port:
        heard = _heard(
            port,
            b"GET /1.5 HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET /0 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        )
    assert heard.count(b"HTTP/1.1 200 OK") == 2
    assert heard.count(b'"answer"') == 2
    assert b"408" not in heard
