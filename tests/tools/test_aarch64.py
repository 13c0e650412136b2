"""Native code for aarch64 is cross-compiled if there is a compiler, and run if there is an emulator."""

import pathlib
import shutil
import struct

import pytest

from calm_beam.model.native import build
from tools import aarch64


def test_what_is_missing_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing compiler is reported, and is no failure."""
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "qemu-aarch64" else f"/usr/bin/{name}")
    assert aarch64.main([f"--output={tmp_path}"]) == 0
    assert capsys.readouterr().out == "not tested: there is no qemu-aarch64\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs gcc-aarch64-linux-gnu")
def test_it_compiles_for_aarch64(tmp_path: pathlib.Path) -> None:
    """All native code compiles for aarch64, with Python's structures and fused multiply-adds."""
    path = tmp_path / build.file_name("neon")
    aarch64.compile_library(path)
    machine = struct.unpack_from("<H", path.read_bytes(), 18)[0]
    assert machine == 183
    assert [path.name for path in build.sources("neon")] == [path.name for path in build.sources("portable")]
