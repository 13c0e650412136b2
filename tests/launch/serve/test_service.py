"""The service answers as the generator does, or says what is wrong, and reports when it is ready."""

import concurrent.futures
import json
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from calm_beam.decoding.batch import Admission, Batch
from calm_beam.launch.serve import desk
from calm_beam.launch.serve.request import Limits, Served
from calm_beam.launch.serve.run import build_app
from calm_beam.risk.monitor import RiskMonitor, WatchedPromise
from calm_beam.serving import Answer, ContinuousGenerator, Generator, LossProbe, MeasuredLoss, OutputError
from tests.calm_beam.serving.builders import with_groups
from tests.launch.serve.served import (
    LIMITS,
    PROMPTS,
    HeldSteps,
    answered,
    app_of,
    asked,
    assert_same,
    expected,
    metric,
    numbers,
    read_events,
    ready_client,
)
from tests.snippets import ROOT


def test_an_answer_is_the_generators(client: TestClient, generator: Generator) -> None:
    """Every field of the generator's answer arrives, including the mark of a cut prompt."""
    for prompt in (PROMPTS[0], "the cat " * 24):
        response = asked(client, prompt)
        assert response.status_code == 200
        assert_same(answered(response), expected(generator, prompt))


def test_requests_are_decoded_together(generator: Generator) -> None:
    """Concurrent clients get the answers that each would get alone."""
    expected_of = {prompt: expected(generator, prompt) for prompt in PROMPTS}
    with ready_client(app_of(generator)) as client, concurrent.futures.ThreadPoolExecutor(12) as pool:
        prompts = PROMPTS * 3
        for prompt, response in zip(prompts, pool.map(lambda prompt: asked(client, prompt), prompts), strict=True):
            assert_same(answered(response), expected_of[prompt])


def test_a_prompt_may_name_its_group(generator: Generator, folder: pathlib.Path) -> None:
    """A prompt that names its group gets that group's entry and promise; for an unknown group no promise is given."""
    grouped = Generator.from_manifest(with_groups(generator.manifest), folder / "model", batch_size=2)
    promise = {"delta": 0.1, "epsilon": 0.05}
    with ready_client(app_of(grouped, limits=LIMITS)) as client:
        for group, promised in (
            (None, None),
            ("en", {"group": "en", "threshold": 0.9, **promise}),
            ("fr", {"group": "fr", "threshold": None, **promise}),
            ("it", None),
        ):
            for stream in (False, True):
                about = {} if group is None else {"calm_beam": {"group": group}}
                answer = answered(asked(client, PROMPTS[0], stream=stream, **about))
                if group is not None:
                    assert answer.pop("promise") == promised
                assert_same(answer, expected(grouped, PROMPTS[0], group=group))


def test_probes_and_metrics_say_what_is_served(client: TestClient, generator: Generator) -> None:
    """Probes and metrics show that the service lives, is ready, and what it promises."""
    assert client.get("/healthz").json() == {"status": "alive", "phase": "ready"}
    assert client.get("/readyz").json() == {"status": "ready"}
    assert [client.head(path).status_code for path in ("/healthz", "/readyz", "/manifest", "/metrics")] == [200] * 4
    assert client.get("/manifest").json() == {}
    scraped = client.get("/metrics")
    assert scraped.headers["content-type"].startswith("text/plain")
    found = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(scraped.text)
        for sample in family.samples
    }
    assert found["calm_beam_ready"] == ({}, 1)
    assert found["calm_beam_served_info"][0] == {
        "model": generator.manifest.model.fingerprint,
        "manifest": generator.manifest.digest,
        "threshold": "0.3",
        "delta": "0.1",
        "epsilon": "0.05",
    }
    assert (found["calm_beam_prompts_running"], found["calm_beam_prompts_waiting"]) == (({}, 0), ({}, 0))


