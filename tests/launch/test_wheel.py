"""The built packages hold all three floors, their data, and nothing else; calm-beam-serving holds a part of them."""

import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

from calm_beam import __version__
from calm_beam.checkpoints import load_checkpoint
from calm_beam.manifest import read_manifest, write_manifest
from calm_beam.model.native import build
from calm_beam.serving import Generator
from tests.calm_beam.serving.builders import build_served_manifest
from tests.pipelines import SHORT_FLAGS, id_rows, without_time, write_model, write_rows
from tests.setup_file import read_setup

_ROOT = pathlib.Path(__file__).parents[2]
_FLOORS = {"calm_beam": "calm_beam", "transforms": "calm_beam/transforms", "launch": "calm_beam/launch"}
_NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.so")
_NATIVE = (
    {f"calm_beam/model/native/{build.file_name(name)}" for name in build.instruction_sets()}
    if shutil.which("cc")
    else set()
)
_DATA = {
    "calm_beam/__init__.pyi",
    "calm_beam/py.typed",
    "calm_beam/report/frame.html",
    "calm_beam/report/template.html",
    "calm_beam/report/theme.js",
    "calm_beam/report/tables.js",
    "calm_beam/report/notebook.css",
    "calm_beam/report/report.css",
    "calm_beam/report/outputs.js",
    "calm_beam/report/drawing.js",
    "calm_beam/report/charts.js",
    "calm_beam/report/examples.js",
    "calm_beam/report/report.js",
    "calm_beam/manifest/manifest.schema.json",
    "calm_beam/inputs/demo/calibration.jsonl.gz",
    "calm_beam/inputs/demo/model/config.json",
    "calm_beam/inputs/demo/model/model.safetensors",
    "calm_beam/inputs/demo/model/sentencepiece.model",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with an sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    # Build a copy, since a build leaves files next to its sources, which the next would take for sources.
    sources = folder / "sources"
    sources.mkdir()
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(_ROOT / name, sources)
    for floor in _FLOORS:
        shutil.copytree(_ROOT / floor, sources / floor, symlinks=True, ignore=_NOT_SOURCES)
    _build(sources, folder)
    return folder


def _build(sources: pathlib.Path, folder: pathlib.Path, *flags: str, **variables: str) -> None:
    # Remove variables of an enclosing run, such as a PYTHONPATH with another calm_beam.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    command = [sys.executable, "-m", "build", "--no-isolation", *flags, "--outdir", str(folder), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(built: pathlib.Path) -> zipfile.ZipFile:
    """The wheel."""
    (path,) = built.glob("calm_beam-*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def serving_wheel(built: pathlib.Path) -> zipfile.ZipFile:
    """The wheel of calm-beam-serving, built from sources in which the other build left its files."""
    _build(built / "sources", built, "--wheel", CALM_BEAM_DISTRIBUTION="calm-beam-serving")
    (path,) = built.glob("calm_beam_serving-*.whl")
    return zipfile.ZipFile(path)


def _modules() -> set[str]:
    """Returns every module of the sources by its path in the package, without those that only symlinks show."""
    found = set()
    for floor, place in _FLOORS.items():
        for folder, folders, names in os.walk(_ROOT / floor):
            folders[:] = [name for name in folders if (pathlib.Path(folder) / name / "__init__.py").exists()]
            folders[:] = [name for name in folders if not (pathlib.Path(folder) / name).is_symlink()]
            inside = pathlib.Path(folder).relative_to(_ROOT / floor)
            found |= {(place / inside / name).as_posix() for name in names if name.endswith(".py")}
    return found


def test_the_wheel_holds_every_module_once(wheel: zipfile.ZipFile) -> None:
    """The wheel has every module of the three floors once, the data, and its own records."""
    names = [name for name in wheel.namelist() if not name.startswith(f"calm_beam-{__version__}.dist-info/")]
    assert len(names) == len(set(names))
    assert {"calm_beam/launch/cli.py", "calm_beam/transforms/decode.py"} <= _modules()
    assert set(names) == _modules() | _DATA | _NATIVE


def test_data_are_whole(wheel: zipfile.ZipFile) -> None:
    """Data files are equal to those of the sources."""
    for name in _DATA:
        assert wheel.read(name) == (_ROOT / name).read_bytes()


def test_what_the_wheel_says_of_itself(wheel: zipfile.ZipFile) -> None:
    """The wheel's metadata have the version of the sources, the extras, and the command."""
    records = f"calm_beam-{__version__}.dist-info"
    metadata = email.message_from_bytes(wheel.read(f"{records}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("calm-beam", __version__)
    assert {"dataflow", "dev", "gcp", "plots"} <= set(metadata.get_all("Provides-Extra", []))
    assert b"calm-beam = calm_beam.launch.cli:entry_point" in wheel.read(f"{records}/entry_points.txt")
    assert f"{records}/licenses/LICENSE" in wheel.namelist()


def test_the_sdist_holds_the_floors(built: pathlib.Path) -> None:
    """The sdist, which Dataflow's workers may install, has the folders that setup.py names, and no tests."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "launch/cli.py", "transforms/decode.py", "calm_beam/__init__.py"} <= names
    assert not {name for name in names if name.startswith(("tests", "benchmarks", "calm_beam/launch"))}
    assert {f"calm_beam/model/native/{path.name}" for path in build.FOLDER.glob("*.[ch]")} <= names
    assert not {name for name in names if name.endswith(".so")}


def test_one_wheel_is_for_every_python(built: pathlib.Path, serving_wheel: zipfile.ZipFile) -> None:
    """Both wheels are for every Python, and for this machine only if they hold native code."""
    platform = sysconfig.get_platform().replace("-", "_") if _NATIVE else "any"
    names = {path.name for path in built.glob("*.whl")}
    assert names == {f"{name}-{__version__}-py3-none-{platform}.whl" for name in ("calm_beam", "calm_beam_serving")}


def test_without_a_compiler_a_wheel_is_for_every_machine(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A wheel built without a compiler has all but native code, and decodes by XLA, as workers that build an sdist."""
    (sdist,) = built.glob("*.tar.gz")
    # Python 3.11.2 has no filters of members yet, and later versions ask for one.
    subprocess.run([sys.executable, "-m", "tarfile", "-e", sdist, tmp_path], check=True, capture_output=True)
    (sources,) = tmp_path.iterdir()
    _build(sources, tmp_path / "dist", "--wheel", CC="no-such-compiler")
    (path,) = (tmp_path / "dist").glob("*.whl")
    assert path.name == f"calm_beam-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.startswith(f"calm_beam-{__version__}.dist-info/")}
        wheel.extractall(tmp_path / "installed")
    assert names == _modules() | _DATA
    code = "from calm_beam.decoding.engine_choice import Machine; print(Machine.here().lacks)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert done.stdout.startswith("it is not built in, for want of a C compiler")


def test_the_wheel_calibrates_from_anywhere(wheel: zipfile.ZipFile, tmp_path: pathlib.Path) -> None:
    """Outside the sources, the wheel's calm_beam calibrates to the same table and manifest as the sources."""
    model = write_model(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", id_rows(12))
    (tmp_path / "elsewhere").mkdir()
    wheel.extractall(tmp_path / "installed")
    # Hide the finder of an editable installation, which would find in the sources what the wheel lacks.
    code = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import calm_beam.launch.cli as cli; print(cli.__file__); sys.exit(cli.main())"""
    manifests = []
    for place in (tmp_path / "installed", _ROOT):
        output = tmp_path / f"out-{place.name}"
        flags = [f"--checkpoint={model}", f"--data={data}", f"--output={output}", "--metric=token_f1", *SHORT_FLAGS]
        done = subprocess.run(
            [sys.executable, "-c", code, "calibrate", *flags],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(place)},
            cwd=tmp_path / "elsewhere",
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(str(place))
        manifests.append(
            (without_time(read_manifest(output / "manifest.json")), (output / "risk_table.csv").read_bytes())
        )
    assert manifests[0] == manifests[1]


_SERVING_RECORDS = f"calm_beam_serving-{__version__}.dist-info"
# Each of these must be required by another package than calm-beam-serving, or by none.
_NOT_REQUIRED = ("apache-beam", "pyarrow", "optax", "rouge-score", "google-cloud-storage", "fastapi")


def test_the_serving_wheel_is_a_part_of_the_whole(wheel: zipfile.ZipFile, serving_wheel: zipfile.ZipFile) -> None:
    """The serving wheel's files are the full wheel's: all that serve, none that calibrate or train."""
    names = {name for name in serving_wheel.namelist() if not name.startswith(_SERVING_RECORDS)}
    assert {name: serving_wheel.read(name) for name in names} == {name: wheel.read(name) for name in names}
    folders = {name.split("/")[1] for name in names if name.count("/") > 1}
    assert {"serving", "manifest", "decoding", "launch"} <= folders
    assert not folders & {"transforms", "training", "calibration", "analysis", "demo"}
    assert {
        "calm_beam/manifest/manifest.schema.json",
        *_NATIVE,
    } <= names
    assert "calm_beam/py.typed" in names


def test_what_the_serving_wheel_requires(serving_wheel: zipfile.ZipFile) -> None:
    """The serving wheel has its own name and the command, and requires neither Beam nor packages for calibration."""
    metadata = email.message_from_bytes(serving_wheel.read(f"{_SERVING_RECORDS}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("calm-beam-serving", __version__)
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert any(re.match(r"jax\b", line) for line in required)
    assert [line for line in required if line.startswith(_NOT_REQUIRED)] == []
    assert set(metadata.get_all("Provides-Extra", [])) == {"bleurt", "gcp", "metrics", "serve", "tokenizers"}
    assert b"calm-beam = calm_beam.launch.cli:entry_point" in serving_wheel.read(f"{_SERVING_RECORDS}/entry_points.txt")


_SERVE = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("apache_beam", "pyarrow", "rouge_score"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

# The finder of an editable installation would find in the sources what the wheel lacks.
sys.meta_path[:] = [Missing(), *(finder for finder in sys.meta_path if "editable" not in repr(finder).lower())]
from calm_beam.launch import cli
assert cli.__file__.startswith(sys.argv[1]), cli.__file__
manifest, model, losses = (f"--{name}={path}" for name, path in zip(("manifest", "checkpoint", "losses"), sys.argv[2:]))
usage = cli._usage()
listed = [name for name in cli.COMMANDS if f"\\n  {name} " in usage]
print(*listed, *(f"-{name}" for name in cli.COMMANDS if name in usage.partition("Not in ")[2]))
for name in listed:
    cli.command_module(name).flag_parsers()
print(cli.main(["generate", manifest, model, f"--input={sys.argv[5]}"]))
print(cli.main(["inspect", sys.argv[2]]), cli.main(["monitor", manifest, losses]), cli.main(["calibrate"]))
"""


def test_the_serving_wheel_serves(serving_wheel: zipfile.ZipFile, tmp_path: pathlib.Path) -> None:
    """Without Beam and packages for calibration, the serving wheel answers, inspects, monitors, and lists just that."""
    serving_wheel.extractall(tmp_path / "installed")
    model = write_model(tmp_path / "model")
    manifest = build_served_manifest(load_checkpoint(model))
    write_manifest(manifest, tmp_path / "manifest.json")
    rows = write_rows(tmp_path / "rows.jsonl", id_rows(3))
    (tmp_path / "losses").write_text("0\n0.5\n")
    paths = [str(tmp_path / name) for name in ("installed", "manifest.json", "model", "losses")]
    done = subprocess.run(
        [sys.executable, "-c", _SERVE, *paths, str(rows)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths[0]},
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    answers = Generator.from_manifest(manifest, model).generate_batch([row["input_ids"] for row in id_rows(3)])
    listed, *lines = done.stdout.splitlines()
    # Help lists what is there, and names what only calm-beam has.
    assert {"generate", "inspect", "monitor", "serve", "-calibrate", "-verify"} <= set(listed.split())
    assert lines[:4] == [*(answer.text for answer in answers), "0"], done.stderr
    assert lines[-1] == "0 0 1"
    assert "calm-beam calibrate: there is no calm_beam.launch.calibrate here." in done.stderr


@pytest.mark.parametrize(
    ("name", "command", "message"),
    [
        ("calm-beam-serving", "sdist", "of calm-beam-serving, wheels are built only: python -m build --wheel"),
        ("serving", "bdist_wheel", "CALM_BEAM_DISTRIBUTION must be calm-beam or calm-beam-serving, got 'serving'."),
    ],
)
def test_what_is_not_built(monkeypatch: pytest.MonkeyPatch, name: str, command: str, message: str) -> None:
    """An sdist of calm-beam-serving, and packages of other names, are refused: an sdist would not know which it is."""
    monkeypatch.setenv("CALM_BEAM_DISTRIBUTION", name)
    monkeypatch.setattr(sys, "argv", ["setup.py", command])
    with pytest.raises(SystemExit, match=re.escape(message)):
        read_setup()
