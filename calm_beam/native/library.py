"""Native code, compiled where it is used, if the machine has what it takes.

It is for processors with AVX-512 VNNI (Intel's servers since Ice Lake, AMD's since Zen 4) or AVX2 (nearly all others of
x86), for which it is compiled by the C compiler of the machine, in a few seconds, and kept in `cache_folder`. Without
such a processor, or without a compiler, XLA does the same.
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

SCREEN = "calm_beam_screen"
"""What XLA knows `screen.c` by."""

# The best comes first; of the last, all are needed.
_FEATURES = (("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"), ("fma", "avx2"))
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


def loaded() -> ctypes.CDLL:
    """Returns the code, where it is available, for calls that are not XLA's."""
    library, reason = _found()
    assert library is not None, reason
    return library


def _found() -> tuple[ctypes.CDLL | None, str | None]:
    # XLA takes a call of one name once.
    with _LOCK:
        return _searched()


@functools.cache
def _searched() -> tuple[ctypes.CDLL | None, str | None]:
    if jax.default_backend() != "cpu":
        return None, f"it is for CPUs, and JAX computes on {jax.default_backend()}"
    here = _processor_features()
    features = next((each for each in _FEATURES if here.issuperset(each)), None)
    if features is None:
        return None, f"the processor has no {_FEATURES[-1][-1]}"
    try:
        library = _loaded(features)
    except OSError as error:
        return None, str(error)
    jax.ffi.register_ffi_target(SCREEN, jax.ffi.pycapsule(getattr(library, SCREEN)), platform="cpu")
    return library, None


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
