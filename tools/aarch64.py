"""Compiles the native code for aarch64 and runs its tests on this machine, in an emulated Python.

    python -m tools.aarch64 --output=build/aarch64
    python -m tools.aarch64 --output=build/aarch64 tests/calm_beam/model/test_native_decoder.py -k skipped   # pytest's

It needs a cross compiler and an emulator (`apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user`), and
from Debian's archive the packages of a Python for arm64 (`dpkg --add-architecture arm64; apt-get update`). If something
is missing, it prints what, and tests nothing. JAX and the tests' other imports are fetched as wheels for aarch64. XLA
compiles under emulation, too: a test that compares with XLA takes minutes.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import jax

from calm_beam.model.native import build

_COMPILER, _EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_NEEDED = (_COMPILER, _EMULATOR, "apt-get", "dpkg")
_SET = "neon"
_ROOT = pathlib.Path(__file__).parents[1]
# Debian's Python of this interpreter's version, with the libraries that it and the wheels load.
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_PACKAGES = (
    *(_PYTHON, f"{_PYTHON}-minimal", f"lib{_PYTHON}-minimal", f"lib{_PYTHON}-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "libgomp1", "zlib1g", "libexpat1", "libssl3", "libffi8"),
    *("liblzma5", "libbz2-1.0", "libuuid1", "libsqlite3-0"),
)
_WHEELS = (
    *("flax", "jinja2", "ml_dtypes", "msgpack", "numpy", "packaging", "protobuf", "rich", "safetensors"),
    *("sentencepiece", "tensorstore", "tokenizers", "hypothesis", "pytest", "pytest-timeout"),
)
_TESTS = ("tests/calm_beam/model/native/test_heads.py", "tests/calm_beam/model/native/test_measures.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, provides a Python, and tests; returns pytest's status, or 0 if something is missing."""
    parser = argparse.ArgumentParser(prog="python -m tools.aarch64", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder of the emulated Python, kept")
    flags, tests = parser.parse_known_args(argv)
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        print(f"not tested: there is no {', '.join(missing)}")
        return 0
    output = flags.output.resolve()
    root, site = output / "root", output / "site"
    try:
        _provide_python(root)
        _provide_wheels(site)
    except subprocess.CalledProcessError as error:
        print(
            f"not tested: {' '.join(map(str, error.cmd[:2]))} failed; the first lines of {__file__} say what it takes"
        )
        return 0
    library = build.FOLDER / build.file_name(_SET)
    compile_library(library)
    try:
        return _tested(root, site, tests or _TESTS)
    finally:
        library.unlink()


def compile_library(path: pathlib.Path) -> None:
    """Compiles native code for aarch64, as setup.py does on such a machine."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, build.LAYOUTS).write_text(build.layouts(), encoding="utf-8")
        options = build.compile_options(_SET, machine="aarch64")
        command = [_COMPILER, f"-I{folder}", f"-I{jax.ffi.include_dir()}", *options, "-shared"]
        sources = map(str, build.sources(_SET))
        subprocess.run([*command, *sources, "-o", str(path), *build.link_options()], check=True)


def _provide_python(root: pathlib.Path) -> None:
    if (root / "usr" / "bin" / _PYTHON).exists():
        return
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", *(f"{name}:arm64" for name in _PACKAGES)], cwd=folder, check=True)
        for package in pathlib.Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)


def _provide_wheels(site: pathlib.Path) -> None:
    if site.exists():
        return
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    install = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--only-binary=:all:"]
    place = [f"--target={site}", f"--python-version={version}", "--python-platform=aarch64-manylinux_2_28"]
    subprocess.run([*install, *place, f"jax=={jax.__version__}", *_WHEELS], check=True)


def _tested(root: pathlib.Path, site: pathlib.Path, tests: Sequence[str]) -> int:
    python = [_EMULATOR, "-L", str(root), str(root / "usr" / "bin" / _PYTHON)]
    environment = {**os.environ, "CALM_BEAM_NATIVE": _SET, "PYTHONPATH": f"{_ROOT}{os.pathsep}{site}"}
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "--timeout=0", *tests]
    return subprocess.run([*python, *pytest], cwd=_ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
