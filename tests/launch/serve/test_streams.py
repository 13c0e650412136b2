"""Streams: tokens are sent as they are made, decoding stops for clients that disconnect, and shutdown is clean."""

import http.client
import json
import pathlib
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from calm_beam.decoding import batch
from calm_beam.serving import Generator, LossProbe
from tests.launch.serve.served import (
    LIMITS,
    PROMPTS,
    HeldSteps,
    answer_of,
    answered,
    app_of,
    asked,
    assert_same,
    expected,
    numbers,
    read_events,
    served,
)


def _longest(generator: Generator) -> str:
    return max(PROMPTS, key=lambda prompt: len(generator.generate(prompt).tokens))


def _until(condition: object, *, seconds: float = 60) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _sent(port: int, path: str, body: dict[str, object]) -> socket.socket:
    """Returns a connection on which a request was sent."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    connection.sendall(f"{head}\r\n".encode() + content)
    return connection


class _CountedSteps:
    """Lets the batch take the given number of steps, and then waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed = threading.Semaphore(0)
        self.taken = 0
        step = batch.Batch.step

        def counted(held: batch.Batch) -> Iterator[object]:
            if held.is_busy():
                assert self.allowed.acquire(timeout=60)
                self.taken += 1
            return step(held)

        monkeypatch.setattr(batch.Batch, "step", counted)


def test_the_first_token_is_heard_before_the_second_is_made(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token arrives before the second is decoded: nothing buffers events."""
    body = {"prompt": _longest(generator), "stream": True}
    with served(app_of(generator, limits=LIMITS), LIMITS) as port:
        steps = _CountedSteps(monkeypatch)
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            for count in range(1, 4):
                steps.allowed.release()
                heard = json.loads(next(lines).removeprefix("data: "))
                assert steps.taken == count
                assert "token" in heard["choices"][0]["calm_beam"]
            for _ in range(20):
                steps.allowed.release()
            assert list(lines)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_not_decoded_for(generator: Generator, monkeypatch: pytest.MonkeyPatch, *, stream: bool) -> None:
    """Prompts of a client that has disconnected free their room; others are answered."""
    with served(app_of(generator, limits=LIMITS), LIMITS) as port:
        url = f"http://127.0.0.1:{port}"
        hold = HeldSteps(monkeypatch)
        connections = [_sent(port, "/v1/completions", {"prompt": prompt, "stream": stream}) for prompt in PROMPTS[:4]]
        _until(lambda: sum(_numbers(url)) == 4)
        running, _ = _numbers(url)
        for connection in connections:
            connection.close()
        # Waiting prompts are dropped at once, running ones at the next step.
        _until(lambda: _numbers(url) == (running, 0))
        hold.may_go_on.set()
        _until(lambda: _numbers(url) == (0, 0))
        assert len(hold.dropped) == running
        with httpx.Client(base_url=url, timeout=60) as client:
            response = asked(client, PROMPTS[5])
        assert_same(answered(response), expected(generator, PROMPTS[5]))


def _numbers(url: str) -> tuple[int, int]:
    with httpx.Client(base_url=url, timeout=60) as client:
        return numbers(client)


def test_who_leaves_is_measured_all_the_same(
    generator: Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of clients that disconnect are measured too.

    Clients may leave because of what they read, so a sample without them would be biased.
    """
    probe = LossProbe(generator, tmp_path / "losses", share=1, salt="a")
    with served(app_of(generator, probe=probe, limits=LIMITS), LIMITS) as port:
        hold = HeldSteps(monkeypatch)
        connection = _sent(port, "/v1/completions", {"prompt": _longest(generator), "stream": True})
        assert hold.has_begun.wait(60)
        connection.close()
        time.sleep(0.2)
        hold.may_go_on.set()
    # Closing waits for the measurements.
    (row,) = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    assert row["failure"] is None
    assert not hold.dropped


def test_what_was_taken_is_answered_at_the_end(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shutdown answers accepted requests, streams included, and takes no new ones."""
    heard: list[tuple[int, str]] = []
    with served(app_of(generator, limits=LIMITS), LIMITS) as port:
        hold = HeldSteps(monkeypatch)
        connections = [
            _sent(port, "/v1/completions", {"prompt": prompt, "stream": stream})
            for prompt, stream in zip(PROMPTS[:4], (False, True, False, True), strict=True)
        ]
        _until(lambda: sum(_numbers(f"http://127.0.0.1:{port}")) == 4)
        reader = threading.Thread(target=lambda: heard.extend(map(_read, connections)))
        reader.start()
        threading.Timer(0.5, hold.may_go_on.set).start()
        # Leaving the context tells the service to end.
    reader.join(60)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))
    for prompt, (status, body) in zip(PROMPTS[:4], heard, strict=True):
        assert status == 200
        if body.startswith("data"):
            answer = expected(generator, prompt)
            last = read_events(body)[-2][1]["choices"][0]
            assert_same({**last["calm_beam"], "text": answer["text"]}, answer)
        else:
            assert_same(answer_of(json.loads(body)["choices"][0]), expected(generator, prompt))


def _read(connection: socket.socket) -> tuple[int, str]:
    """Returns status and body of a response."""
    with connection, http.client.HTTPResponse(connection) as response:
        response.begin()
        return response.status, response.read().decode()
