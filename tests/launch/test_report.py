"""`calm-beam report`, and the report that `calibrate` makes."""

import json
import pathlib
import shutil
from typing import Any

import pytest

from calm_beam import storage
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.launch.cli import main
from calm_beam.launch.report import command as report_command
from calm_beam.manifest import VocabularyRecord, read_manifest
from calm_beam.report.document import with_short_places
from tests.builders import train_vocabulary
from tests.calm_beam.report.builders import random_generations, write_calibration
from tests.calm_beam.report.pages import page_data
from tests.pipelines import SHORT_FLAGS, text_rows, write_model, write_rows, write_vocabulary


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A calibration whose model is missing and whose vocabulary exists."""
    place = tmp_path_factory.mktemp("report")
    vocabulary = Vocabulary(train_vocabulary(place / "sentencepiece.model"))
    record = VocabularyRecord(fingerprint=vocabulary.fingerprint, extra_ids=0)
    return write_calibration(place / "out", random_generations(12), vocabulary=record)


def _data(path: pathlib.Path) -> dict[str, Any]:
    return page_data(path.read_text(encoding="utf-8"))


def _report(*flags: str) -> int:
    return main(["report", *flags])


def test_a_report_is_built(calibration: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default the file is next to the manifest; a missing model or vocabulary is noted there and on stderr."""
    assert _report(f"--calibration={calibration}") == 0
    printed = capsys.readouterr()
    assert printed.out == f"Report: {calibration / 'report.html'}\n"
    data = _data(calibration / "report.html")
    assert ["Manifest", read_manifest(calibration / "manifest.json").digest] in data["facts"]
    assert (data["sample"]["hasPieces"], data["savings"]) == (False, None)
    assert [remark.split(",")[0] for remark in data["remarks"]] == [
        "Floating point operations are not counted",
        "Tokens are shown as ids",
    ]
    for remark in data["remarks"]:
        assert remark in with_short_places(printed.err)


