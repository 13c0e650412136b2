"""Worker processes, however they are started, give the results of one process."""

import pathlib

import pytest

from calm_beam.launch.cli import main
from calm_beam.manifest import read_manifest
from calm_beam.outputs import read_generations
from tests.pipelines import (
    SHORT_FLAGS,
    id_rows,
    text_rows,
    without_engine,
    without_time,
    write_model,
    write_rows,
    write_vocabulary,
)
from tests.worker_pools import flags_of_two_workers

_PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    asked = ["--metric=token_f1", "--consistency=textual,risk", "--delta=0.3,0.6", "--epsilon=0.1"]
    paths = [f"--checkpoint={model}", f"--data={data}", f"--output={output}"]
    return main(["calibrate", *paths, *SHORT_FLAGS, *asked, *flags])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["processes", "pool", "job service"])
def test_processes_give_the_same_result(kind: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With two workers the risk table is the same to the byte, the manifest but for its time; each loads one model."""
    model = write_model(tmp_path / "model", vocabulary=write_vocabulary(tmp_path / "trained.model"))
    for part in range(3):
        rows = text_rows(40)[part::3]
        write_rows(tmp_path / f"rows-{part}.jsonl", rows)
    data = tmp_path / "rows-*.jsonl"
    assert _calibrate(model, data, tmp_path / "one") == 0
    with flags_of_two_workers(kind) as flags:
        assert _calibrate(model, data, tmp_path / "two", *flags, "--num_shards=5", "--verbose") == 0
    assert "the model was loaded 2 times" in capsys.readouterr().err
    one, two = (tmp_path / name / "risk_table.csv" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    manifests: list[object] = [
        without_time(read_manifest(tmp_path / name / "manifest.json")) for name in ("one", "two")
    ]
    if kind == "job service":
        manifests = [without_engine(content) for content in manifests]
    assert manifests[0] == manifests[1]
    shards = list((tmp_path / "two" / "generations").rglob("*-of-00005.parquet"))
    assert len(shards) > 1
    assert sum(1 for shard in shards for _ in read_generations(shard)) == 40


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_failures_in_processes_are_told(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker process's error ends the run with status 1 and the message of a single process."""
    model = write_model(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", [*id_rows(5), {"id": "row-1", "input_ids": [5], "reference_ids": [[5]]}])
    messages = []
    for name, flags in (("one", ()), ("two", _PROCESSES)):
        assert _calibrate(model, data, tmp_path / name, *flags) == 1
        messages.append(capsys.readouterr().err.splitlines()[-1])
        assert not (tmp_path / name / "manifest.json").exists()
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"calm-beam calibrate: id 'row-1' occurs 2 times ({data}, line 2 and {data}, line 6)")
