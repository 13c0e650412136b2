"""Every command takes gs:// paths and gives the same results as on a local disk."""

import dataclasses
import gzip
import json
import pathlib
import shutil
from typing import TYPE_CHECKING

import pytest

from calm_beam import storage
from calm_beam.checkpoints import Declared, load_checkpoint
from calm_beam.inputs import AS_USUAL
from calm_beam.launch.cli import main
from calm_beam.launch.train.prepare import load_model, read_rows
from calm_beam.manifest import Manifest, manifest_text, read_manifest
from calm_beam.model.native import library
from calm_beam.outputs import Generation, read_generations
from tests.calm_beam.manifest.builders import build_manifest
from tests.cloud.guard import Fault
from tests.pipelines import (
    SHORT_FLAGS,
    text_rows,
    without_time,
    write_model,
    write_rows,
    write_vocabulary,
)
from tests.worker_pools import flags_of_two_workers

if TYPE_CHECKING:
    from tests.cloud.service import CloudService

pytestmark = pytest.mark.timeout(300)

_ASKED = ("--consistency=textual,risk", "--metric=token_f1", "--delta=0.3,0.7", "--epsilon=0.1")


@dataclasses.dataclass(frozen=True)
class _Local:
    """A model, data, and a calibration on them, on a local disk."""

    model: pathlib.Path
    data: pathlib.Path
    output: pathlib.Path


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> _Local:
    """A tiny model with a vocabulary, texts in two files, one of them packed, and their calibration."""
    folder = tmp_path_factory.mktemp("cloud")
    place = _Local(folder / "model", folder / "data", folder / "out")
    write_model(place.model, vocabulary=write_vocabulary(folder / "trained.model"))
    place.data.mkdir()
    rows = text_rows(30)
    write_rows(place.data / "a.jsonl", rows[:14])
    packed = write_rows(folder / "b.jsonl", rows[14:])
    (place.data / "b.jsonl.gz").write_bytes(gzip.compress(packed.read_bytes()))
    assert _calibrate(str(place.model), str(place.data), str(place.output)) == 0
    return place


@pytest.fixture
def stored(local: _Local, cloud: "CloudService", bucket: str) -> str:
    """A bucket with the same model and data."""
    for folder in (local.model, local.data):
        for file in folder.iterdir():
            with storage.replacing(f"{bucket}/{folder.name}/{file.name}") as temporary:
                shutil.copyfile(file, temporary)
    cloud.guard.reset()
    return bucket


def _calibrate(model: str, data: str, output: str, *flags: str) -> int:
    paths = [f"--checkpoint={model}", f"--data={data}/*.jsonl,{data}/*.jsonl.gz", f"--output={output}"]
    return main(["calibrate", *paths, *SHORT_FLAGS, *_ASKED, *flags])


def _calibrate_stored(bucket: str, *flags: str) -> int:
    return _calibrate(f"{bucket}/model", f"{bucket}/data", f"{bucket}/out", *flags)


def _read(path: str) -> bytes:
    with storage.open_input(path) as file:
        return file.read()


def _generations(output: str) -> list[Generation]:
    shards = storage.list_files(f"{output}/generations/*/*.parquet")
    return sorted((item for shard in shards for item in read_generations(shard)), key=lambda item: item.example.id)


def _without_places(manifest: Manifest) -> dict[str, object]:
    """Returns the manifest without the fields that hold paths or depend on them."""
    elsewhere = dataclasses.replace(
        manifest,
        model=dataclasses.replace(manifest.model, uri="somewhere"),
        data=dataclasses.replace(manifest.data, patterns=("somewhere",)),
    )
    return without_time(elsewhere)


def _check_equal(local: _Local, bucket: str) -> None:
    output = f"{bucket}/out"
    assert _read(f"{output}/risk_table.csv") == (local.output / "risk_table.csv").read_bytes()
    found, expected = read_manifest(f"{output}/manifest.json"), read_manifest(local.output / "manifest.json")
    assert _without_places(found) == _without_places(expected)
    assert found.model.uri == f"{bucket}/model"
    assert found.data.patterns == (f"{bucket}/data/*.jsonl", f"{bucket}/data/*.jsonl.gz")
    assert _generations(output) == _generations(str(local.output))


