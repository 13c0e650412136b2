"""Compiled code, kept on disk between runs."""

import hashlib
import pathlib
import platform

import jax

from calm_beam.cache import cache_folder


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


def _processor() -> str:
    """Returns a name that differs between processors with different instructions."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join([platform.machine(), *features]).encode()).hexdigest()[:16]
