"""The example service answers what the generator answers, or says what is wrong."""

import concurrent.futures
import json
import logging
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from calm_beam.decoding.batch import Batch
from calm_beam.serving import ContinuousGenerator, Generator, LossProbe, OutputError
from examples.web_service import measurements
from examples.web_service.app import build_app
from examples.web_service.limits import Limits
from tests.calm_beam.serving.builders import with_groups
from tests.examples.web_service.served import (
    EXAMPLES,
    LIMITS,
    PROMPTS,
    HeldSteps,
    assert_same,
    expected,
    read_events,
)


def test_an_answer_is_the_generators(client: TestClient, generator: Generator) -> None:
    """Everything that is known of an answer arrives, also that a prompt was cut."""
    for prompt in (PROMPTS[0], "the cat " * 24):
        response = client.post("/generate", json={"prompt": prompt})
        assert response.status_code == 200
        assert_same(response.json(), expected(generator, prompt))


def test_requests_are_decoded_together(generator: Generator) -> None:
    """Many clients at once get the answers that each would get alone."""
    expected_of = {prompt: expected(generator, prompt) for prompt in PROMPTS}
    with TestClient(build_app(generator)) as client, concurrent.futures.ThreadPoolExecutor(12) as pool:
        prompts = PROMPTS * 3
        for prompt, response in zip(
            prompts, pool.map(lambda prompt: client.post("/generate", json={"prompt": prompt}), prompts), strict=True
        ):
            assert_same(response.json(), expected_of[prompt])


def test_a_stream_tells_tokens_as_they_are_made(client: TestClient, generator: Generator) -> None:
    """Each with its layer and its part of the text; the whole answer comes last."""
    for prompt in PROMPTS:
        response = client.post("/generate", json={"prompt": prompt, "stream": True})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *tokens, (name, answer) = read_events(response.text)
        assert (name, {each for each, _ in tokens}) == ("answer", {"token"})
        assert_same(answer, expected(generator, prompt))
        assert [data["token"] for _, data in tokens] == answer["tokens"]
        assert [data["exit_layer"] for _, data in tokens] == answer["exit_layers"]
        assert "".join(data["text"] for _, data in tokens) == answer["text"]


def test_a_prompt_may_name_its_group(generator: Generator, folder: pathlib.Path) -> None:
    """It is answered by the entry of that, and told what is promised; for an unknown group, that nothing is."""
    grouped = Generator.from_manifest(with_groups(generator.manifest), folder / "model", batch_size=2)
    promise = {"delta": 0.1, "epsilon": 0.05}
    with TestClient(build_app(grouped, limits=LIMITS)) as client:
        for group, promised in (
            (None, None),
            ("en", {"group": "en", "threshold": 0.9, **promise}),
            ("fr", {"group": "fr", "threshold": None, **promise}),
            ("it", None),
        ):
            for stream in (False, True):
                body = {"prompt": PROMPTS[0], "group": group, "stream": stream}
                response = client.post("/generate", json=body)
                answer = read_events(response.text)[-1][1] if stream else response.json()
                if group is not None:
                    assert answer.pop("promise") == promised
                assert_same(answer, expected(grouped, PROMPTS[0], group=group))


