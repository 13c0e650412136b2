"""The package that is built: all three floors, their data, and nothing else."""

import email
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from calm_beam import __version__
from calm_beam.manifest import read_manifest
from tests.pipelines import SHORT_FLAGS, id_rows, without_time, write_model, write_rows

_ROOT = pathlib.Path(__file__).parents[2]
_FLOORS = {"calm_beam": "calm_beam", "transforms": "calm_beam/transforms", "launch": "calm_beam/launch"}
_DATA = {
    "calm_beam/py.typed",
    "calm_beam/report/template.html",
    "calm_beam/report/report.css",
    "calm_beam/report/outputs.js",
    "calm_beam/report/drawing.js",
    "calm_beam/report/charts.js",
    "calm_beam/report/examples.js",
    "calm_beam/report/report.js",
    "calm_beam/manifest/manifest.schema.json",
    "calm_beam/demo/calibration.jsonl.gz",
    "calm_beam/demo/model/config.json",
    "calm_beam/demo/model/model.safetensors",
    "calm_beam/demo/model/sentencepiece.model",
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with an sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    # Of a copy: a build leaves files beside its sources, which the next would take for sources.
    sources = folder / "sources"
    sources.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(_ROOT / name, sources)
    for floor in _FLOORS:
        shutil.copytree(_ROOT / floor, sources / floor, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    # Without those of an enclosing run, such as a PYTHONPATH that shows another calm_beam.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: pathlib.Path) -> zipfile.ZipFile:
    """The wheel."""
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def _modules() -> set[str]:
    """Returns every module of the sources by its path in the package; those that the symlinks show only once."""
    found = set()
    for floor, place in _FLOORS.items():
        for folder, folders, names in os.walk(_ROOT / floor):
            folders[:] = [name for name in folders if (pathlib.Path(folder) / name / "__init__.py").exists()]
            folders[:] = [name for name in folders if not (pathlib.Path(folder) / name).is_symlink()]
            inside = pathlib.Path(folder).relative_to(_ROOT / floor)
            found |= {(place / inside / name).as_posix() for name in names if name.endswith(".py")}
    return found


def test_the_wheel_holds_every_module_once(wheel: zipfile.ZipFile) -> None:
    """The wheel has every module of the three floors, the data, and beside its own records nothing else."""
    names = [name for name in wheel.namelist() if not name.startswith(f"calm_beam-{__version__}.dist-info/")]
    assert len(names) == len(set(names))
    assert {"calm_beam/launch/cli.py", "calm_beam/transforms/decode.py"} <= _modules()
    assert set(names) == _modules() | _DATA


def test_data_are_whole(wheel: zipfile.ZipFile) -> None:
    """Data files arrive as they are in the sources."""
    for name in _DATA:
        assert wheel.read(name) == (_ROOT / name).read_bytes()


def test_what_the_wheel_says_of_itself(wheel: zipfile.ZipFile) -> None:
    """The wheel has the version of the sources, the extras, and the command."""
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


@pytest.mark.slow
def test_the_wheel_calibrates_from_anywhere(wheel: zipfile.ZipFile, tmp_path: pathlib.Path) -> None:
    """Far from the sources, the wheel's calm_beam calibrates to the same table and manifest as that of the sources."""
    model = write_model(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", id_rows(12))
    (tmp_path / "elsewhere").mkdir()
    wheel.extractall(tmp_path / "installed")
    code = "import sys, calm_beam.launch.cli as cli; print(cli.__file__); sys.exit(cli.main())"
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
