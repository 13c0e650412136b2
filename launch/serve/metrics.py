"""The counters of the service, as Prometheus reads them, and a span of OpenTelemetry for each request.

Spans need OpenTelemetry to be installed and set up; else there are none. The environment sets it up:
`opentelemetry-instrument calm-beam serve ...` reads the variables `OTEL_*`.
"""

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from calm_beam.serving import Answer

if TYPE_CHECKING:
    from .desk import Desk


try:
    from opentelemetry import propagate, trace
except ImportError:
    _IS_INSTALLED = False
else:
    _IS_INSTALLED = True

_FIRST_FAILURE = 500


@contextlib.contextmanager
def request_span(method: str, path: str, headers: Mapping[str, str]) -> Iterator[Callable[[int], None]]:
    """Within it, a request has a span: a child of the caller's, if the headers name one.

    Args:
      method: Of the request.
      path: Of its route.
      headers: By their names, in small letters.

    Yields:
      What takes the status with which the request was answered.
    """
    if not _IS_INSTALLED:
        yield lambda status: None
        return
    with trace.get_tracer("calm_beam.serve").start_as_current_span(
        f"{method} {path}",
        context=propagate.extract(headers),
        kind=trace.SpanKind.SERVER,
        attributes={"http.request.method": method, "http.route": path},
    ) as span:

        def answered(status: int) -> None:
            span.set_attribute("http.response.status_code", status)
            if status >= _FIRST_FAILURE:
                span.set_status(trace.StatusCode.ERROR)

        yield answered


def prompt_event(prompt_tokens: int) -> Callable[[Answer], None]:
    """Returns what adds the answer to one prompt to the span of the request that is being served now."""
    if not _IS_INSTALLED:
        return lambda answer: None
    span = trace.get_current_span()

    def add(answer: Answer) -> None:
        # Of a request whose client has left, the span has ended.
        if span.is_recording():
            numbers = {
                "prompt_tokens": prompt_tokens,
                "tokens": len(answer.tokens),
                "layers_used": answer.layers_used,
                "layers_saved": answer.layers_saved,
            }
            span.add_event("prompt answered", {f"calm_beam.{name}": value for name, value in numbers.items()})

    return add


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
_FIRST_REFUSAL = 400
_ELSEWHERE = "other"
HEALTH_PAGES = ("/healthz", "/readyz")
"""Pages that say whether the service lives and is ready; orchestrators poll them."""
_TRACED = "/v1/"


class ServiceMetrics:
    """Counts of requests, prompts, tokens and layers; threads may share them."""

    def __init__(self) -> None:
        """Starts with nothing counted."""
        self.registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        kept: dict[str, Any] = {"registry": self.registry}
        self._requests = prometheus_client.Counter(
            "calm_beam_requests", "Requests that were answered or refused", ["path", "status"], **kept
        )
        self._seconds = prometheus_client.Histogram(
            "calm_beam_request_seconds", "From a request to the end of its answer", ["path"], buckets=_SECONDS, **kept
        )
        self._first = prometheus_client.Histogram(
            "calm_beam_first_token_seconds", "From a request to its stream's first event", buckets=_SECONDS, **kept
        )
        self._refusals = prometheus_client.Counter(
            "calm_beam_refusals", "Requests that were refused, or failed; polls of /readyz are not", ["status"], **kept
        )
        self._prompts = prometheus_client.Counter(
            "calm_beam_prompts", "Prompts that were answered, failed, or were left by their client", ["outcome"], **kept
        )
        self._prompt_tokens = prometheus_client.Counter(
            "calm_beam_prompt_tokens", "Tokens of prompts that were taken", **kept
        )
        self._tokens = prometheus_client.Counter("calm_beam_tokens", "Tokens of answers", ["exit_layer"], **kept)
        self._layers_used = prometheus_client.Counter(
            "calm_beam_layers_used", "Decoder layers that tokens of answers used", **kept
        )
        self._layers_saved = prometheus_client.Counter(
            "calm_beam_layers_saved", "Further decoder layers that the full model would have run", **kept
        )

    def watch(self, prompt_tokens: int, future: concurrent.futures.Future[Answer]) -> None:
        """Counts a prompt that was taken, and its answer once there is one."""
        self._prompt_tokens.inc(prompt_tokens)
        future.add_done_callback(functools.partial(self._count, trace=prompt_event(prompt_tokens)))

    def _count(self, done: concurrent.futures.Future[Answer], *, trace: Callable[[Answer], None]) -> None:
        if done.cancelled():
            self._prompts.labels("left").inc()
        elif done.exception() is not None:
            self._prompts.labels("failed").inc()
        else:
            answer = done.result()
            trace(answer)
            self._prompts.labels("answered").inc()
            for layer in answer.exit_layers:
                self._tokens.labels(layer).inc()
            self._layers_used.inc(answer.layers_used)
            self._layers_saved.inc(answer.layers_saved)

    def count_request(self, path: str, *, status: int, seconds: float, first_seconds: float | None) -> None:
        """Counts a request.

        Args:
          path: Of it, of a bounded number of them.
          status: It was answered with.
          seconds: To the end of its answer.
          first_seconds: To the first event, if that was a stream.
        """
        self._requests.labels(path, status).inc()
        if status >= _FIRST_REFUSAL:
            # A service that starts refuses nobody by telling a probe so.
            if path not in HEALTH_PAGES:
                self._refusals.labels(status).inc()
            return
        self._seconds.labels(path).observe(seconds)
        if first_seconds is not None:
            self._first.observe(first_seconds)