def test_metrics_count_prompts_tokens_and_layers(generator: Generator) -> None:
    """Metrics count prompts, tokens, layers, refusals, and the time to a stream's first event."""
    with ready_client(app_of(generator, limits=LIMITS)) as client:
        answers = [answered(asked(client, prompt, stream=stream)) for prompt in PROMPTS[:3] for stream in (False, True)]
        assert asked(client, " ").status_code == 400
        assert client.get("/nowhere").status_code == 404
        tokens = [layer for answer in answers for layer in answer["exit_layers"]]
        for layer in set(tokens):
            assert metric(client, f'calm_beam_tokens_total{{exit_layer="{layer}"}}') == tokens.count(layer)
        for name, value in (
            ("layers_used_total", sum(tokens)),
            ("layers_saved_total", sum(answer["layers_saved"] for answer in answers)),
            ('prompts_total{outcome="answered"}', 6),
            ("first_token_seconds_count", 3),
            ('requests_total{path="/v1/completions",status="200"}', 6),
            ('requests_total{path="other",status="404"}', 1),
            ('refusals_total{status="400"}', 1),
            ('refusals_total{status="404"}', 1),
            ('request_seconds_count{path="/v1/completions"}', 6),
        ):
            assert metric(client, f"calm_beam_{name}") == value, name
        assert metric(client, "calm_beam_layer_rows_total") >= sum(tokens)
        assert metric(client, "calm_beam_exit_tests_total") > 0


