"""The service on a port of its own, and what it has to answer."""

import contextlib
import json
import pathlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import fastapi
import pytest
import uvicorn

from calm_beam.decoding import batch
from calm_beam.decoding.request import Request
from calm_beam.serving import Generator
from examples.web_service.limits import Limits
from examples.web_service.timed_protocol import protocol_with
from tests.pipelines import text_rows

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
PROMPTS = list(dict.fromkeys(row["input"] for row in text_rows(24)))
LIMITS = Limits(prompt_characters=200, prompts=2, waiting=2)


def free_port() -> int:
    """Returns a port that nobody listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def served(app: fastapi.FastAPI, limits: Limits) -> Iterator[int]:
    """Serves an app in a thread, and yields its port."""
    port = free_port()
    config = uvicorn.Config(app, port=port, http=protocol_with(limits), ws="none", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield port
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def expected(generator: Generator, prompt: str, *, group: str | None = None) -> dict[str, Any]:
    """Returns what the service has to answer."""
    answer = generator.generate(prompt, group=group)
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "exit_layers": list(answer.exit_layers),
        "confidences": list(answer.confidences),
        "num_layers": 4,
        "truncated": answer.truncated,
        "layers_used": answer.layers_used,
        "layers_saved": answer.layers_saved,
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares an answer with what is expected: confidences as floats, since others are decoded beside it."""
    assert {**found, "confidences": None} == {**expected, "confidences": None}
    assert found["confidences"] == pytest.approx(expected["confidences"], abs=1e-5)


def read_events(body: str) -> list[tuple[str, Any]]:
    """Returns the events of a stream: name and data; the name is "" where there is none."""
    events = []
    for lines in body.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in lines.split("\n"))
        data = fields["data"]
        events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


class HeldSteps:
    """Has the batch wait before each step until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Holds every step from now on."""
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.dropped: list[Request] = []
        step, drop = batch.Batch.step, batch.Batch.drop

        def held_step(held: Any) -> Iterator[Any]:
            if held.is_busy():
                self.has_begun.set()
                assert self.may_go_on.wait(60)
            return step(held)

        def watched_drop(held: Any, request: Request) -> None:
            self.dropped.append(request)
            drop(held, request)

        monkeypatch.setattr(batch.Batch, "step", held_step)
        monkeypatch.setattr(batch.Batch, "drop", watched_drop)
