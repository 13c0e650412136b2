"""Compiled code: how it is made, kept on disk between runs, and what time that takes."""

import functools
import hashlib
import pathlib
import platform
from types import TracebackType

import jax

from calm_beam.storage import cache_folder

_COMPILING = "/jax/core/compile/"

GPU_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Options of XLA's compiler for whatever decodes on a GPU.

Nothing is chosen by time. By default, XLA times several ways to multiply matrices and keeps the fastest. Two
compilations of one program may then round differently, so that what was calibrated is not what is served; and it takes
a minute where compiling takes seconds.

Products are the vendor's library's. Kernels that XLA makes of a product together with what stands around it rounded a
row differently in batches and in sweeps, on an H100, and were slower. The library chooses by the shapes alone, which
are those of a tile.
"""

compiled = functools.partial(jax.jit, compiler_options=GPU_OPTIONS)
"""`jax.jit`, for whatever decodes; other devices do not know the options, and take them."""


def use_compilation_cache() -> None:
    """Has JAX keep what it compiles in `cache_folder`.

    A folder is for one kind of processor: code compiled for another may not run. Does nothing if JAX has been given a
    cache already, or there is no place for one.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = cache_folder() / "compiled" / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Steps of a decoder compile in a few tenths of a second, but there are dozens.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


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


def _processor() -> str:
    """Returns a name that differs between processors with different instructions."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join([platform.machine(), *features]).encode()).hexdigest()[:16]