def test_a_whole_calibration(
    local: _Local, stored: str, cloud: "CloudService", capsys: pytest.CaptureFixture[str]
) -> None:
    """With model, data and output on Cloud Storage, generations, risk table and manifest are those of a local run."""
    capsys.readouterr()
    assert _calibrate_stored(stored) == 0
    _check_equal(local, stored)
    assert len(_generations(f"{stored}/out")) == 30
    assert f"Manifest: {stored}/out/manifest.json" in capsys.readouterr().out
    # The manifest is published on the condition that it does not exist yet.
    assert any("ifGenerationMatch=0" in place for _, place in cloud.guard.requests)
    # It exists now, so that another run refuses to begin.
    assert _calibrate_stored(stored) == 2
    expected = f"--output {stored}/out: holds a manifest already. Choose another directory, or pass --overwrite."
    assert expected in capsys.readouterr().err
    assert _calibrate_stored(stored, "--overwrite") == 0
    _check_equal(local, stored)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_worker_processes(local: _Local, stored: str) -> None:
    """Two worker processes read, decode and write there what one process does."""
    assert _calibrate_stored(stored, "--direct_num_workers=2", "--direct_running_mode=multi_processing") == 0
    _check_equal(local, stored)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_loses_the_race_says_so(
    stored: str, cloud: "CloudService", capsys: pytest.CaptureFixture[str], overwrite: bool
) -> None:
    """A run whose output got another run's manifest meanwhile ends with status 1, names it, and leaves it."""
    path = f"{stored}/out/manifest.json"
    rival = build_manifest(created="2026-05-05T05:05:05Z")
    if overwrite:
        with storage.replacing(path) as temporary:
            temporary.write_text(manifest_text(build_manifest()), encoding="utf-8")
    cloud.guard.reset()

    def publish(method: str, place: str, body: bytes) -> None:
        """The rival is a moment faster."""
        if method == "POST" and b"out/manifest.json" in body and b'"schema"' in body:
            cloud.guard.before = None
            with storage.replacing(path) as temporary:
                temporary.write_text(manifest_text(rival), encoding="utf-8")

    cloud.guard.before = publish
    assert _calibrate_stored(stored, *(["--overwrite"] if overwrite else [])) == 1
    assert cloud.guard.before is None
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        f"calm-beam calibrate: manifest {path}: another one was published there first (of 2026-05-05T05:05:05Z, "
        f"{rival.digest}), and this one was not:"
    )
    assert read_manifest(path) == rival


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--data", "gs://no-bucket/rows.jsonl", "--data gs://no-bucket/rows.jsonl: there is no bucket gs://no-bucket."),
        ("--data", "{bucket}/none-*.jsonl", "--data {bucket}/none-*.jsonl: no such file."),
        ("--data", "{bucket}/data", "--data {bucket}/data: is a directory. Name its files, for example"),
        ("--checkpoint", "gs://no-bucket/m", "gs://no-bucket/m: there is no bucket gs://no-bucket."),
        ("--checkpoint", "{bucket}/none", "checkpoint {bucket}/none: no such folder, or nothing in it."),
        (
            "--vocabulary",
            "{bucket}/none.model",
            "vocabulary {bucket}/none.model: cannot be read as a SentencePiece model",
        ),
        ("--output", "gs://no-bucket/out", "--output gs://no-bucket/out: there is no bucket"),
        ("--output", "{bucket}/data/a.jsonl", "--output {bucket}/data/a.jsonl: is a file, expected a directory."),
    ],
)
def test_bad_paths(stored: str, capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str) -> None:
    """Missing objects are reported with the flag or path, with status 2, before any work; nothing is written."""
    assert _calibrate_stored(stored, f"{flag}={value.format(bucket=stored)}") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("calm-beam calibrate: ")
    assert message.format(bucket=stored) in error
    assert not storage.exists(f"{stored}/out")


@pytest.mark.parametrize(
    ("method", "part", "named"),
    [
        ("GET", "/data/", "data/a.jsonl"),
        ("GET", "model/", "model"),
        ("GET", "prefix=data", "--data"),
        ("POST", "/upload/", "--output"),
    ],
)
def test_missing_permission_is_found_before_work(
    stored: str, cloud: "CloudService", capsys: pytest.CaptureFixture[str], method: str, part: str, named: str
) -> None:
    """An account without permission to list, read or write a path is told so before anything is decoded."""
    cloud.guard.faults.append(Fault(403, method, part, times=10**6))
    assert _calibrate_stored(stored) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert named in error
    assert "permission denied (a failure that the test asked for). Give this account the role Storage" in error
    assert not any("uploadType=multipart" in place for _, place in cloud.guard.requests)


def test_a_permission_lost_on_the_way(stored: str, cloud: "CloudService", capsys: pytest.CaptureFixture[str]) -> None:
    """Errors after work has begun give status 1 and one line, and no manifest."""

    def withdraw(method: str, place: str, body: bytes) -> None:
        if method == "POST" and b"risk_table.csv" in body and b"p_value" in body:
            cloud.guard.faults.append(Fault(403, "POST", "/upload/", times=10**6))

    cloud.guard.before = withdraw
    assert _calibrate_stored(stored) == 1
    assert "risk_table.csv: permission denied (a failure that the test asked for)" in capsys.readouterr().err
    cloud.guard.reset()
    assert not storage.exists(f"{stored}/out/manifest.json")


