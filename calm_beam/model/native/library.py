"""Native code, where it was built with the package and the processor has what it takes.

It is one shared library for each instruction set (`build.py`). That for AVX-512 VNNI (Intel's servers since Ice Lake,
AMD's since Zen 4) is taken, or else that for AVX2 (nearly all others of x86), if it is built in and the processor has
it. Where neither is, XLA does the same. `CALM_BEAM_NATIVE=avx512_vnni`, `avx2`, `portable` (any x86), `neon` (aarch64)
or `none` takes that one instead: tests run on each of them.
"""

import ctypes
import functools
import os
import pathlib
import threading

import jax

from calm_beam.errors import UsageError

from .build import FOLDER, TUNED, file_name, instruction_sets, layouts_name

VARIABLE = "CALM_BEAM_NATIVE"
"""The environment variable that names an instruction set, or `none`."""

_SCREEN = "calm_beam_screen"
_LOCK = threading.Lock()


def is_available() -> bool:
    """Returns whether it can be used on this machine."""
    return why_unavailable() is None


def why_unavailable() -> str | None:
    """Loads the code, and returns what is missing; None if it can be used."""
    return _found()[1]


def why_not_loaded() -> str | None:
    """Does what `why_unavailable` does without asking on which devices JAX computes.

    For processes that start others, which must not initialise JAX.
    """
    # XLA takes a call of one name once.
    with _LOCK:
        return _opened(os.environ.get(VARIABLE, ""))[1]


def loaded() -> ctypes.CDLL:
    """Returns the code, where it is available, for calls that are not XLA's."""
    library, reason = _found()
    assert library is not None, reason
    return library


def instruction_set() -> str | None:
    """Returns which instruction set the code is for; None where it is not available.

    Raises:
      UsageError: If the variable names none that there is.
    """
    return None if why_not_loaded() else _taken(os.environ.get(VARIABLE, ""))


def screen_target() -> str:
    """Returns what XLA knows `screen.c` by, from now on: the code of each instruction set has a name of its own."""
    loaded()
    return f"{_SCREEN}_{instruction_set()}"


def instruction_sets_here() -> tuple[str, ...]:
    """Returns the instruction sets that are built in and that this processor has, the best first."""
    here = _processor_features()
    return tuple(name for name, features in instruction_sets().items() if here.issuperset(features) and _is_built(name))


def _found() -> tuple[ctypes.CDLL | None, str | None]:
    with _LOCK:
        return _searched(os.environ.get(VARIABLE, ""))


@functools.cache
def _searched(wanted: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Returns the code for the instruction set that the variable names, or why there is none."""
    if jax.default_backend() != "cpu":
        return None, f"it is for CPUs, and JAX computes on {jax.default_backend()}"
    library, reason = _opened(wanted)
    taken = _taken(wanted)
    if library is not None and taken in TUNED:
        screen = jax.ffi.pycapsule(getattr(library, _SCREEN))
        try:
            jax.ffi.register_ffi_target(f"{_SCREEN}_{taken}", screen, platform="cpu")
        except jax.errors.JaxRuntimeError as error:
            return None, f"it is for another version of JAX ({error})"
    return library, reason


@functools.cache
def _opened(wanted: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Returns the code, or why there is none; arguments as of `_searched`."""
    if wanted == "none":
        return None, f"{VARIABLE} is none"
    taken = _taken(wanted)
    if taken is None:
        return None, _lacking(wanted)
    try:
        code = ctypes.CDLL(str(_path(taken)))
        layouts = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(code, "calm_beam_layouts"))).decode()
    except (OSError, ValueError) as error:
        return None, str(error)
    if layouts != layouts_name():
        return None, f"{_path(taken)} was built of other sources; install calm-beam again"
    return code, None


def _taken(wanted: str) -> str | None:
    """Returns the instruction set that is taken: the one that is wanted, or the best; None if there is none."""
    names = tuple(instruction_sets())
    if wanted not in ("", "none", *names):
        raise UsageError(f"{VARIABLE} must be one of {', '.join((*names, 'none'))}; got {wanted!r}.")
    return next((name for name in instruction_sets_here() if name == wanted or (not wanted and name in TUNED)), None)


def _lacking(wanted: str) -> str:
    """Returns what is missing where no instruction set can be taken."""
    sets = instruction_sets()
    if not sets:
        return f"there is no code for such a machine ({os.uname().machine})"
    built = [name for name in sets if _is_built(name)]
    if not built:
        return (
            "it is not built in, for want of a C compiler that worked when calm-beam was installed; with one, install "
            "calm-beam again"
        )
    if wanted and wanted not in built:
        return f"that for {wanted} is not built in, but that for {', '.join(built)}"
    if wanted:
        missing = [name for name in sets[wanted] if name not in _processor_features()]
        return f"the processor has no {missing[-1]}"
    others = "".join(f" ({VARIABLE}={name} takes portable code)" for name in instruction_sets_here())
    return f"the processor has neither AVX-512 VNNI nor AVX2{others}"


def _path(name: str) -> pathlib.Path:
    return FOLDER / file_name(name)


def _is_built(name: str) -> bool:
    return _path(name).is_file()


def _processor_features() -> set[str]:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())
