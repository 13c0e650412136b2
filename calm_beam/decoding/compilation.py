"""Compiled code, kept on disk between runs."""

import hashlib
import os
import pathlib
import platform

import jax


def use_compilation_cache() -> None:
    """Has JAX keep what it compiles below `$CALM_BEAM_CACHE`, else `$XDG_CACHE_HOME` or `~/.cache`, under `calm-beam`.

    A folder is for one kind of processor: code compiled for another may not run. Does nothing if JAX has been given a
    cache already, or there is no place for one.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    base = os.environ.get("CALM_BEAM_CACHE")
    if base is None:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path("~/.cache").expanduser()
        base = os.path.join(home, "calm-beam")
    folder = pathlib.Path(base) / "compiled" / _processor()
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
