"""Requests have spans if OpenTelemetry is set up, and are answered if it is not installed."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from calm_beam.launch.serve import metrics
from calm_beam.serving import Generator
from tests.launch.serve.served import PROMPTS, answered, asked

_TRACE, _SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keeps the spans that end."""
    reason = "OpenTelemetry is not installed: pip install opentelemetry-sdk"
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason=reason)
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr("calm_beam.launch.serve.metrics.trace.get_tracer", provider.get_tracer)
    return kept


def test_a_request_has_a_span_with_its_prompts(client: TestClient, generator: Generator, spans: Any) -> None:
    """A request has a span that is a child of the caller's, with an event for each prompt; so has a stream."""
    caller = {"traceparent": f"00-{_TRACE:032x}-{_SPAN:016x}-01"}
    for stream in (False, True):
        spans.clear()
        body = {"prompt": PROMPTS[:2], "stream": stream}
        assert client.post("/v1/completions", json=body, headers=caller).status_code == 200
        (span,) = spans.get_finished_spans()
        assert (span.name, span.kind.name) == ("POST /v1/completions", "SERVER")
        assert (span.context.trace_id, span.parent.span_id) == (_TRACE, _SPAN)
        assert span.attributes["http.response.status_code"] == 200
        assert [event.name for event in span.events] == ["prompt answered"] * 2
        for event in span.events:
            about = {name.removeprefix("calm_beam."): value for name, value in event.attributes.items()}
            assert about.keys() == {"prompt_tokens", "tokens", "layers_used", "layers_saved"}
            assert about["tokens"] >= 1
            layers = generator.manifest.model.layers
            assert about["layers_used"] + about["layers_saved"] == layers * about["tokens"]


def test_refusals_have_spans_and_probes_have_none(client: TestClient, spans: Any) -> None:
    """Refused requests have spans without an error status; probes have none."""
    for path in ("/healthz", "/readyz", "/metrics"):
        assert client.get(path).status_code == 200
    assert client.post("/v1/completions", json={"prompt": []}).status_code == 400
    (span,) = spans.get_finished_spans()
    assert span.attributes["http.response.status_code"] == 400
    assert span.status.status_code.name == "UNSET"
    assert not span.events


def test_a_failure_is_an_error(client: TestClient, spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the service sets the span's error status."""

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("calm_beam.launch.serve.completions.check_parameters", broken)
    assert asked(client, PROMPTS[0]).status_code == 500
    (span,) = spans.get_finished_spans()
    assert (span.attributes["http.response.status_code"], span.status.status_code.name) == (500, "ERROR")


def test_it_answers_without(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered if OpenTelemetry is not installed."""
    monkeypatch.setattr(metrics, "_IS_INSTALLED", False)
    monkeypatch.delattr(metrics, "trace", raising=False)
    assert answered(asked(client, PROMPTS[0]))["tokens"]
