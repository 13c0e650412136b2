"""The example service answers what the generator answers, or says what is wrong."""

import concurrent.futures
import json
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

import httpx
import pytest
from fastapi.testclient import TestClient

from calm_beam.checkpoints import load_checkpoint
from calm_beam.manifest import write_manifest
from calm_beam.serving import Answer, Generator, LossProbe, OutputError
from calm_beam.vocabulary import Vocabulary
from examples.web_service.service import Limits, build_app
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
        (b"\xff", None, None),
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
