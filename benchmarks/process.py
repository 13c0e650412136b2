"""What this process has used: seconds of compilation, and memory."""

import resource
import sys
from types import TracebackType

import jax

_COMPILING = "/jax/core/compile/"


class CompileTime:
    """Adds up the time in which JAX traces, lowers or compiles, while the context is open."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> "CompileTime":
        jax.monitoring.register_event_time_span_listener(self._add)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_time_span_listener(self._add)

    def _add(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        if event.startswith(_COMPILING):
            self._spans.append((start_time, end_time))

    def seconds(self) -> float:
        """Returns the seconds so far. Spans within others, as a function traced inside another has, count once."""
        total, reached = 0.0, 0.0
        for start, end in sorted(self._spans):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total


def peak_memory_bytes() -> int:
    """Returns the most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024
