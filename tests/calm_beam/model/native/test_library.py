"""Native code: the best built-in code that the processor supports is loaded; a missing one is reported."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Collection

import jax
import pytest

from calm_beam.errors import UsageError
from calm_beam.model.native import build, library
from tests.instruction_sets import AVAILABLE

_LOADS = pytest.mark.skipif(not AVAILABLE, reason="this machine has no native code")
_AVX2, _VNNI = set(build.instruction_sets("x86_64")["avx2"]), set(build.instruction_sets("x86_64")["avx512_vnni"])


def _reason() -> str | None:
    """Returns the reason for missing native code, without caching it."""
    return library._opened.__wrapped__(os.environ.get(library.VARIABLE, ""))[1]


def _has(
    monkeypatch: pytest.MonkeyPatch, *, features: Collection[str], built: Collection[str], machine: str = "x86_64"
) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "instruction_sets", lambda: build.instruction_sets(machine))
    monkeypatch.setattr(library, "_processor_features", lambda: set(features))
    monkeypatch.setattr(library, "_is_built", lambda name: name in built)


_BUILT = ("avx512_vnni", "avx2", "portable")


@pytest.mark.parametrize(
    ("features", "built", "expected"),
    [
        (_AVX2 | _VNNI | {"amx_int8"}, _BUILT, ("avx512_vnni", "avx2", "portable")),
        (_AVX2 | {"avx512f", "avx_vnni"}, _BUILT, ("avx2", "portable")),
        (_AVX2 | _VNNI, ("portable", "avx2"), ("avx2", "portable")),
        ({"sse2", "fma"}, _BUILT, ("portable",)),
        ({"sse2", "fma"}, ("avx2",), ()),
    ],
)
def test_the_best_that_is_built_in_comes_first(
    features: set[str], built: tuple[str, ...], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best built-in set that the processor supports comes first."""
    _has(monkeypatch, features=features, built=built)
    assert library.instruction_sets_here() == expected


@pytest.mark.parametrize(
    ("wanted", "features", "built", "machine", "reason"),
    [
        (
            "",
            _AVX2,
            (),
            "x86_64",
            "it is not built in, for want of a C compiler that worked when calm-beam was installed",
        ),
        ("", {"fma"}, ("avx2",), "x86_64", "the processor has neither AVX-512 VNNI nor AVX2"),
        (
            "",
            {"fma"},
            _BUILT,
            "x86_64",
            "the processor has neither AVX-512 VNNI nor AVX2 (CALM_BEAM_NATIVE=portable",
        ),
        ("", (), ("neon",), "aarch64", "the processor has neither AVX-512 VNNI nor AVX2 (CALM_BEAM_NATIVE=neon takes"),
        ("avx2", {"fma"}, _BUILT, "x86_64", "the processor has no avx2"),
        ("avx512_vnni", _AVX2, _BUILT, "x86_64", "the processor has no avx512_vnni"),
        ("avx2", _AVX2, ("portable",), "x86_64", "that for avx2 is not built in, but that for portable"),
        ("", (), (), "riscv64", "there is no code for such a machine"),
        ("none", _AVX2, _BUILT, "x86_64", "CALM_BEAM_NATIVE is none"),
    ],
)
def test_what_is_missing_is_said(
    wanted: str, features: set[str], built: tuple[str, ...], machine: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing set is reported, and no other replaces it."""
    _has(monkeypatch, features=features, built=built, machine=machine)
    monkeypatch.setenv(library.VARIABLE, wanted)
    said = _reason()
    assert said is not None
    assert said.startswith(reason)


def test_a_set_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown set is refused with the known ones."""
    _has(monkeypatch, features=(), built=())
    monkeypatch.setenv(library.VARIABLE, "avx1024")
    message = "CALM_BEAM_NATIVE must be one of avx512_vnni, avx2, portable, none; got 'avx1024'"
    with pytest.raises(UsageError, match=message):
        library.why_unavailable()


def test_a_library_that_is_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that cannot be loaded is not used, and the loader's reason is passed on."""
    (tmp_path / build.file_name("avx2")).write_text("nonsense")
    _has(monkeypatch, features=_AVX2, built=("avx2",))
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    reason = _reason()
    assert reason is not None
    assert "invalid ELF header" in reason or "file too short" in reason


@_LOADS
def test_a_library_of_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library built from other sources is not called, since its structures may differ."""
    monkeypatch.setenv(library.VARIABLE, AVAILABLE[0])
    assert _reason() is None
    monkeypatch.setattr(library, "layouts_name", lambda: "of other structures")
    reason = _reason()
    assert (
        reason == f"{build.FOLDER / build.file_name(AVAILABLE[0])} was built of other sources; install calm-beam again"
    )


@_LOADS
def test_code_that_xla_refuses_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that XLA refuses, such as that of another interface version, is not used."""

    def refuse(*arguments: object, **options: object) -> None:
        raise jax.errors.JaxRuntimeError("the handler's API version (0.9) is incompatible")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    name = next(name for name in build.instruction_sets() if name in build.TUNED)
    if name not in AVAILABLE:
        pytest.skip(f"this machine has no {name}")
    library_of, reason = library._searched.__wrapped__(name)
    assert library_of is None
    assert reason == "it is for another version of JAX (the handler's API version (0.9) is incompatible)"


def _printed(code: str) -> str:
    """Returns the output of a process."""
    command = [sys.executable, "-c", f"from calm_beam.model.native import library\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


@_LOADS
@pytest.mark.parametrize("name", AVAILABLE)
def test_an_instruction_set_is_forced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable forces an instruction set, whatever else the processor supports."""
    monkeypatch.setenv(library.VARIABLE, name)
    code = (
        "print(library.why_unavailable(), library.instruction_set(), library.loaded()._name.rpartition('/')[2])\n"
        f"if {name in build.TUNED}: print(library.screen_target())"
    )
    target = f"\ncalm_beam_screen_{name}" if name in build.TUNED else ""
    assert _printed(code) == f"None {name} {build.file_name(name)}{target}"


def test_native_code_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value `none` switches native code off."""
    monkeypatch.setenv(library.VARIABLE, "none")
    assert library.why_unavailable() == "CALM_BEAM_NATIVE is none"
    assert library.instruction_set() is None


@_LOADS
def test_threads_load_it_once() -> None:
    """Many threads load it once, since XLA refuses a second registration."""
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(3) as pool:\n"
        "    asked = [pool.submit(library.why_unavailable) for _ in range(3)]\n"
        "print([each.result() for each in asked])"
    )
    assert _printed(code) == "[None, None, None]"


@_LOADS
def test_neither_a_compiler_nor_a_cache_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading runs no compiler and writes no cache: the code is in the package."""
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("CALM_BEAM_CACHE", "/nowhere/at/all")
    code = (
        "import subprocess\n"
        "subprocess.Popen = None\n"
        "path = library.FOLDER / f'{library.instruction_set()}.code.so'\n"
        "print(library.why_unavailable(), library.loaded()._name == str(path))"
    )
    assert _printed(code) == "None True"


@pytest.mark.parametrize(("features", "taken"), [(_AVX2 | _VNNI, "avx512_vnni"), (_AVX2, "avx2"), ({"fma"}, None)])
def test_portable_code_is_taken_on_request_alone(
    features: set[str], taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portable code, which was slower than XLA, is used only on request; tuned code is used by default."""
    _has(monkeypatch, features=features, built=_BUILT)
    assert library._taken("") == taken
    assert library._taken("portable") == "portable"
