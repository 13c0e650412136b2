"""Helpers: the service on a port of its own, and the answers it has to give."""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import fastapi
import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from calm_beam.decoding import batch
from calm_beam.decoding.branches import Request
from calm_beam.launch.serve.request import Limits, Served
from calm_beam.launch.serve.run import build_app, protocol_with
from calm_beam.serving import Generator, LossProbe
from tests.pipelines import text_rows

PROMPTS = list(dict.fromkeys(row["input"] for row in text_rows(24)))
LIMITS = Limits(prompt_characters=200, prompts=2, waiting=2)


def free_port() -> int:
    """Returns a port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def app_of(
    generator: Generator, *, limits: Limits | None = None, probe: LossProbe | None = None, name: str = "calm-beam"
) -> fastapi.FastAPI:
    """Returns the service of a generator that is loaded already."""
    about = Served(
        manifest=generator.manifest,
        entry=generator.entry,
        content=b"{}",
        name=name,
        limits=limits or Limits(),
    )
    return build_app(about, load=lambda: (generator, probe))[0]


@contextlib.contextmanager
def ready_client(app: fastapi.FastAPI) -> Iterator[TestClient]:
    """Yields a client of a service that has compiled all it needs."""
    with TestClient(app, raise_server_exceptions=False) as client:
        _wait_until(lambda: client.get("/readyz").status_code == 200)
        yield client


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def numbers(client: Any) -> tuple[int, int]:
    """Returns how many prompts run and how many wait."""
    running, waiting = (metric(client, f"calm_beam_prompts_{name}") for name in ("running", "waiting"))
    return int(running), int(waiting)


def metric(client: Any, name: str) -> float:
    """Returns a number of `/metrics`, named with its labels as in that text."""
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(value)


@contextlib.contextmanager
def served(app: fastapi.FastAPI, limits: Limits, *, waits: bool = True) -> Iterator[int]:
    """Serves an app in a thread and yields its port, by default once the service is ready."""
    port = free_port()
    config = uvicorn.Config(app, port=port, http=protocol_with(limits), ws="none", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        _wait_until(lambda: server.started)
        if waits:
            _wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=60).status_code == 200)
        yield port
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def asked(client: Any, prompt: Any, **more: Any) -> Any:
    """Returns the response to a request for completions."""
    return client.post("/v1/completions", json={"prompt": prompt, **more})


def answer_of(choice: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of an answer that a choice, or the end of its events, holds."""
    return {"text": choice["text"], **choice["calm_beam"]}


def answered(response: Any) -> dict[str, Any]:
    """Returns the one answer that a response holds, as JSON or as a stream."""
    if response.headers["content-type"].startswith("text/event-stream"):
        choices = [event["choices"][0] for _, event in read_events(response.text)[:-1]]
        return {"text": "".join(choice["text"] for choice in choices), **choices[-1]["calm_beam"]}
    (choice,) = response.json()["choices"]
    return answer_of(choice)


def expected(generator: Generator, prompt: str, *, group: str | None = None) -> dict[str, Any]:
    """Returns the answer that the service has to give."""
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
    """Compares an answer with the expected one; confidences within float tolerance, since the batch differs."""
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
    """Makes the batch wait before each step until it is released."""

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
