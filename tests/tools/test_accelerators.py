"""The folder of compilers: the requested versions, and the message if they cannot be installed."""

import importlib.metadata
import pathlib
import sys

import pytest

from benchmarks.device_times import table
from tests.setup_file import read_setup
from tools.accelerators import __main__ as command
from tools.accelerators import packages
from tools.accelerators.packages import MissingPackagesError, asked_for, installed

_ROOT = pathlib.Path(__file__).parents[2]
_ASKED = ("numpy>=2", 'libtpu==0.0.42.*; extra == "tpu"', 'jax-cuda12-plugin[with-cuda]<=9,>=9; extra == "cuda12"')


def test_versions_are_those_of_the_installed_jax() -> None:
    """Each compiler is requested in the version of JAX's metadata, without extras; nothing is pinned here."""
    wanted = {"libtpu": "tpu", "jax-cuda12-plugin": "cuda12"}
    assert asked_for(_ASKED, wanted) == ["libtpu==0.0.42.*", "jax-cuda12-plugin<=9,>=9"]
    libtpu, plugin = asked_for(importlib.metadata.requires("jax") or [], wanted)
    assert libtpu.startswith("libtpu==")
    assert importlib.metadata.version("jax") in plugin
    with pytest.raises(MissingPackagesError, match="do not say which version of libtpu they need"):
        asked_for(["numpy"], {"libtpu": "tpu"})


def test_no_compiler_is_a_dependency() -> None:
    """No requirement or extra of calm-beam names a compiler: their licences are not its users' concern."""
    setup = read_setup()
    every = [*setup["install_requires"], *(name for extra in setup["extras_require"].values() for name in extra)]
    assert len(every) > 20
    assert [name for name in every if name.startswith(("libtpu", "jax-cuda", "jax[", "nvidia"))] == []


def test_what_cannot_be_installed_is_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compilers that cannot be installed are reported, nothing is checked, and that is no failure."""
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho 'ERROR: no index here' >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(MissingPackagesError, match=r"pip could not install libtpu==.*: ERROR: no index here"):
        installed(tmp_path / "folder", requirements=_ASKED)
    assert command.main([f"--folder={tmp_path / 'folder'}"]) == 0
    assert "skipped, and nothing checked: pip could not install" in capsys.readouterr().out


def test_what_is_installed_is_not_installed_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed compilers are kept until JAX asks for others."""
    asked: list[list[str]] = []

    class _Plugin:
        requires = ("jax-cuda12-pjrt==9", 'nvidia-cuda-nvcc-cu12>=12; extra == "with-cuda"')

    monkeypatch.setattr(packages, "_install", lambda _, requirements: asked.append(requirements))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [_Plugin()])
    for _ in range(2):
        assert installed(tmp_path, requirements=_ASKED) == tmp_path
    assert asked == [
        ["libtpu==0.0.42.*", "jax-cuda12-plugin<=9,>=9"],
        ["jax-cuda12-pjrt==9", "nvidia-cuda-nvcc-cu12>=12"],
    ]
    installed(tmp_path, requirements=(*_ASKED[:1], _ASKED[1].replace("42", "43"), *_ASKED[2:]))
    assert len(asked) == 4


def test_the_pages_forecast_is_todays() -> None:
    """The table of docs/accelerators.md is the output of `benchmarks.device_times`."""
    page = (_ROOT / "docs" / "accelerators.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page