class DeskCollector(prometheus_client.registry.Collector):
    """Metrics that are collected from a desk at every scrape: its queue, the model's work, and its losses."""

    def __init__(self, desk: "Desk") -> None:
        """Reads a desk."""
        self._desk = desk

    def collect(self) -> Iterable[Metric]:
        """Yields the current values."""
        desk = self._desk
        served = desk.served
        about = {
            "model": served.manifest.model.fingerprint,
            "manifest": served.manifest.digest,
            "threshold": str(served.threshold),
            "delta": str(served.entry.delta),
            "epsilon": str(served.entry.epsilon),
        }
        yield InfoMetricFamily("calm_beam_served", "What is served", about)
        yield GaugeMetricFamily("calm_beam_ready", "1 once all is compiled", float(desk.is_ready))
        batch = desk.batch
        if batch is not None:
            work = batch.work
            for name, what, value in (
                ("running", "Prompts that are being decoded", batch.running),
                ("waiting", "Prompts that wait for their turn", batch.waiting),
                ("room", "Prompts that would be taken now", batch.room),
            ):
                yield GaugeMetricFamily(f"calm_beam_prompts_{name}", what, value)
            asked = work.certified_rows or work.projection_rows
            yield CounterMetricFamily("calm_beam_layer_rows", "Rows that went through a decoder layer", work.layer_rows)
            yield CounterMetricFamily("calm_beam_exit_tests", "Rows of which the output head was asked", asked)
        if desk.measurements is not None:
            yield from _of_losses(desk)


def _of_losses(desk: "Desk") -> Iterable[Metric]:
    measurements = desk.measurements
    assert measurements is not None, "measurements are on"
    monitor = measurements.monitor
    yield CounterMetricFamily("calm_beam_losses", "Losses that were measured, or are missing", monitor.n)
    yield CounterMetricFamily("calm_beam_losses_missing", "How many of them are missing", monitor.missing)
    yield CounterMetricFamily(
        "calm_beam_losses_left_out", "Sampled requests that found no room to be measured", measurements.left_out
    )
    yield CounterMetricFamily(
        "calm_beam_losses_unwritten", "Losses that could not be added to the file", measurements.unwritten
    )
    yield GaugeMetricFamily(
        "calm_beam_monitor_capital",
        "Evidence since the start that the risk exceeds delta; 20 is an alarm that is false with a chance of 5 %",
        monitor.capital,
    )
    yield GaugeMetricFamily(
        "calm_beam_monitor_worst_capital", "The same with each missing loss counted as 1", monitor.worst_capital
    )
    alarms = GaugeMetricFamily(
        "calm_beam_monitor_alarm", "1 from the alarm on: the capital has reached 20", labels=["kind"]
    )
    alarms.add_metric(["risk"], float(monitor.alarm_at is not None))
    alarms.add_metric(["risk_or_missing"], float(monitor.missing_alarm_at is not None))
    yield alarms


class Counted:
    """Counts requests, with what they took, and traces those of people."""

    def __init__(self, app: ASGIApp, *, metrics: ServiceMetrics, routes: Iterable[BaseRoute]) -> None:
        """Stands before an app.

        Args:
          app: What answers.
          metrics: Where requests are counted.
          routes: Of the app: whatever is at none of them is counted as one path.
        """
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on, and counts."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, first = time.monotonic(), None
        status = 500
        found = (each for each in self._routes if isinstance(each, Route) and each.matches(scope)[0] != Match.NONE)
        path = next((route.path for route in found), _ELSEWHERE)

        async def watched(message: Message) -> None:
            nonlocal status, first
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif first is None and message.get("more_body"):
                first = time.monotonic() - start

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        # Probes come every few seconds.
        is_traced = path.startswith(_TRACED)
        traced = request_span(scope["method"], path, headers) if is_traced else contextlib.nullcontext(lambda _: None)
        try:
            with traced as answered:
                try:
                    await self._app(scope, receive, watched)
                finally:
                    answered(status)
        finally:
            self._metrics.count_request(path, status=status, seconds=time.monotonic() - start, first_seconds=first)
