"""Stored files of one run are read, and others are refused."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest

from calm_beam.manifest import Manifest, ManifestError
from calm_beam.outputs import DecodeJob, OutputsError
from calm_beam.report import ReportError, StoredOutputs, read_calibrated, read_speedups
from tests.calm_beam.manifest.builders import build_manifest
from tests.calm_beam.report.builders import GRID, SPECS, random_generations, write_calibration

_RULE = {
    "confidence": "softmax",
    "schedule": "decay",
    "tau": 4.0,
    "state_propagation": "from_exit",
    "token_from": "exit_layer",
    "min_exit_layer": 1,
    "exit_interval": 1,
}
_ROWS = "measure,threshold,speedup\nfast,0.8,1.75\nfast,0.5,2.5\nslow,0.8,1.1\nfast,,\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A calibration of thirty examples, one of which failed."""
    generations = random_generations(30)
    generations[4] = dataclasses.replace(generations[4], outputs=(), failure="broken")
    return write_calibration(tmp_path_factory.mktemp("stored") / "out", generations)


def _stored(folder: pathlib.Path, other: pathlib.Path | None = None) -> StoredOutputs:
    (generations,) = (other or folder).glob("generations/*")
    return StoredOutputs.read(str(generations), read_calibrated(str(folder)).manifest)


def test_a_calibration_comes_back(folder: pathlib.Path) -> None:
    """Each entry has its lines of the risk table, and failures have their reasons."""
    calibrated = read_calibrated(str(folder))
    assert calibrated.thresholds == GRID
    assert [{row.delta for row in rows} for rows in calibrated.table] == [{spec.delta} for spec in SPECS]
    assert calibrated.failures == (("row-4", "broken"),)


def test_a_table_of_another_run_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A risk table that contradicts a tested threshold, lacks lines, or is invalid is named."""
    table = (folder / "risk_table.csv").read_text(encoding="utf-8")
    (tmp_path / "manifest.json").write_bytes((folder / "manifest.json").read_bytes())
    lines = table.splitlines(keepends=True)
    for content in (table.replace(",true,true,", ",true,false,", 1), "".join(lines[:-1])):
        (tmp_path / "risk_table.csv").write_text(content, encoding="utf-8")
        with pytest.raises(ReportError, match=re.escape("risk_table.csv: is not the risk table of the manifest")):
            read_calibrated(str(tmp_path))
    (tmp_path / "risk_table.csv").write_text(lines[0] + "textual,half a line\n", encoding="utf-8")
    with pytest.raises(ReportError, match=r"risk_table\.csv, line 2: is not a row of a risk table"):
        read_calibrated(str(tmp_path))
    (tmp_path / "risk_table.csv").unlink()
    with pytest.raises(FileNotFoundError):
        read_calibrated(str(tmp_path))


def test_a_changed_manifest_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A manifest that was edited is refused."""
    content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    content["calibrations"][0]["risk"] = 0.0001
    (tmp_path / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ManifestError, match="changed after it was written"):
        read_calibrated(str(tmp_path))


def test_other_generations_are_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Generations of another model, of other settings, of fewer examples, or of other examples are named."""
    generations = random_generations(30)
    generations[4] = dataclasses.replace(generations[4], outputs=(), failure="broken")
    others = {
        "model is sha256:00 there": write_calibration(tmp_path / "a", generations, fingerprint="sha256:00"),
        "decoding is DecodeRecord": write_calibration(tmp_path / "b", generations, max_decode_length=10),
        "number of examples is 29 there, 30": write_calibration(tmp_path / "c", generations[:-1]),
    }
    for message, other in others.items():
        with pytest.raises(ReportError, match=re.escape(message)):
            _stored(folder, other)
    generations[0] = dataclasses.replace(
        generations[0], example=dataclasses.replace(generations[0].example, references=("another",))
    )
    with pytest.raises(ReportError, match="its examples have fingerprint sha256-sum:"):
        _stored(folder, write_calibration(tmp_path / "d", generations))


def test_unfinished_generations_are_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Without the mark of success nothing is read."""
    (source,) = folder.glob("generations/*")
    DecodeJob.read(str(source)).write(str(tmp_path))
    with pytest.raises(OutputsError, match="decoding did not finish there"):
        StoredOutputs.read(str(tmp_path), read_calibrated(str(folder)).manifest)


def test_samples_are_seeded(folder: pathlib.Path) -> None:
    """The same seed draws the same examples, a smaller sample begins a larger one, and another seed differs."""
    stored = _stored(folder)
    names = [item.example.id for item in stored.sample(30, seed=0)]
    assert sorted(names) == sorted(f"row-{index}" for index in range(30))
    assert [item.example.id for item in stored.sample(7, seed=0)] == names[:7]
    assert [item.example.id for item in stored.sample(7, seed=1)] != names[:7]


def test_samples_do_not_depend_on_shards(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The same examples in other files give the same sample, with the same outputs."""
    generations = random_generations(30)
    generations[4] = dataclasses.replace(generations[4], outputs=(), failure="broken")
    other = write_calibration(tmp_path / "out", generations, num_shards=5)
    assert list(_stored(other).sample(12, seed=3)) == list(_stored(folder).sample(12, seed=3))


def test_large_sets_are_looked_at_in_part(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole shards are read until there are enough examples, and the number of all is still known."""
    monkeypatch.setattr("calm_beam.report.stored._ENOUGH_EXAMPLES", 11)
    stored = _stored(folder)
    assert (len(stored.paths), stored.looked_at, stored.examples) == (2, 20, 30)
    assert len(list(stored.sample(30, seed=0))) == 20


def _write(folder: pathlib.Path, *, table: str = _ROWS, rule: dict[str, Any] | None = None, **changes: Any) -> str:
    record = {
        "model": {"fingerprint": build_manifest().model.fingerprint},
        "max_decode_length": 64,
        "measures": [
            {"name": "slow", "rule": {**_RULE, "confidence": "state"}},
            {"name": "fast", "rule": rule or _RULE},
        ],
        **changes,
    }
    (folder / "splits.json").write_text(json.dumps(record), encoding="utf-8")
    (folder / "splits.csv").write_text(table, encoding="utf-8")
    return str(folder)


@pytest.fixture
def manifest() -> Manifest:
    """A manifest whose entries chose 0.8 and never exit."""
    return build_manifest()


def test_speedups_at_chosen_thresholds(tmp_path: pathlib.Path, manifest: Manifest) -> None:
    """The promised thresholds are those of the measure that exits as the manifest says."""
    assert read_speedups(_write(tmp_path), manifest) == {0.8: 1.75}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"fingerprint": "sha256:00"}}, "is about another model"),
        ({"max_decode_length": 32}, "is about another model, or another way of decoding"),
        ({"rule": {**_RULE, "tau": 2.0}}, "is about another model, or another way of decoding"),
        ({"table": "measure,threshold,speedup\nfast,0.5,2.5\n"}, "no threshold of the manifest was timed there"),
        ({"table": "measure,threshold,speedup\nfast,0.8,\n"}, "no threshold of the manifest was timed there"),
        ({"table": "measure,threshold\nfast,0.8\n"}, r"as this version writes them \(KeyError: 'speedup'\)"),
        ({"measures": None}, "as this version writes them"),
    ],
)
def test_what_does_not_fit(tmp_path: pathlib.Path, manifest: Manifest, changes: dict[str, Any], message: str) -> None:
    """Times of another model or decoding, of other thresholds, or none at all, are refused with clear messages."""
    with pytest.raises(ReportError, match=message):
        read_speedups(_write(tmp_path, **changes), manifest)
