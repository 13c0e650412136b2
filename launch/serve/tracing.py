"""A span of OpenTelemetry for each request, where that is installed and set up; else nothing.

It is set up by whoever starts the service: `opentelemetry-instrument calm-beam serve ...` reads the variables `OTEL_*`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from calm_beam.serving import Answer

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
