"""Native code, compiled where it is used, if the machine has what it takes.

It is for processors with AVX-512 VNNI (Intel's servers since Ice Lake, AMD's since Zen 4) or AVX2 (nearly all others of
x86), for which it is compiled by the C compiler of the machine, in a few seconds, and kept in `cache_folder`. Without
such a processor, or without a compiler, XLA does the same. `CALM_BEAM_NATIVE=avx512_vnni`, `avx2` or `none` takes that
instruction set, where the processor has it, instead of the best one: tests run on each of them.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.resources
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence

import jax

from calm_beam.cache import cache_folder
from calm_beam.errors import UsageError

VARIABLE = "CALM_BEAM_NATIVE"
"""The environment variable that names an instruction set, or `none`."""

INSTRUCTION_SETS = {
    "avx512_vnni": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    "avx2": ("fma", "avx2"),
}
"""Features of a processor that each instruction set needs; the best set comes first."""

_SCREEN = "calm_beam_screen"
_SOURCES = ("screen.c", "layer.c", "head.c", "measures.c", "step.c", "threads.c")
_HEADERS = (
    *("attention.h", "exponentials.h", "heads.h", "layers.h", "measures.h", "memory.h"),
    *("products.h", "tasks.h", "threads.h", "vectors.h"),
)
_MOST_SECONDS = 60
_LOCK = threading.Lock()
_OPTIONS = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno"),
    # No remarks on vectors as arguments, which no other code takes: what a compiler says first is passed on.
    "-Wno-psabi",
    # Whatever `CC` says: the bounds are about IEEE arithmetic.
    *("-fno-fast-math", "-fno-unsafe-math-optimizations"),
)


def is_available() -> bool:
    """Returns whether it can be used on this machine."""
    return why_unavailable() is None


def why_unavailable() -> str | None:
    """Compiles and loads the code, and returns what is missing; None if it can be used."""
    return _found()[1]


def why_not_built() -> str | None:
    """Does what `why_unavailable` does without asking on which devices JAX computes.

    For processes that start others, which must not initialise JAX.
    """
    # XLA takes a call of one name once.
    with _LOCK:
        return _built(os.environ.get(VARIABLE, ""))[1]


def loaded() -> ctypes.CDLL:
    """Returns the code, where it is available, for calls that are not XLA's."""
    library, reason = _found()
    assert library is not None, reason
    return library


def instruction_set() -> str | None:
    """Returns which of `INSTRUCTION_SETS` the code is for; None where it is not available.

    Raises:
      UsageError: If the variable names none that there is.
    """
    return None if why_not_built() else _taken(os.environ.get(VARIABLE, ""))


def screen_target() -> str:
    """Returns what XLA knows `screen.c` by, from now on: the code of each instruction set has a name of its own."""
    loaded()
    return f"{_SCREEN}_{instruction_set()}"


def instruction_sets_here() -> tuple[str, ...]:
    """Returns the instruction sets that this processor has, the best first."""
    here = _processor_features()
    return tuple(name for name, features in INSTRUCTION_SETS.items() if here.issuperset(features))


def _found() -> tuple[ctypes.CDLL | None, str | None]:
    with _LOCK:
        return _searched(os.environ.get(VARIABLE, ""))


@functools.cache
def _searched(wanted: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Returns the code for the instruction set that the variable names, or why there is none."""
    if jax.default_backend() != "cpu":
        return None, f"it is for CPUs, and JAX computes on {jax.default_backend()}"
    library, reason = _built(wanted)
    if library is not None:
        screen = jax.ffi.pycapsule(getattr(library, _SCREEN))
        jax.ffi.register_ffi_target(f"{_SCREEN}_{_taken(wanted)}", screen, platform="cpu")
    return library, reason


@functools.cache
def _built(wanted: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Returns the compiled code, or why there is none; arguments as of `_searched`."""
    if wanted == "none":
        return None, f"{VARIABLE} is none"
    taken = _taken(wanted)
    if taken is None:
        features = INSTRUCTION_SETS.get(wanted) or tuple(INSTRUCTION_SETS.values())[-1]
        return None, f"the processor has no {features[-1]}"
    try:
        return _loaded(INSTRUCTION_SETS[taken]), None
    except OSError as error:
        return None, str(error)


def _taken(wanted: str) -> str | None:
    """Returns the instruction set that is taken: the one that is wanted, or the best; None if there is none."""
    if wanted not in ("", "none", *INSTRUCTION_SETS):
        raise UsageError(f"{VARIABLE} must be one of {', '.join(INSTRUCTION_SETS)}, none; got {wanted!r}.")
    here = instruction_sets_here()
    return next((name for name in here if wanted in ("", name)), None)


def _processor_features() -> set[str]:
    if platform.machine() != "x86_64":
        return set()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def _loaded(features: Sequence[str]) -> ctypes.CDLL:
    """Returns the code compiled for a processor with these features, from the cache if it is there.

    Raises:
      OSError: If there is no compiler, or it fails, or what it made cannot be loaded.
    """
    folder_of_sources = importlib.resources.files("calm_beam.native")
    sources = {name: folder_of_sources.joinpath(name).read_bytes() for name in _SOURCES + _HEADERS}
    options = [*_OPTIONS, *(f"-m{feature.replace('_', '')}" for feature in features)]
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        raise OSError(f"CC is no command ({error}): {os.environ['CC']}") from error
    # The headers are jaxlib's.
    made_of = sources, compiler, options, importlib.metadata.version("jaxlib")
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]
    folder = cache_folder() / "native"
    path = folder / f"native-{key}.so"
    # What is damaged, or made where libraries are others, is made again.
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(path))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = tempfile.TemporaryDirectory(dir=folder)
    except OSError:
        # Without a cache, every process compiles for itself.
        place = tempfile.TemporaryDirectory()
    with place as temporary:
        made = pathlib.Path(temporary) / path.name
        for name, source in sources.items():
            made.with_name(name).write_bytes(source)
        _compile([made.with_name(name) for name in _SOURCES], made, [*compiler, *options])
        library = ctypes.CDLL(str(made))
        if made.parent.parent == folder:
            # It stays loaded. Whole, or not there at all, for whoever else looks for it.
            os.replace(made, path)
    return library


def _compile(sources: Sequence[pathlib.Path], target: pathlib.Path, compiler: list[str]) -> None:
    if shutil.which(compiler[0]) is None:
        raise FileNotFoundError(f"there is no C compiler ({compiler[0]}); install one, or name it by CC")
    command = [*compiler, f"-I{jax.ffi.include_dir()}", *map(str, sources), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_MOST_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"the C compiler has not ended within {_MOST_SECONDS} s") from error
    if done.returncode:
        first, *_ = done.stderr.decode(errors="replace").splitlines() or [f"status {done.returncode}"]
        raise OSError(f"the C compiler failed: {first}")
