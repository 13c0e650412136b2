"""The files of a result appear in an order in which nothing false can be read."""

import dataclasses
import json
import pathlib

import pytest

from calm_beam.calibration import publish as publish_module
from calm_beam.calibration.publish import publish
from calm_beam.manifest import ManifestError, read_manifest
from tests.calm_beam.manifest.builders import build_manifest

_LATER = dataclasses.replace(build_manifest(), created="2026-02-01T12:00:00Z")


def _names(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_result_has_a_list_of_failures_if_there_are_any(tmp_path: pathlib.Path) -> None:
    """Failures are listed with id and reason; a result without any has no such file, also where one stood."""
    failures = [("a", "not finite"), ("é", 'too "long"')]
    path = publish(str(tmp_path), build_manifest(), (), failures)
    assert path == str(tmp_path / "manifest.json")
    assert read_manifest(path) == build_manifest()
    lines = (tmp_path / "failures.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"id": name, "reason": reason} for name, reason in failures]
    publish(str(tmp_path), _LATER, (), (), overwrite=True)
    assert _names(tmp_path) == {"manifest.json", "risk_table.csv"}
    assert read_manifest(path) == _LATER


def test_a_repeated_step_finds_its_own_manifest(tmp_path: pathlib.Path) -> None:
    """Written twice, the result is the same; the manifest of another run is neither replaced nor given its table."""
    publish(str(tmp_path), build_manifest(), (), ())
    publish(str(tmp_path), build_manifest(), (), ())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ManifestError, match="another run has written its manifest meanwhile"):
        publish(str(tmp_path), _LATER, (), [("a", "b")])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_manifest_comes_last(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the table cannot be written there is no manifest, not even the earlier one that was to be replaced."""
    publish(str(tmp_path), build_manifest(), (), ())

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(publish_module, "write_risk_table", fail)
    with pytest.raises(OSError, match="disk full"):
        publish(str(tmp_path), _LATER, (), (), overwrite=True)
    assert _names(tmp_path) == {"risk_table.csv"}
