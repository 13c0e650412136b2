"""Native code: compiled once and kept, and done without where a machine lacks something."""

import os
import pathlib
import stat
import subprocess
import sys
from collections.abc import Callable

import pytest

from calm_beam.errors import UsageError
from calm_beam.native import library

_COMPILES = pytest.mark.skipif(not library.is_available(), reason="this machine cannot compile or run it")


def _reason() -> str | None:
    """Returns what is missing, without keeping it."""
    return library._built.__wrapped__(os.environ.get(library.VARIABLE, ""))[1]


@pytest.fixture
def can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A processor with the least that is needed, and an empty cache, which is returned."""
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "_processor_features", lambda: {"sse2", "avx2", "fma"})
    monkeypatch.setenv("CALM_BEAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], pathlib.Path]:
    """Makes a shell script the C compiler, and returns where it notes that it was called."""

    def make(does: str) -> pathlib.Path:
        script, calls = tmp_path / "compile", tmp_path / "calls"
        script.write_text(f"#!/bin/sh\necho called >> {calls}\n{does}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CC", str(script))
        return calls

    return make


def test_another_processor_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, and what is missing is said."""
    monkeypatch.setattr(library, "_processor_features", lambda: {"sse2", "fma"})
    monkeypatch.setattr(library, "_loaded", lambda features: pytest.fail("compiled"))
    assert _reason() == "the processor has no avx2"


@_COMPILES
@pytest.mark.parametrize(
    ("has", "takes"),
    [
        ({"fma", "avx2", "avx512f", "avx_vnni"}, ["-mfma", "-mavx2"]),
        (
            {"fma", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "amx_int8"},
            ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"],
        ),
    ],
)
def test_the_best_that_a_processor_has_is_taken(
    has: set[str],
    takes: list[str],
    can_run: pathlib.Path,
    compiler: Callable[[str], pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    """The compiler makes the code for it, whatever the processor is that it runs on."""
    monkeypatch.setattr(library, "_processor_features", lambda: has)
    compiler(f'echo "$@" > {tmp_path}/options; cc "$@" && exit 1')
    assert _reason() == "the C compiler failed: status 1"
    assert [option for option in (tmp_path / "options").read_text().split() if option.startswith("-m")] == takes


def test_without_a_compiler(can_run: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says how to get one."""
    monkeypatch.setenv("CC", "no-such-compiler")
    reason = _reason()
    assert reason == "there is no C compiler (no-such-compiler); install one, or name it by CC"


def test_a_compiler_that_is_no_command(can_run: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, and nothing ends."""
    monkeypatch.setenv("CC", "cc '")
    assert _reason() == "CC is no command (No closing quotation): cc '"


def test_a_compiler_that_fails(can_run: pathlib.Path, compiler: Callable[[str], pathlib.Path]) -> None:
    """What it says first is passed on, and nothing is kept."""
    compiler("echo 'no header: stdlib.h' >&2; exit 1")
    assert _reason() == "the C compiler failed: no header: stdlib.h"
    assert [path for path in can_run.rglob("*") if path.is_file()] == []


def test_a_library_that_is_none(can_run: pathlib.Path, compiler: Callable[[str], pathlib.Path]) -> None:
    """What a compiler made, and cannot be loaded, is not kept."""
    compiler('for target; do :; done; echo nonsense > "$target"')
    reason = _reason()
    assert reason is not None
    assert "invalid ELF header" in reason or "file too short" in reason
    assert [path for path in can_run.rglob("*") if path.is_file()] == []


def _printed(code: str, *, cache: pathlib.Path) -> str:
    """Returns what a process with that cache prints."""
    environment = {**os.environ, "CALM_BEAM_CACHE": str(cache)}
    command = [sys.executable, "-c", f"from calm_beam.native.library import why_unavailable\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    return done.stdout.strip()


def _reason_elsewhere(cache: pathlib.Path) -> str:
    """Returns what a process with that cache finds to be missing, asked twice."""
    return _printed("print(why_unavailable(), why_unavailable())", cache=cache)


@_COMPILES
@pytest.mark.parametrize("name", library.instruction_sets_here())
def test_an_instruction_set_is_forced(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variable: the code of that set is compiled and loaded, whatever else the processor has."""
    monkeypatch.setenv(library.VARIABLE, name)
    code = "from calm_beam.native import library; print(library.instruction_set(), library.screen_target())"
    assert _printed(code, cache=tmp_path / "cache") == f"{name} calm_beam_screen_{name}"


def test_native_code_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `none`."""
    monkeypatch.setenv(library.VARIABLE, "none")
    assert _reason() == "CALM_BEAM_NATIVE is none"
    assert library.instruction_set() is None


def test_a_set_that_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is taken in its place, and what is missing is said."""
    monkeypatch.setattr(library, "_processor_features", lambda: {"sse2", "avx2", "fma"})
    monkeypatch.setenv(library.VARIABLE, "avx512_vnni")
    assert _reason() == "the processor has no avx512_vnni"


def test_a_set_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with those that there are."""
    monkeypatch.setenv(library.VARIABLE, "avx1024")
    with pytest.raises(UsageError, match="CALM_BEAM_NATIVE must be one of avx512_vnni, avx2, none; got 'avx1024'"):
        library.why_unavailable()


@_COMPILES
def test_it_is_compiled_once(tmp_path: pathlib.Path, compiler: Callable[[str], pathlib.Path]) -> None:
    """And kept for other processes."""
    calls = compiler('exec cc "$@"')
    for _ in range(2):
        assert _reason_elsewhere(tmp_path / "cache") == "None None"
        assert calls.read_text().split() == ["called"]
        assert len([path for path in (tmp_path / "cache").rglob("*") if path.is_file()]) == 1


@_COMPILES
def test_a_damaged_library_is_made_again(tmp_path: pathlib.Path) -> None:
    """Such as a full disk may have left."""
    assert _reason_elsewhere(tmp_path / "cache") == "None None"
    (library,) = (tmp_path / "cache" / "native").iterdir()
    library.write_bytes(b"")
    assert _reason_elsewhere(tmp_path / "cache") == "None None"
    assert library.stat().st_size > 0


@_COMPILES
def test_fast_arithmetic_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is told to reorder sums is told not to."""
    monkeypatch.setenv("CC", "cc -ffast-math")
    code = "import numpy as np; print(why_unavailable(), np.float32(1e-39) * np.float32(1) > 0)"
    assert _printed(code, cache=tmp_path / "cache") == "None True"


@_COMPILES
def test_threads_load_it_once(tmp_path: pathlib.Path) -> None:
    """XLA refuses a second call of the same name."""
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(3) as pool:\n"
        "    asked = [pool.submit(why_unavailable) for _ in range(3)]\n"
        "print([each.result() for each in asked])"
    )
    assert _printed(code, cache=tmp_path / "cache") == "[None, None, None]"


@_COMPILES
def test_without_a_place_to_keep_it(tmp_path: pathlib.Path) -> None:
    """It is compiled all the same."""
    (tmp_path / "file").touch()
    assert _reason_elsewhere(tmp_path / "file") == "None None"
