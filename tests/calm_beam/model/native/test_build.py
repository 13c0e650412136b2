"""The build of native code: IEEE arithmetic for any CFLAGS, structures that match Python's, or a clear message."""

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from calm_beam.model.native import build, structures

_ROOT = pathlib.Path(__file__).parents[4]
_FOLDER = pathlib.Path("calm_beam", "model", "native")
_COMPILES = pytest.mark.skipif(shutil.which("cc") is None, reason="this machine has no C compiler")
# The instruction set that compiles fastest, which every processor has.
_ONE = "portable"


@pytest.fixture
def sources(tmp_path: pathlib.Path) -> pathlib.Path:
    """The sources that setup.py needs for native code."""
    for name in ("setup.py", "pyproject.toml", "README.md", "calm_beam/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(_ROOT / name, tmp_path / name)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(_ROOT / _FOLDER, tmp_path / _FOLDER, ignore=ignored)
    recipe = tmp_path / _FOLDER / "build.py"
    recipe.write_text(
        recipe.read_text().replace("return INSTRUCTION_SETS", f"return {{'{_ONE}': ()}} or INSTRUCTION_SETS")
    )
    return tmp_path


def _built(sources: pathlib.Path, **variables: str) -> str:
    """Builds as an installation does, and returns the whole output."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=sources,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _library(sources: pathlib.Path) -> pathlib.Path:
    return sources / _FOLDER / build.file_name(_ONE)


@_COMPILES
@pytest.mark.parametrize("flags", ["-ffast-math", "-Ofast -march=native -ffp-contract=fast"])
def test_arithmetic_is_ieee(sources: pathlib.Path, flags: str) -> None:
    """With any CFLAGS and LDFLAGS, sums stay in order, and loading does not flush subnormal numbers in the process."""
    said = _built(sources, CFLAGS=flags, LDFLAGS=flags)
    assert "native code: built for portable" in said
    compiled = [line.split() for line in said.splitlines() if " -c " in line and "warning" not in line]
    assert len(compiled) == len(build.sources(_ONE))
    for words in compiled:
        assert words[-len(build.compile_options(_ONE)) :] == build.compile_options(_ONE)
        assert words.index(flags.split()[0]) < words.index("-std=gnu11")
    code = (
        f"import ctypes, numpy as np; library = ctypes.CDLL({str(_library(sources))!r})\n"
        "print(np.float32(1e-39) * np.float32(1) > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "True"


@_COMPILES
def test_structures_that_differ_are_refused(sources: pathlib.Path) -> None:
    """A field with another place or size in Python is found at compile time, with a message that says where to look."""
    file = sources / _FOLDER / "structures.py"
    file.write_text(file.read_text().replace('("heads", _NUMBER)', "").replace('"scores", _NUMBER', '"scores", _FLOAT'))
    said = _built(sources)
    assert "native/structures.py differs" in said
    assert not _library(sources).exists()


def test_without_a_compiler(sources: pathlib.Path) -> None:
    """Without a compiler all but native code is built, with a message."""
    said = _built(sources, CC="no-such-compiler")
    assert "no-such-compiler" in said
    assert "native code: not built, so XLA decodes; it takes a C compiler" in said
    assert not _library(sources).exists()


def test_every_structure_is_checked() -> None:
    """The header checks each structure's size and each field's place, and every check is in a source."""
    header = build.layouts()
    text = "".join(path.read_text() for path in build.FOLDER.glob("*.c"))
    shared = [
        each for each in vars(structures).values() if isinstance(each, type) and issubclass(each, ctypes.Structure)
    ]
    assert len(shared) == 12
    for structure in shared:
        name = structure.__name__
        assert f"\nSAME_IN_PYTHON_{name}\n" in text
        assert f"sizeof({name}) == {ctypes.sizeof(structure)}" in header
        for field, *_ in structure._fields_:
            assert f"offsetof({name}, {field}) == {getattr(structure, field).offset}" in header


def test_options_of_each_instruction_set() -> None:
    """Each set is compiled for its own processor features only; options about arithmetic come last."""
    for machine, names in build.INSTRUCTION_SETS.items():
        for name, features in names.items():
            options = build.compile_options(name, machine=machine)
            asked = [option for option in options if option.startswith("-m")]
            expected = [f"-m{feature.replace('_', '')}" for feature in features]
            assert asked[len(asked) - len(expected) :] == expected
            assert options[-3:] == ["-fno-fast-math", "-fno-unsafe-math-optimizations", "-ffp-contract=off"]


def test_sources_are_all_there() -> None:
    """Every C file belongs to the code of some instruction set."""
    named = {path for names in build.INSTRUCTION_SETS.values() for name in names for path in build.sources(name)}
    assert named == set(build.FOLDER.glob("*.c"))