def test_flags_say_where_things_are(calibration: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Flags set vocabulary, generations, output, size and seed of the sample."""
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("manifest.json", "risk_table.csv"):
        shutil.copy(calibration / name, alone)
    flags = [f"--generations={calibration}", f"--vocabulary={calibration.parent / 'sentencepiece.model'}"]
    output = tmp_path / "a.html"
    assert _report(f"--calibration={alone}", f"--output={output}", "--max_examples=5", "--seed=2", *flags) == 0
    data = _data(output)
    assert (data["sample"]["shown"], data["sample"]["all"], data["sample"]["seed"]) == (5, 12, 2)
    assert data["sample"]["hasPieces"]
    assert any(piece.startswith("▁") and not piece[1:].isdigit() for piece in data["pieces"])
    assert not (alone / "report.html").exists()
    assert _report(f"--calibration={alone / 'manifest.json'}") == 0
    assert "the generations are not next to the manifest" in _data(alone / "report.html")["remarks"][0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--calibration is missing"),
        (("--calibration={place}/none",), "has no manifest.json, so no calibration finished there."),
        (("--calibration={out}", "--output={place}"), "is a directory, expected the name of a file"),
        (("--calibration={out}", "--generations={place}"), "no decode.json there"),
        (("--calibration={out}", "--checkpoint={place}/none"), "--checkpoint: checkpoint"),
        (("--calibration={out}", "--vocabulary={place}/none"), "--vocabulary: vocabulary"),
        (("--calibration={out}", "--vocabulary={place}/other.model"), "--vocabulary: the manifest is about"),
        (("--calibration={out}", "--max_examples=-1"), "expected a whole number of at least 0"),
        (("--calibraton={out}",), "Did you mean --calibration?"),
    ],
)
def test_bad_usage(
    calibration: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    """Bad usage gives status 2 with the reason, and no file is written."""
    train_vocabulary(tmp_path / "other.model", size=40)
    (calibration / "report.html").unlink(missing_ok=True)
    assert _report(*(flag.format(place=tmp_path, out=calibration) for flag in flags)) == 2
    error = capsys.readouterr().err
    assert error.startswith("calm-beam report: ")
    assert message in error
    assert not (calibration / "report.html").exists()


def test_files_of_another_run(
    calibration: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generations that were not calibrated, and a risk table of another run, end with status 1."""
    other = write_calibration(tmp_path / "other", random_generations(12, seed=1))
    assert _report(f"--calibration={calibration}", f"--generations={other}") == 1
    assert "The report needs the generations that were calibrated." in capsys.readouterr().err
    shutil.copy(calibration / "manifest.json", other)
    assert _report(f"--calibration={other}") == 1
    assert "is not the risk table of the manifest next to it" in capsys.readouterr().err


def _calibrate(output: pathlib.Path, *flags: str) -> int:
    return main(["calibrate", f"--output={output}", "--metric=token_f1", "--delta=0.3,0.6", *flags])


@pytest.fixture(scope="module")
def decoding(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name a tiny model with a vocabulary, and its data."""
    place = tmp_path_factory.mktemp("decoding")
    model = write_model(place / "model", vocabulary=write_vocabulary(place / "sentencepiece.model"))
    return [f"--checkpoint={model}", f"--data={write_rows(place / 'rows.jsonl', text_rows(10))}", *SHORT_FLAGS]


@pytest.fixture(scope="module")
def finished(decoding: list[str], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output of a finished run."""
    output = tmp_path_factory.mktemp("finished") / "out"
    assert _calibrate(output, *decoding) == 0
    return output


def test_calibrate_makes_the_report(finished: pathlib.Path) -> None:
    """A run ends with a report, with pieces and operations, which `report` builds again to the same bytes."""
    data = _data(finished / "report.html")
    assert (data["sample"]["hasPieces"], data["remarks"]) == (True, [])
    assert data["savings"]["examples"] == 10
    first = (finished / "report.html").read_bytes()
    assert _report(f"--calibration={finished}") == 0
    assert (finished / "report.html").read_bytes() == first


def test_stored_generations_are_shown_too(
    finished: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calibrating stored generations into another directory makes a report with their outputs, and names it."""
    output = tmp_path / "again"
    assert _calibrate(output, "--metric=exact_match", "--thresholds=0.5,0", f"--generations={finished}") == 0
    assert f"Report: {output / 'report.html'}\nNext:\n" in capsys.readouterr().out
    data = _data(output / "report.html")
    assert data["thresholds"] == [0.5, 0.0]
    assert len(data["examples"]) == 10
    assert data["sample"]["hasPieces"]


def test_a_report_that_fails_takes_nothing_away(
    finished: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the report fails, the calibration still succeeds, and no earlier report stays with the result."""

    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("no ink")

    output = tmp_path / "out"
    assert _calibrate(output, f"--generations={finished}") == 0
    assert (output / "report.html").exists()
    digest = read_manifest(output / "manifest.json").digest
    monkeypatch.setattr(report_command, "build_page", fail)
    assert _calibrate(output, f"--generations={finished}", "--overwrite", "--epsilon=0.2") == 0
    error = capsys.readouterr().err
    assert "caution: no report (RuntimeError: no ink)." in error
    assert f"try: calm-beam report --calibration={output} --generations={finished}" in error
    assert read_manifest(output / "manifest.json").digest != digest
    assert not (output / "report.html").exists()


def test_an_interrupted_report_leaves_the_result(
    finished: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupting the report prints that the result is complete, and how to build the report."""

    def interrupt(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_command, "build_page", interrupt)
    assert _calibrate(tmp_path / "out", f"--generations={finished}") == 130
    assert f"the result in {tmp_path / 'out'} is whole; only its report is missing" in capsys.readouterr().err
    read_manifest(tmp_path / "out" / "manifest.json")


def test_resuming_a_finished_run_names_a_missing_report(
    finished: pathlib.Path, decoding: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resuming a run that died between result and report says how to build the report."""
    output = shutil.copytree(finished, tmp_path / "out")
    hint = f"its report is missing: calm-beam report --calibration={output}"
    assert _calibrate(output, *decoding, "--resume") == 0
    assert hint not in capsys.readouterr().err
    (output / "report.html").unlink()
    assert _calibrate(output, *decoding, "--resume") == 0
    assert hint in capsys.readouterr().err


def test_reports_on_cloud_storage(calibration: pathlib.Path, bucket: str) -> None:
    """The report of a calibration on Cloud Storage is read and written there."""
    for path in calibration.rglob("*"):
        if path.is_file() and path.suffix != ".html":
            with storage.replacing(f"{bucket}/out/{path.relative_to(calibration)}") as temporary:
                temporary.write_bytes(path.read_bytes())
    assert _report(f"--calibration={bucket}/out") == 0
    with storage.open_input(f"{bucket}/out/report.html") as file:
        assert b"calibration report" in file.read()


def test_measured_speedups_are_shown(
    calibration: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Speedups at chosen thresholds are taken from evaluate's results; without results the status is 1."""
    manifest = read_manifest(calibration / "manifest.json")
    rule = {name: getattr(manifest.decode, name) for name in ("confidence", "schedule", "tau", "state_propagation")}
    record = {
        "model": {"fingerprint": manifest.model.fingerprint},
        "max_decode_length": manifest.decode.max_decode_length,
        "measures": [{"name": "softmax", "rule": {**rule, "min_exit_layer": 1, "exit_interval": 1}}],
    }
    (tmp_path / "splits.json").write_text(json.dumps(record), encoding="utf-8")
    chosen = next(entry.threshold for entry in manifest.calibrations if entry.threshold is not None)
    (tmp_path / "splits.csv").write_text(f"measure,threshold,speedup\nsoftmax,{chosen},1.5\n", encoding="utf-8")
    output = tmp_path / "report.html"
    assert _report(f"--calibration={calibration}", f"--output={output}", f"--speedup={tmp_path}") == 0
    assert _data(output)["speedups"] == [{None: 1, chosen: 1.5}.get(entry.threshold) for entry in manifest.calibrations]
    (tmp_path / "splits.json").unlink()
    assert _report(f"--calibration={calibration}", f"--output={output}", f"--speedup={tmp_path}") == 1
    assert "splits.json" in capsys.readouterr().err