def test_the_phase_counts_what_is_compiled_to_measure_losses(
    generator: Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until all is compiled, /readyz says how far what measures losses is."""
    seen = threading.Event()

    def warmed_up(_: LossProbe, *, on_shape: Callable[[int, int], None]) -> None:
        on_shape(1, 3)
        seen.wait(60)

    monkeypatch.setattr(LossProbe, "warm_up", warmed_up)
    probe = LossProbe(generator, tmp_path / "losses", share=1, salt="a")
    with TestClient(app_of(generator, probe=probe)) as client:
        while "measures losses" not in (response := client.get("/readyz")).text:
            assert response.status_code == 503
            time.sleep(0.01)
        seen.set()
    assert "not ready: compiling what measures losses: 1 of 3 shapes" in response.text


def test_polls_of_health_are_no_refusals(generator: Generator) -> None:
    """A poll of /readyz while the service starts counts as a request, and not as a refusal; a prompt counts as both."""
    started = threading.Event()

    def load() -> tuple[Generator, None]:
        started.wait(60)
        return generator, None

    about = Served(manifest=generator.manifest, entry=generator.entry, content=b"{}")
    with TestClient(build_app(about, load=load)[0]) as client:
        assert client.get("/readyz").status_code == 503
        assert asked(client, PROMPTS[0]).status_code == 503
        assert metric(client, 'calm_beam_requests_total{path="/readyz",status="503"}') == 1
        assert metric(client, 'calm_beam_refusals_total{status="503"}') == 1
        started.set()


def test_errors_have_one_form(client: TestClient) -> None:
    """All errors have one form, whatever the cause and the endpoint."""
    content: list[Any] = [b"\xff", b'{"prompt": ', b" " * 4000, iter([b"{", b"}"]), b"{}", b'{"prompt": 7}']
    headers = {"Content-Type": "application/json"}
    refused = [
        *(client.post("/v1/completions", content=body, headers=headers) for body in content),
        client.post("/v1/chat/completions", content=b"{}", headers=headers),
        client.post("/nowhere"),
        client.get("/v1/completions"),
    ]
    assert [response.status_code for response in refused] == [400, 400, 413, 411, 400, 400, 400, 404, 405]
    for response in refused:
        (name,) = response.json()
        assert name == "error"
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert response.json()["error"]["type"] == "invalid_request_error"
    table = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs" / "serve.md").read_text(encoding="utf-8"), re.MULTILINE)
    known = {int(status) for row in table for status in row.split(",")}
    assert {response.status_code for response in refused} | {200, 408, 499, 500, 503} == known


def test_a_model_that_breaks_down_is_the_services_fault(
    generator: Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing model gives 500 for its own prompt alone; a sampled request counts with loss 1."""
    probe = LossProbe(generator, tmp_path / "losses", share=1, salt="a")
    with ready_client(app_of(generator, probe=probe)) as client:
        assert asked(client, PROMPTS[0]).status_code == 200
        # The probe decodes by a generator of its own, which does not fail here.
        _wait_for_rows(tmp_path / "losses", 1)

        def broken(_: object, *__: object) -> None:
            raise OutputError("the prompt: not finite")

        monkeypatch.setattr(Generator, "answer", broken)
        response = asked(client, PROMPTS[0])
        stream = asked(client, PROMPTS[0], stream=True)
    error = {"message": "the model gave no output", "type": "server_error", "param": None, "code": None}
    assert (response.status_code, response.json()) == (500, {"error": error})
    assert read_events(stream.text)[-1] == ("", {"error": error})
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
    """A crash of the batch gives 500 and a reason in the log; later requests are answered."""
    crashes = iter([True])

    def crashing(batch: Batch) -> Iterator[Any]:
        # The crash must not hit the step that compiles, which may come after the service has opened.
        if batch.is_busy() and next(crashes, False):
            raise RuntimeError("the device is gone")
        return iter(())

    with ready_client(app_of(generator, limits=LIMITS)) as client:
        monkeypatch.setattr("calm_beam.decoding.batch.Batch.newest", crashing)
        response = asked(client, PROMPTS[0])
        assert (response.status_code, response.json()["error"]["message"]) == (500, "the service broke down")
        assert asked(client, PROMPTS[0]).status_code == 200
    assert "the device is gone" in caplog.text


def test_losses_are_measured_beside_what_serves(
    generator: Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss measurement delays no answer; prompts without room for it are counted, and known before the answer."""
    may_measure = concurrent.futures.Future[None]()
    measure = LossProbe.measure

    def held(probe: LossProbe, *arguments: object, **more: object) -> MeasuredLoss:
        may_measure.result(60)
        return measure(probe, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(LossProbe, "measure", held)
    probe = LossProbe(generator, tmp_path / "losses", share=1, salt="a")
    limits = Limits(prompts=2, waiting=8, measuring=2)
    with ready_client(app_of(generator, probe=probe, limits=limits)) as client:
        for prompt in PROMPTS[:5]:
            assert asked(client, prompt).status_code == 200
        assert metric(client, "calm_beam_losses_left_out_total") == 3
        may_measure.set_result(None)
        _wait_for_rows(tmp_path / "losses", 2)
        assert metric(client, "calm_beam_losses_total") == 2
        capital = metric(client, "calm_beam_monitor_capital")
        assert metric(client, 'calm_beam_monitor_alarm{kind="risk"}') == 0
    monitor = RiskMonitor.of_promise(WatchedPromise.of(generator.manifest, generator.entry), alpha=0.05)
    rows = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    assert [row["failure"] for row in rows] == [None, None]
    assert capital == pytest.approx(monitor.observe([row["loss"] for row in rows]).capital)


def test_only_prompts_of_the_probes_group_are_measured(
    generator: Generator, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Only prompts of the probe's group are measured, since its promise is about that group."""
    grouped = Generator.from_manifest(with_groups(generator.manifest), folder / "model", batch_size=2)
    probe = LossProbe(grouped, tmp_path / "losses", share=1, salt="a")
    with ready_client(app_of(grouped, probe=probe, limits=LIMITS)) as client:
        for group in (None, "en", "it"):
            assert asked(client, PROMPTS[0], calm_beam={"group": group}).status_code == 200
    assert len((tmp_path / "losses").read_text().splitlines()) == 1


def test_a_full_disk_is_told_to_the_log_only(
    generator: Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is reported in the log only: the client has its answer, and the room for measuring is freed."""

    def failing(*_: object, **__: object) -> float:
        raise OSError("no space left on device")

    probe = LossProbe(generator, tmp_path / "losses", share=1, salt="a")
    monkeypatch.setattr(LossProbe, "add", failing)
    measuring = desk.Measurements(generator, probe, most_waiting=1)
    with ContinuousGenerator(generator) as continuous:
        for _ in range(2):
            request_id = measuring.sampled(None)
            while request_id is None:
                request_id = measuring.sampled(None)
            measuring.measure(request_id, PROMPTS[0], continuous.submit(PROMPTS[0]))
    measuring.close()
    assert measuring.unwritten == 2
    (line,) = (record.getMessage() for record in caplog.records if "could not be written" in record.getMessage())
    assert line.startswith("losses could not be written: 1 so far, which /metrics counts")
    assert line.endswith("no space left on device")


def test_an_alarm_is_logged_once(
    generator: Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When losses prove that the risk exceeds delta, the log says so in one line, with what to do."""
    monkeypatch.setattr(LossProbe, "measure", lambda *_, **__: MeasuredLoss(value=1.0, failure=None))
    probe = LossProbe(generator, tmp_path / "losses", share=1, salt="a")
    measuring = desk.Measurements(generator, probe, most_waiting=40)
    answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()
    answer.set_result(generator.generate(PROMPTS[0]))
    for _ in range(40):
        measuring.measure("a", PROMPTS[0], answer)
    measuring.close()
    alarms = [record.getMessage() for record in caplog.records if "ALARM" in record.getMessage()]
    assert len(alarms) == 1
    assert f"ALARM at loss {measuring.monitor.alarm_at}: " in alarms[0]
    assert alarms[0].endswith("Serve the full model (calm-beam serve --full_model), and calibrate again.")


def test_who_comes_when_all_places_are_taken_is_turned_away(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests beyond the running and waiting limits get 503 at once; the others are answered."""
    app = app_of(generator, limits=LIMITS)
    with ready_client(app) as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
        # The first batch determines how much room there is.
        assert asked(client, PROMPTS[0]).status_code == 200
        hold = HeldSteps(monkeypatch)
        taken = [pool.submit(asked, client, prompt) for prompt in PROMPTS[:4]]
        assert hold.has_begun.wait(60)
        _wait_for_numbers(client, 4)
        assert asked(client, "b", stream=True).status_code == 503
        late = asked(client, "b")
        hold.may_go_on.set()
        assert (late.status_code, late.json()["error"]["code"]) == (503, "busy")
        assert late.headers["Retry-After"] == "1"
        for prompt, response in zip(PROMPTS[:4], taken, strict=True):
            assert_same(answered(response.result(60)), expected(generator, prompt))
        assert asked(client, "c").status_code == 200


def _wait_for_numbers(client: TestClient, count: int) -> None:
    """Waits until the given numbers of prompts run and wait."""
    until = time.monotonic() + 60
    while sum(numbers(client)) < count:
        assert time.monotonic() < until


def test_limits_under_which_a_request_never_finds_room_are_refused() -> None:
    """Limits under which a request of the largest size never fits are refused."""
    with pytest.raises(ValueError, match="prompts must be from 1 to waiting, 2, got 3"):
        Limits(prompts=3, waiting=2)


def test_until_all_is_compiled_nothing_is_taken(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until compilation ends prompts are refused; probes report progress, and requests without a model are answered."""
    may_go_on = threading.Event()
    prefill = Admission.prefill

    def held(*arguments: Any, **more: Any) -> Any:
        assert may_go_on.wait(60)
        return prefill(*arguments, **more)

    monkeypatch.setattr(Admission, "prefill", held)
    with TestClient(app_of(generator, limits=LIMITS), raise_server_exceptions=False) as client:
        response: Any = client.get("/readyz")
        while "shapes" not in response.text:
            response = client.get("/readyz")
        assert response.status_code == 503
        assert response.headers["Retry-After"] == "5"
        error = response.json()["error"]
        assert error["code"] == "not_ready"
        assert re.fullmatch(r"not ready: compiling: 0 of \d+ shapes", error["message"])
        for path in ("/healthz", "/manifest", "/metrics", "/v1/models"):
            assert client.get(path).status_code == 200
        assert metric(client, "calm_beam_ready") == 0
        for response in (asked(client, PROMPTS[0]), asked(client, PROMPTS[0], stream=True)):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        may_go_on.set()
        until = time.monotonic() + 60
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < until
        assert_same(answered(asked(client, PROMPTS[0])), expected(generator, PROMPTS[0]))