def test_after_a_calibration(
    local: _Local, stored: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """inspect, verify and monitor read a calibration on Cloud Storage, with data, states and losses there too."""
    for file in local.output.rglob("*"):
        if file.is_file():
            name = file.relative_to(local.output).as_posix()
            with storage.replacing(f"{stored}/out/{name}") as temporary:
                shutil.copyfile(file, temporary)
    capsys.readouterr()
    digest = read_manifest(local.output / "manifest.json").digest
    for path in (f"{stored}/out", f"{stored}/out/manifest.json"):
        assert main(["inspect", path, f"--checkpoint={stored}/model"]) == 0
        assert f"It belongs to the model in {stored}/model, and to its vocabulary." in capsys.readouterr().out
    assert main(["inspect", f"{stored}/model"]) == 0
    printed = capsys.readouterr().out
    assert f"Checkpoint in native layout: {stored}/model" in printed
    assert f"{stored}/model/sentencepiece.model" in printed
    assert main(["inspect", f"{stored}/none"]) == 2
    assert f"{stored}/none: no such file or directory." in capsys.readouterr().err

    fresh = write_rows(
        tmp_path / "fresh.jsonl", [{**row, "input": f"{row['input']} now"} for row in text_rows(30)[20:]]
    )
    with storage.replacing(f"{stored}/fresh.jsonl") as temporary:
        shutil.copyfile(fresh, temporary)
    verify = ["verify", f"--manifest={stored}/out", f"--checkpoint={stored}/model"]
    assert main([*verify, f"--data={stored}/fresh.jsonl"]) in (0, 3)
    printed_twice = capsys.readouterr()
    assert "10 examples, 0 failed" in printed_twice.out
    assert "is unknown: its generations" not in printed_twice.err
    assert main([*verify, f"--data={stored}/data/a.jsonl,{stored}/data/b.jsonl.gz"]) == 2
    assert "is the calibration set itself" in capsys.readouterr().err

    entry = next(
        entry for entry in read_manifest(f"{stored}/out/manifest.json").calibrations if entry.threshold is not None
    )
    which = [f"--{name}={getattr(entry, name)}" for name in ("consistency", "metric", "delta", "epsilon")]
    watch = ["monitor", f"--manifest={stored}/out", f"--losses={stored}/losses.txt", f"--state={stored}/state.json"]
    # The file grows; what was counted counts once.
    for total, losses in ((2, "0.1\n0.2\n"), (4, "0.1\n0.2\n0.1\n0.2\n"), (4, "0.1\n0.2\n0.1\n0.2\n")):
        with storage.replacing(f"{stored}/losses.txt", overwrite=True) as temporary:
            temporary.write_text(losses)
        assert main([*watch, *which]) == 0
        assert f"{total} losses" in capsys.readouterr().out
    assert json.loads(_read(f"{stored}/state.json"))["manifest"] == digest


def test_decode(local: _Local, stored: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Decode writes the same rows, and overwrites none."""
    flags = [*SHORT_FLAGS, f"--data={stored}/data/a.jsonl", f"--checkpoint={stored}/model"]
    assert main(["decode", *flags, f"--output={stored}/rows.jsonl"]) == 0
    there = [*SHORT_FLAGS, f"--data={local.data}/a.jsonl", f"--checkpoint={local.model}"]
    assert main(["decode", *there, f"--output={tmp_path}/rows.jsonl"]) == 0
    assert _read(f"{stored}/rows.jsonl") == (tmp_path / "rows.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["decode", *flags, f"--output={stored}/rows.jsonl"]) == 2
    assert f"--output {stored}/rows.jsonl: exists already. Choose another file, or pass" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not library.is_available(), reason="no native code here")
def test_workers_elsewhere(
    local: _Local, stored: str, cloud: "CloudService", tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers of another runner decode below the bucket, and only the requested output stays."""
    task = (f"--data={stored}/data/a.jsonl", f"--checkpoint={stored}/model")
    there = [*SHORT_FLAGS, f"--data={local.data}/a.jsonl", f"--checkpoint={local.model}"]
    # Name the engine: workers elsewhere use XLA, whose last digits depend on the batch size.
    engine = "--engine=native"
    assert main(["decode", *there, engine, f"--output={tmp_path}/rows.jsonl"]) == 0
    assert _calibrate_stored(stored) == 0
    fresh = write_rows(tmp_path / "fresh.jsonl", text_rows(60)[30:])
    with storage.replacing(f"{stored}/fresh.jsonl") as temporary:
        shutil.copyfile(fresh, temporary)
    verify = ["verify", f"--manifest={stored}/out", f"--data={stored}/fresh.jsonl", "--batch_size=4", "--num_shards=2"]
    capsys.readouterr()
    assert main(verify) in (0, 3)
    expected = capsys.readouterr().out
    splits = ["evaluate", "--trials=3", "--metric=token_f1", "--delta=0.9", "--curve_delta=0.9"]
    assert main([*splits, f"--generations={local.output}", f"--output={tmp_path}/splits"]) == 0

    with flags_of_two_workers("job service") as elsewhere:
        assert main(["decode", *SHORT_FLAGS, *task, engine, f"--output={stored}/rows.jsonl", *elsewhere]) == 0
        assert _read(f"{stored}/rows.jsonl") == (tmp_path / "rows.jsonl").read_bytes()
        assert _removed(cloud, "/.rows.jsonl.")
        capsys.readouterr()
        assert main([*verify, *elsewhere, f"--temp_location={stored}/temp"]) in (0, 3)
        assert capsys.readouterr().out == expected
        assert _removed(cloud, "/temp/calm-beam-verify-")
        assert main([*splits, f"--generations={stored}/out", f"--output={stored}/splits", *elsewhere]) == 0
    for name in ("splits.csv", "splits_curves.csv", "splits_grid.csv"):
        assert _read(f"{stored}/splits/{name}") == (tmp_path / "splits" / name).read_bytes()
    names = [file.path for file in storage.list_below(stored)]
    assert not [name for name in names if "/." in name or "/temp/" in name]


def _removed(cloud: "CloudService", part: str) -> int:
    """Returns the number of removed files whose addresses hold a text."""
    return sum(method == "DELETE" and part in place for method, place in cloud.guard.requests)


@pytest.mark.slow
def test_a_failed_decode_leaves_nothing(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If a job on another runner fails, neither rows nor what was decoded stays in the bucket."""
    before = [file.path for file in storage.list_below(stored)]
    flags = [*SHORT_FLAGS, f"--data={stored}/data/a.jsonl", f"--checkpoint={stored}/model", "--on_long=error"]
    with flags_of_two_workers("job service") as elsewhere:
        asked = (f"--output={stored}/rows.jsonl", "--max_input_length=2", *elsewhere)
        assert main(["decode", *flags, *asked]) == 1
    assert "max_input_length" in capsys.readouterr().err
    assert [file.path for file in storage.list_below(stored)] == before


@pytest.mark.parametrize("layout", ["native", "t5x"])
def test_convert(local: _Local, stored: str, capsys: pytest.CaptureFixture[str], layout: str) -> None:
    """Convert reads and writes models there, vocabulary included, and only into a folder of their own."""
    flags = ["convert", f"--checkpoint={stored}/model", f"--layout={layout}", f"--output={stored}/new"]
    assert main(flags) == 0
    step = "/checkpoint_1" if layout == "t5x" else ""
    printed = capsys.readouterr().out
    assert f"Read {stored}/model (native).\nWrote {stored}/new{step} ({layout}).\n" in printed
    written = load_checkpoint(f"{stored}/new")
    assert written.fingerprint() == load_checkpoint(local.model).fingerprint()
    assert written.vocabulary_uri == f"{stored}/new/sentencepiece.model"
    assert main([*flags, "--overwrite"]) == 2
    assert f"--output={stored}/new: is not empty. On Cloud Storage a model is written to" in capsys.readouterr().err


def test_training_reads(local: _Local, stored: str) -> None:
    """Training reads rows and models from there."""
    rows = read_rows("--data", [f"{stored}/data/*"], reading=AS_USUAL)
    assert [row.input for row in rows] == [
        row.input for row in read_rows("--data", [f"{local.data}/*"], reading=AS_USUAL)
    ]
    assert load_model(f"{stored}/model", Declared()).fingerprint() == load_checkpoint(local.model).fingerprint()


@pytest.mark.slow
def test_tables_plots_and_pages(stored: str, tmp_path: pathlib.Path) -> None:
    """Evaluate and plan write tables, plots and pages there, equal to local ones."""
    evaluate = ["evaluate", "--experiment=tradeoff", "--confidence=softmax", "--thresholds=0.5,0", "--metric=token_f1"]
    sizes = ["--max_input_length=32", "--max_decode_length=6", "--batch_size=4", f"--checkpoint={stored}/model"]
    plan = ["plan", "--delta=0.1", "--risk_guess=0.05", "--p_value=hoeffding"]
    for folder in (str(tmp_path), stored):
        assert main([*evaluate, *sizes, f"--data={stored}/data/a.jsonl", f"--output={folder}/found"]) == 0
        for kind in ("svg", "html"):
            assert main([*plan, f"--output={folder}/plan.{kind}"]) == 0
    written = [f"found/tradeoff.{kind}" for kind in ("csv", "json", "svg", "html")]
    for name in (*written, "plan.svg", "plan.html"):
        assert _read(f"{stored}/{name}") == (tmp_path / name).read_bytes()