def test_health_says_what_is_served(client: TestClient, generator: Generator) -> None:
    """Whoever watches over many services sees which model and promise this one has."""
    assert client.get("/health").json() == {
        "model": generator.manifest.model.fingerprint,
        "manifest": generator.manifest.digest,
        "threshold": 0.3,
        "delta": 0.1,
        "epsilon": 0.05,
        "running": 0,
        "waiting": 0,
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
        assert client.post("/generate", json={"prompt": PROMPTS[0]}).status_code == 200
        # The probe decodes by a generator of its own, which is not to break down.
        _wait_for_rows(tmp_path / "losses", 1)

        def broken(_: object, *__: object) -> None:
            raise OutputError("the prompt: not finite")

        monkeypatch.setattr(Generator, "answer", broken)
        response = client.post("/generate", json={"prompt": PROMPTS[0]})
        stream = client.post("/generate", json={"prompt": PROMPTS[0], "stream": True})
    assert (response.status_code, response.json()) == (500, {"detail": "the model gave no output"})
    assert read_events(stream.text)[-1] == ("error", {"detail": "the model gave no output"})
    measured, *failed = (json.loads(line) for line in (tmp_path / "losses").read_text().splitlines())
    assert measured["failure"] is None
    assert [(row["loss"], row["failure"]) for row in failed] == [(1, "OutputError: the prompt: not finite")] * 2


def _wait_for_rows(path: pathlib.Path, count: int) -> None:
    until = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_crash_of_the_batch_is_the_services_fault(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client hears 500, the log has the reason, and who comes later is answered."""
    crashes = iter([True])

    def crashing(batch: Batch) -> Iterator[Any]:
        # Not in the step in which all was compiled, which may come after the service has opened.
        if batch.is_busy() and next(crashes, False):
            raise RuntimeError("the device is gone")
        return iter(())

    with TestClient(build_app(generator, limits=LIMITS), raise_server_exceptions=False) as client:
        monkeypatch.setattr("calm_beam.decoding.batch.Batch.newest", crashing)
        response = client.post("/generate", json={"prompt": PROMPTS[0]})
        assert (response.status_code, response.json()) == (500, {"detail": "the service broke down"})
        assert client.post("/generate", json={"prompt": PROMPTS[0]}).status_code == 200
    assert "the device is gone" in caplog.text


def test_losses_are_measured_beside_what_serves(
    generator: Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the full model; what finds no room to be measured is counted, and known before the answer."""
    may_measure = concurrent.futures.Future[None]()
    observe = LossProbe.observe

    def held(probe: LossProbe, *arguments: object, **more: object) -> float:
        may_measure.result(60)
        return observe(probe, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(LossProbe, "observe", held)
    probe = LossProbe(generator, tmp_path / "losses", share=1, salt="a")
    limits = Limits(prompts=2, waiting=8, measuring=2)
    with TestClient(build_app(generator, probe=probe, limits=limits)) as client:
        for prompt in PROMPTS[:5]:
            assert client.post("/generate", json={"prompt": prompt}).status_code == 200
        assert client.get("/health").json()["left_out"] == 3
        may_measure.set_result(None)
    rows = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    assert [row["failure"] for row in rows] == [None, None]


def test_only_prompts_of_the_probes_group_are_measured(
    generator: Generator, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Of others, the probe's promise says nothing."""
    grouped = Generator.from_manifest(with_groups(generator.manifest), folder / "model", batch_size=2)
    probe = LossProbe(grouped, tmp_path / "losses", share=1, salt="a")
    with TestClient(build_app(grouped, probe=probe, limits=LIMITS)) as client:
        for group in (None, "en", "it"):
            assert client.post("/generate", json={"prompt": PROMPTS[0], "group": group}).status_code == 200
    assert len((tmp_path / "losses").read_text().splitlines()) == 1


def test_a_full_disk_is_told_to_the_log_only(
    generator: Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever asked has their answer; places to be measured come back."""

    def failing(*_: object, **__: object) -> float:
        raise OSError("no space left on device")

    probe = LossProbe(generator, tmp_path / "losses", share=1, salt="a")
    monkeypatch.setattr(LossProbe, "add", failing)
    measuring = measurements.Measurements(generator, probe, most_waiting=1)
    with ContinuousGenerator(generator) as continuous:
        for _ in range(2):
            request_id = measuring.sampled(None)
            while request_id is None:
                request_id = measuring.sampled(None)
            measuring.measure(request_id, PROMPTS[0], continuous.submit(PROMPTS[0]))
    measuring.close()
    assert caplog.text.count("a loss could not be written: no space left on device") == 2


def test_who_comes_when_all_places_are_taken_is_turned_away(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond those that run and those that may wait, requests hear 503 at once; the others are answered."""
    app = build_app(generator, limits=LIMITS)
    with TestClient(app) as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
        # The first batch tells how much room there is.
        assert client.post("/generate", json={"prompt": PROMPTS[0]}).status_code == 200
        hold = HeldSteps(monkeypatch)
        taken = [pool.submit(client.post, "/generate", json={"prompt": prompt}) for prompt in PROMPTS[:4]]
        assert hold.has_begun.wait(60)
        _wait_for_numbers(client, 4)
        assert client.post("/generate", json={"prompt": "b", "stream": True}).status_code == 503
        late = client.post("/generate", json={"prompt": "b"})
        hold.may_go_on.set()
        assert (late.status_code, late.json()) == (503, {"detail": "busy, try again later"})
        assert late.headers["Retry-After"] == "1"
        for prompt, response in zip(PROMPTS[:4], taken, strict=True):
            assert_same(response.result(60).json(), expected(generator, prompt))
        assert client.post("/generate", json={"prompt": "c"}).status_code == 200


def _wait_for_numbers(client: TestClient, count: int) -> None:
    """Waits until so many prompts run or wait."""
    until = time.monotonic() + 60
    while (health := client.get("/health").json())["running"] + health["waiting"] < count:
        assert time.monotonic() < until


def test_limits_under_which_a_request_never_finds_room_are_refused() -> None:
    """As many prompts as a request may have may also wait."""
    with pytest.raises(ValueError, match="prompts must be from 1 to waiting, 2, got 3"):
        Limits(prompts=3, waiting=2)


def test_compiling_is_told(generator: Generator, caplog: pytest.LogCaptureFixture) -> None:
    """Before it takes requests, the service says that it compiles, and then how long that took."""
    caplog.set_level(logging.INFO, logger="uvicorn.error")
    with TestClient(build_app(generator, limits=LIMITS)):
        pass
    said = [record.message for record in caplog.records if record.name == "uvicorn.error"]
    assert said[0].startswith("Compiling for every width of prompt.")
    assert re.fullmatch(r"Compiled in \d+ s\.", said[1])


def test_the_table_of_statuses_is_whole(client: TestClient) -> None:
    """Every status that a client can provoke stands in the README's table."""
    table = re.findall(r"^\| ([\d, ]+) \|", (EXAMPLES / "web_service" / "README.md").read_text(), re.MULTILINE)
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
    assert provoked | {408, 499, 500, 503} == known
