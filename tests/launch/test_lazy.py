"""Decoding the grid in blocks from the top, as far as the tests go."""

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import apache_beam as beam
import pytest

from calm_beam.launch.calibrate import run
from calm_beam.launch.cli import main
from calm_beam.launch.runners import run_pipeline
from calm_beam.manifest import read_manifest
from calm_beam.outputs import COMPLETE
from tests.pipelines import SHORT_FLAGS, id_rows, without_time, write_model, write_rows
from tests.sampling import sampled

_GRID = "--thresholds=0.99,0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("lazy") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Thirty prompts of token ids."""
    return write_rows(tmp_path_factory.mktemp("lazy") / "rows.jsonl", id_rows(30))


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    return main(
        [
            "calibrate",
            f"--checkpoint={model}",
            f"--data={data}",
            f"--output={output}",
            "--consistency=textual,risk",
            "--metric=token_f1",
            "--epsilon=0.1",
            *(flag for flag in SHORT_FLAGS if not flag.startswith(("--thresholds", "--grid_step"))),
            _GRID,
            *flags,
        ]
    )


@pytest.mark.parametrize("deltas", sampled(["0.05", "0.3,0.6", "0.999"], keep=(0,)))
def test_the_manifest_is_that_of_the_full_sweep(
    deltas: str, model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Whether tests fail at once, midway or never, manifest (but for its time) and table equal the full sweep's."""
    for sweep in ("full", "lazy"):
        assert _calibrate(model, data, tmp_path / sweep, f"--delta={deltas}", f"--sweep={sweep}") == 0
    manifests = [read_manifest(tmp_path / sweep / "manifest.json") for sweep in ("full", "lazy")]
    assert without_time(manifests[0]) == without_time(manifests[1])
    full, lazy = ((tmp_path / sweep / "risk_table.csv").read_text().splitlines() for sweep in ("full", "lazy"))
    assert set(lazy) <= set(full)
    # The generations of the last block include those of earlier blocks, which are removed.
    (folder,) = (tmp_path / "lazy" / "generations").iterdir()
    stored = json.loads((folder / "decode.json").read_text())["settings"]["thresholds"]
    tested = max(
        len(entry["path"]) for entry in json.loads((tmp_path / "lazy" / "manifest.json").read_text())["calibrations"]
    )
    assert tested <= len(stored) <= min(tested + 1, 10)


@pytest.mark.slow
def test_a_run_that_died_between_blocks_goes_on(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ends in its second block keeps the first, and with --resume decodes what is missing only."""
    flags = ("--delta=0.3,0.6", "--sweep=lazy")
    assert _calibrate(model, data, tmp_path / "whole", *flags) == 0
    upper = "--thresholds=0.99,0.9"
    # The generations at the first two thresholds, as the run would have left them after its first block.
    assert _calibrate(model, data, tmp_path / "upper", "--delta=0.999", upper) == 0
    assert _calibrate(model, data, tmp_path / "half", *flags) == 0
    shutil.rmtree(tmp_path / "half" / "generations")
    for name in ("manifest.json", "risk_table.csv"):
        (tmp_path / "half" / name).unlink()
    shutil.copytree(tmp_path / "upper" / "generations", tmp_path / "half" / "generations")
    capsys.readouterr()
    assert _calibrate(model, data, tmp_path / "half", *flags) == 2
    assert "holds generations of a run that did not finish" in capsys.readouterr().err
    assert _calibrate(model, data, tmp_path / "half", *flags, "--resume") == 0
    half, whole = (read_manifest(tmp_path / name / "manifest.json") for name in ("half", "whole"))
    assert without_time(half) == without_time(whole)
    (folder,) = (tmp_path / "half" / "generations").iterdir()
    assert (folder / COMPLETE).exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda rows: [*rows[:-1], {**rows[-1], "reference_ids": [[7]]}],
            "was decoded from other examples than the data give now for shard",
        ),
        # Its shard held no other row.
        (lambda rows: rows[:-1], "the data have no example for this file"),
    ],
    ids=["changed", "shard removed"],
)
def test_data_that_change_between_blocks_end_the_run(
    edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    message: str,
    model: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If data change between blocks, the run ends before outputs of different prompts mix; nothing is published."""
    rows = id_rows(30)
    data = write_rows(tmp_path / "rows.jsonl", rows)

    def run_and_edit(pipeline: beam.Pipeline) -> Any:
        metrics = run_pipeline(pipeline)
        write_rows(data, edit(rows))
        return metrics

    monkeypatch.setattr(run, "run_pipeline", run_and_edit)
    flags = ("--delta=0.3,0.6", "--sweep=lazy", "--num_shards=64")
    assert _calibrate(model, data, tmp_path / "out", *flags) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_another_sweep_does_not_go_on_with_it(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generations of another grid are refused with the difference."""
    assert _calibrate(model, data, tmp_path / "out", "--delta=0.999", "--thresholds=0.99,0.8") == 0
    (tmp_path / "out" / "manifest.json").unlink()
    assert _calibrate(model, data, tmp_path / "out", "--delta=0.3", "--sweep=lazy", "--resume") == 2
    assert "was begun in another way: settings.thresholds" in capsys.readouterr().err


def test_procedures_that_look_further_are_refused(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only fixed sequence testing never needs what lies below its first failure."""
    assert _calibrate(model, data, tmp_path / "out", "--sweep=lazy", "--procedure=holm") == 2
    assert "--sweep=lazy stops where fixed sequence testing fails; --procedure=holm" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_manifest_of_another_run_is_not_taken_for_the_end(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that finds another run's manifest between two blocks says so, and ends with status 1."""
    assert _calibrate(model, data, tmp_path / "other", "--delta=0.999") == 0

    def run_beside_another(pipeline: beam.Pipeline) -> Any:
        metrics = run_pipeline(pipeline)
        shutil.copy(tmp_path / "other" / "manifest.json", tmp_path / "out")
        return metrics

    monkeypatch.setattr(run, "run_pipeline", run_beside_another)
    capsys.readouterr()
    assert _calibrate(model, data, tmp_path / "out", "--delta=0.3,0.6", "--sweep=lazy") == 1
    assert f"{tmp_path / 'out' / 'manifest.json'}: another run has published it meanwhile" in capsys.readouterr().err
