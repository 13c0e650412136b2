"""The example service answers what the generator answers, or says what is wrong."""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import fastapi
import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from calm_beam.checkpoints import load_checkpoint
from calm_beam.manifest import write_manifest
from calm_beam.serving import Answer, Generator, LossProbe, OutputError
from calm_beam.vocabulary import Vocabulary
from examples.web_service.service import Limits, build_app, protocol_with
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import text_rows, write_model, write_vocabulary

_SERVICE = pathlib.Path(__file__).parents[2] / "examples" / "web_service" / "service.py"
_PROMPTS = list(dict.fromkeys(row["input"] for row in text_rows(24)))
_LIMITS = Limits(prompt_characters=200, running=2, waiting=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Holds a tiny model with a vocabulary, `model`, and a manifest of it."""
    folder = tmp_path_factory.mktemp("service")
    model = write_model(folder / "model", vocabulary=write_vocabulary(folder / "v.model"))
    manifest = build_served_manifest(
        load_checkpoint(model), (build_entry(0.3),), vocabulary=Vocabulary(folder / "v.model")
    )
    write_manifest(manifest, folder / "manifest.json")
    return folder


@pytest.fixture(scope="module")
def generator(folder: pathlib.Path) -> Generator:
    """What the service has to answer as."""
    return Generator.from_manifest(folder / "manifest.json", folder / "model")


@pytest.fixture
def client(generator: Generator) -> Iterator[TestClient]:
    """A client of the service, which has been warmed up."""
    with TestClient(build_app(generator, limits=_LIMITS), raise_server_exceptions=False) as client:
        yield client


def _expected(generator: Generator, prompt: str) -> dict[str, Any]:
    answer = generator.generate(prompt)
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


def test_an_answer_is_the_generators(client: TestClient, generator: Generator) -> None:
    """Everything that is known of an answer arrives, also that a prompt was cut."""
    for prompt in (_PROMPTS[0], "the cat " * 24):
        response = client.post("/generate", json={"prompt": prompt})
        assert (response.status_code, response.json()) == (200, _expected(generator, prompt))


def test_health_says_what_is_served(client: TestClient, generator: Generator) -> None:
    """Whoever watches over many services sees which model and promise this one has."""
    assert client.get("/health").json() == {
        "model": generator.manifest.model.fingerprint,
        "manifest": generator.manifest.digest,
        "threshold": 0.3,
        "delta": 0.1,
        "epsilon": 0.05,
    }


@pytest.mark.parametrize(
    ("content", "status", "detail"),
    [
        (b'{"prompt": " "}', 422, "the prompt: is empty."),
        (b'{"prompt": "\\ud800"}', 422, None),
        (b'{"prompt": 7}', 422, "body.prompt: Input should be a valid string"),
        (b"{}", 422, "body.prompt: Field required"),
        (b'{"prompt": "a", "beam_size": 4}', 422, "body.beam_size: Extra inputs are not permitted"),
        (b'{"prompt": ', 422, "body.11: JSON decode error"),
        (b"\xff", 400, "There was an error parsing the body"),
        (json.dumps({"prompt": "a" * 201}).encode(), 413, "the prompt is longer than 200 characters"),
        (b" " * 4000, 413, "the body is longer than 3400 bytes"),
    ],
)
def test_bad_requests_are_refused_in_words(
    client: TestClient, content: bytes, status: int | None, detail: str | None
) -> None:
    """What the client got wrong has a status of 4xx, and says what."""
    response = client.post("/generate", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status if status else 400 <= response.status_code < 500
    assert response.json()["detail"] == detail if detail else response.json()["detail"]


def test_a_body_without_a_length_is_refused(client: TestClient) -> None:
    """How long it will be has to be known before it is read."""
    response = client.post("/generate", content=iter([b"{", b"}"]))
    assert (response.status_code, response.json()) == (411, {"detail": "Content-Length is missing"})


def test_a_model_that_breaks_down_is_the_services_fault(
    generator: Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client hears 500 and nothing of the prompt's neighbours; a sampled request counts with loss 1."""
    probe = LossProbe(generator, tmp_path / "losses", share=1, salt="a")
    with TestClient(build_app(generator, probe=probe), raise_server_exceptions=False) as client:
        assert client.post("/generate", json={"prompt": _PROMPTS[0]}).status_code == 200

        def broken(_: object, __: object) -> None:
            raise OutputError("the prompt: not finite")

        monkeypatch.setattr(Generator, "generate", broken)
        response = client.post("/generate", json={"prompt": _PROMPTS[0]})
    assert (response.status_code, response.json()) == (500, {"detail": "the model gave no output"})
    measured, failed = (json.loads(line) for line in (tmp_path / "losses").read_text().splitlines())
    assert measured["failure"] is None
    assert (failed["loss"], failed["failure"]) == (1, "OutputError: the prompt: not finite")


def test_who_comes_when_all_places_are_taken_is_turned_away(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond those that run and those that may wait, requests hear 503 at once; the others are answered."""
    answer, may_go_on, running = generator.generate(_PROMPTS[0]), threading.Event(), threading.Event()

    def slow(_: object, __: object) -> Answer:
        running.set()
        assert may_go_on.wait(60)
        return answer

    app = build_app(generator, limits=Limits(running=1, waiting=0))
    with TestClient(app) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(Generator, "generate", slow)
        first = pool.submit(client.post, "/generate", json={"prompt": "a"})
        assert running.wait(60)
        second = client.post("/generate", json={"prompt": "b"})
        may_go_on.set()
        assert (second.status_code, second.json()) == (503, {"detail": "busy, try again later"})
        assert second.headers["Retry-After"] == "1"
        assert first.result(60).status_code == 200
        assert client.post("/generate", json={"prompt": "c"}).status_code == 200


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _threads_and_megabytes(process: subprocess.Popen[str]) -> tuple[int, float]:
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    threads, kilobytes = (re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE) for name in ("Threads", "VmRSS"))
    assert threads is not None
    assert kilobytes is not None
    return int(threads[1]), int(kilobytes[1]) / 1024


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads and memory are read from /proc")
def test_under_load_every_answer_is_right_and_nothing_grows(folder: pathlib.Path, generator: Generator) -> None:
    """Eight clients at once get the generator's answers, a sample is measured; then the service ends as it is told."""
    port = _free_port()
    command = [sys.executable, str(_SERVICE), f"--manifest={folder / 'manifest.json'}", f"--port={port}"]
    command += [f"--checkpoint={folder / 'model'}", f"--losses={folder / 'losses.jsonl'}", "--share=0.2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _wait_until_served(client, process)
            expected = {prompt: _expected(generator, prompt) for prompt in _PROMPTS}
            answered = _asked(client, expected, rounds=5)
            before = _threads_and_megabytes(process)
            answered += _asked(client, expected, rounds=20)
            after = _threads_and_megabytes(process)
        assert answered == 25 * len(_PROMPTS)
        assert after[0] <= before[0] + 2
        assert after[1] <= before[1] + 32
    finally:
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=60)[1]
    assert "Finished server process" in log
    assert "ERROR" not in log
    losses = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    # Six standard deviations of a binomial.
    assert abs(len(losses) - 0.2 * answered) < 6 * (0.16 * answered) ** 0.5
    assert {row["failure"] for row in losses} == {None}


def _wait_until_served(client: httpx.Client, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        try:
            client.get("/health")
        except httpx.TransportError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"the service ended with status {process.returncode}")


def _asked(client: httpx.Client, expected: dict[str, dict[str, Any]], *, rounds: int) -> int:
    """Asks every prompt so often, by eight threads, checks every answer, and returns how many there were."""

    def ask(prompt: str) -> bool:
        response = client.post("/generate", json={"prompt": prompt})
        assert (response.status_code, response.json()) == (200, expected[prompt])
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return sum(pool.map(ask, list(expected) * rounds))


@contextlib.contextmanager
def _served(app: fastapi.FastAPI, limits: Limits) -> Iterator[int]:
    """Serves an app in a thread, and yields its port."""
    port = _free_port()
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

    with _served(app, Limits(arrival_seconds=0.2)) as port:
        assert _heard(port, sent).startswith(b"HTTP/1.1 408 ")


def test_answers_may_take_longer_than_requests() -> None:
    """The limit is for what arrives: an answer that takes longer is heard, and so is the next one on the connection."""
    app = fastapi.FastAPI()

    @app.get("/{seconds}")
    async def slow(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "answer"

    with _served(app, Limits(arrival_seconds=1)) as port:
        heard = _heard(
            port,
            b"GET /1.5 HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET /0 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        )
    assert heard.count(b"HTTP/1.1 200 OK") == 2
    assert heard.count(b'"answer"') == 2
    assert b"408" not in heard


def test_compiling_is_told(generator: Generator, caplog: pytest.LogCaptureFixture) -> None:
    """Before it takes requests, the service says that it compiles, and then how long that took."""
    caplog.set_level(logging.INFO, logger="uvicorn.error")
    with TestClient(build_app(generator, limits=_LIMITS)):
        pass
    said = [record.message for record in caplog.records if record.name == "uvicorn.error"]
    assert said[0].startswith("Compiling for every width of prompt.")
    assert re.fullmatch(r"Compiled in \d+ s\.", said[1])


def test_the_table_of_statuses_is_whole(client: TestClient) -> None:
    """Every status that a client can provoke stands in the README's table."""
    table = re.findall(r"^\| ([\d, ]+) \|", _SERVICE.with_name("README.md").read_text(), re.MULTILINE)
    known = {int(status) for row in table for status in row.split(",")}
    headers = {"Content-Type": "application/json"}
    provoked = {
        client.post("/generate", content=b"\xff", headers=headers).status_code,
        client.post("/generate", content=b'{"prompt": ', headers=headers).status_code,
        client.post("/generate", content=b" " * 4000, headers=headers).status_code,
        client.post("/generate", content=iter([b"{", b"}"])).status_code,
        client.post("/nowhere").status_code,
        client.get("/generate").status_code,
        client.get("/health").status_code,
    }
    assert provoked == {200, 400, 404, 405, 411, 413, 422}
    assert provoked | {408, 500, 503} == known
