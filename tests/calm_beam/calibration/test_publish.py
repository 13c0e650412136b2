"""The files of a result are written in an order in which no reader is misled."""

import dataclasses
import json
import pathlib

import pytest

from calm_beam import storage
from calm_beam.calibration import publish as publish_module
from calm_beam.calibration.publish import EarlierResult, publish, withdraw
from calm_beam.manifest import ManifestError, read_manifest
from tests.calm_beam.manifest.builders import build_manifest

_LATER = dataclasses.replace(build_manifest(), created="2026-02-01T12:00:00Z")


def _names(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _earlier(folder: pathlib.Path | str) -> EarlierResult:
    return EarlierResult.found_in(str(folder))


def test_a_result_has_a_list_of_failures_if_there_are_any(tmp_path: pathlib.Path) -> None:
    """Failures are listed with id and reason; without any there is no such file, even if an old one was there."""
    failures = [("a", "not finite"), ("é", 'too "long"')]
    path = publish(str(tmp_path), build_manifest(), rows=(), failures=failures, earlier=EarlierResult())
    assert path == str(tmp_path / "manifest.json")
    assert read_manifest(path) == build_manifest()
    lines = (tmp_path / "failures.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"id": name, "reason": reason} for name, reason in failures]
    publish(str(tmp_path), _LATER, rows=(), failures=(), earlier=_earlier(tmp_path))
    assert _names(tmp_path) == {"manifest.json", "risk_table.csv"}
    assert read_manifest(path) == _LATER


def test_a_report_of_another_result_is_taken_away(tmp_path: pathlib.Path) -> None:
    """A new or withdrawn result removes an earlier report; a repeated step keeps its own."""
    report = tmp_path / "report.html"
    publish(str(tmp_path), build_manifest(), rows=(), failures=(), earlier=EarlierResult())
    report.write_text("of the first", encoding="utf-8")
    publish(str(tmp_path), build_manifest(), rows=(), failures=(), earlier=EarlierResult())
    assert report.exists()
    publish(str(tmp_path), _LATER, rows=(), failures=(), earlier=_earlier(tmp_path))
    assert not report.exists()
    report.write_text("of the second", encoding="utf-8")
    withdraw(str(tmp_path), _earlier(tmp_path))
    assert _names(tmp_path) == set()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_repeated_step_publishes_once_more(tmp_path: pathlib.Path, is_replaced: bool) -> None:
    """A repeated step finds its own files, and succeeds, also if it has replaced a result."""
    if is_replaced:
        publish(str(tmp_path), _LATER, rows=(), failures=[("a", "b")], earlier=EarlierResult())
    earlier = _earlier(tmp_path)
    for _ in range(2):
        publish(str(tmp_path), build_manifest(), rows=(), failures=[("c", "d")], earlier=earlier)
    assert read_manifest(tmp_path / "manifest.json") == build_manifest()
    # Its twin, still running on a worker that was given up, finds its own files.
    for name in ("manifest.json", "risk_table.csv", "failures.jsonl"):
        (tmp_path / name).unlink()
        publish(str(tmp_path), build_manifest(), rows=(), failures=[("c", "d")], earlier=earlier)


@pytest.fixture(params=["local", "cloud"])
def output(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """An output directory, on either kind of path."""
    return str(tmp_path) if request.param == "local" else str(request.getfixturevalue("bucket")) + "/run"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_another_run_has_published_stays(output: str, is_replaced: bool) -> None:
    """A run that began before another one published changes none of its files, and names the other run."""
    if is_replaced:
        publish(output, build_manifest(), rows=(), failures=[("old", "old")], earlier=EarlierResult())
    began = _earlier(output)
    publish(output, _LATER, rows=(), failures=[("a", "b")], earlier=began)
    before = _contents(output)
    late = dataclasses.replace(build_manifest(), created="2026-03-01T12:00:00Z")
    with pytest.raises(ManifestError, match=f"another one was published there first .*{_LATER.digest}"):
        publish(output, late, rows=(), failures=(), earlier=began)
    assert _contents(output) == before
    with pytest.raises(FileExistsError, match="written by another process in the meantime"):
        withdraw(output, began)
    assert _contents(output) == before
    withdraw(output, _earlier(output))
    assert _contents(output) == {}


@pytest.mark.timeout(60)
def test_whoever_writes_the_table_publishes(output: str) -> None:
    """Of two runs that publish at the same time the first table wins; the loser writes nothing after it."""
    began = _earlier(output)
    with storage.replacing(storage.joined(output, "risk_table.csv")) as table:
        table.write_text("of another run\n")
    before = _contents(output)
    with pytest.raises(ManifestError, match="not there yet, though other files of its folder are"):
        publish(output, build_manifest(), rows=(), failures=[("a", "b")], earlier=began)
    assert _contents(output) == before


def _contents(output: str) -> dict[str, bytes]:
    contents = {}
    for path in storage.list_files(storage.joined(output, "*")):
        with storage.open_input(path) as file:
            contents[storage.base_name(path)] = file.read()
    return contents


def test_the_manifest_comes_last(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the table cannot be written there is no manifest, not even the earlier one that was to be replaced."""
    publish(str(tmp_path), build_manifest(), rows=(), failures=(), earlier=EarlierResult())

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(publish_module, "write_risk_table", fail)
    with pytest.raises(OSError, match="disk full"):
        publish(str(tmp_path), _LATER, rows=(), failures=(), earlier=_earlier(tmp_path))
    assert _names(tmp_path) == {"risk_table.csv"}
