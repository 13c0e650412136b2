"""The machine that a benchmark ran on."""

import os
import pathlib
import platform

import jax


def describe_machine() -> str:
    """Returns processor, cores, memory, Python and JAX in one line."""
    info = pathlib.Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in _lines(info) if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{models[0] if models else platform.processor()}, {os.cpu_count()} cores, {memory:.0f} GiB; "
        f"Python {platform.python_version()}, JAX {jax.__version__} on {jax.devices()[0].platform}"
    )


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
