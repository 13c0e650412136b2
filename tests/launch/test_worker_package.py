"""How workers on other machines get calm_beam."""

import io
import pathlib
import re
import tarfile
import zipfile
from collections.abc import Sequence

import pytest
from apache_beam.options.pipeline_options import PipelineOptions, SetupOptions

import calm_beam
from calm_beam.launch.flags import UsageError
from calm_beam.launch.runners.dataflow import choose_package

_ROOT = pathlib.Path(__file__).parents[2]
_WHEEL = ("calm_beam/__init__.py", "calm_beam/transforms/__init__.py", "calm_beam/launch/__init__.py")
_SDIST = ("calm_beam-1/calm_beam/__init__.py", "calm_beam-1/transforms/__init__.py", "calm_beam-1/launch/__init__.py")


def _choose(*flags: str, needs_image: bool = False) -> SetupOptions:
    options = PipelineOptions(list(flags))
    choose_package(options, needs_image=needs_image)
    return options.view_as(SetupOptions)


def _write_wheel(path: pathlib.Path, names: Sequence[str]) -> pathlib.Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def _write_sdist(path: pathlib.Path, names: Sequence[str]) -> pathlib.Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return path


def test_an_image_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """With an image nothing is staged, since it has calm_beam."""
    setup = _choose("--sdk_container_image=image", needs_image=True)
    assert (setup.setup_file, setup.extra_packages) == (None, None)
    assert capsys.readouterr().err == ""


def test_the_sources_are_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    """From its sources, workers without an image install calm_beam from them, and the user is told."""
    assert _choose().setup_file == str(_ROOT / "setup.py")
    assert f"every worker will install calm-beam from the sources next to {_ROOT}/setup.py" in capsys.readouterr().err


def test_without_sources_nothing_is_guessed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed from a wheel there are no sources to stage, and the three ways are named."""
    monkeypatch.setattr(calm_beam, "__file__", str(tmp_path / "site-packages" / "calm_beam" / "__init__.py"))
    with pytest.raises(UsageError, match=r"^workers have no calm-beam: pass --sdk_container_image.*--extra_package"):
        _choose()


def test_setup_file_becomes_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is resolved: Beam changes to its folder before it reads the file by that path."""
    monkeypatch.chdir(_ROOT.parent)
    assert _choose(f"--setup_file={_ROOT.name}/setup.py").setup_file == str(_ROOT / "setup.py")


def test_setup_file_of_another_package(tmp_path: pathlib.Path) -> None:
    """Another package's setup.py without calm_beam is refused; with an image that has it, it is accepted."""
    (tmp_path / "setup.py").touch()
    with pytest.raises(UsageError, match=re.escape(f"--setup_file {tmp_path}/setup.py: is not that of calm-beam")):
        _choose(f"--setup_file={tmp_path}/setup.py")
    assert _choose(f"--setup_file={tmp_path}/setup.py", "--sdk_container_image=image").setup_file
    with pytest.raises(UsageError, match=r"--setup_file nowhere/setup.py: no such file"):
        _choose("--setup_file=nowhere/setup.py")


def test_a_wheel_or_sdist_is_enough(tmp_path: pathlib.Path) -> None:
    """A package that holds all three floors is staged as it is, and the sources are not."""
    wheel = _write_wheel(tmp_path / "calm_beam-1.whl", _WHEEL)
    sdist = _write_sdist(tmp_path / "calm_beam-1.tar.gz", _SDIST)
    other = _write_sdist(tmp_path / "metrics-1.tar.gz", ["metrics-1/metrics.py"])
    for package in (wheel, sdist):
        setup = _choose(f"--extra_package={other}", f"--extra_package={package}")
        assert setup.setup_file is None
        assert setup.extra_packages == [str(other), str(package)]
    assert _choose("--extra_package=gs://bucket/calm_beam-1.tar.gz").setup_file is None


@pytest.mark.parametrize("missing", range(3))
def test_a_package_without_a_floor_is_not(tmp_path: pathlib.Path, missing: int) -> None:
    """If a staged package lacks a floor, or is not ours, the sources are staged as well."""
    wheel = _write_wheel(tmp_path / "calm_beam-1.whl", _WHEEL[:missing] + _WHEEL[missing + 1 :])
    sdist = _write_sdist(tmp_path / "calm_beam-1.tar.gz", _SDIST[:missing] + _SDIST[missing + 1 :])
    (tmp_path / "text.tar.gz").write_text("no archive")
    for package in (wheel, sdist, tmp_path / "text.tar.gz"):
        assert _choose(f"--extra_package={package}").setup_file == str(_ROOT / "setup.py")


def test_packages_must_exist() -> None:
    """A package that is not there is refused by name, with or without an image."""
    for image in ((), ("--sdk_container_image=image",)):
        with pytest.raises(UsageError, match=r"--extra_package nowhere\.whl: no such file"):
            _choose("--extra_package=nowhere.whl", *image)
