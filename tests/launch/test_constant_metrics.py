"""Constant metrics end calibrate, evaluate and verify, and nothing is written."""

import json
import pathlib
from collections.abc import Sequence

import pytest

from calm_beam.launch.cli import main
from tests.pipelines import SHORT_FLAGS, text_rows, write_model, write_rows, write_vocabulary

_CONSTANT = "tests.launch.test_constant_metrics:one"
_BY_REFERENCE = "tests.launch.test_constant_metrics:by_reference"
_NEVER_RIGHT = "it gives the full model 0 on all 20 examples, its outputs compared with the references"
_NEVER_MOVES = "on all 20 examples every output scores as the full model's does"


def one(candidate: str, references: Sequence[str]) -> float:
    """Returns the best score for every text."""
    return 1.0


def by_reference(candidate: str, references: Sequence[str]) -> float:
    """Returns a score that varies, but does not depend on the output."""
    return 1 / len(references[0])


def _rows(name: str, references: Sequence[str]) -> list[dict[str, object]]:
    return [{**row, "id": f"{name}-{place}", "references": references} for place, row in enumerate(text_rows(20))]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a model, data, and a calibration by an informative metric."""
    folder = tmp_path_factory.mktemp("calibrated")
    write_model(folder / "model", vocabulary=write_vocabulary(folder / "trained.model"))
    write_rows(folder / "rows.jsonl", _rows("row", ["the elk"]))
    paths = [f"--checkpoint={folder / 'model'}", f"--data={folder / 'rows.jsonl'}", f"--output={folder / 'out'}"]
    assert main(["calibrate", *paths, *SHORT_FLAGS, "--metric=token_f1", "--delta=0.9", "--epsilon=0.5"]) == 0
    return folder


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        *(
            (
                command,
                ["--metric=exact_match", "--consistency=risk"],
                f'metric "exact_match" says nothing here: {_NEVER_RIGHT}',
            )
            for command in ("calibrate", "evaluate")
        ),
        ("calibrate", [f"--metric={_BY_REFERENCE}", "--consistency=risk"], f"says nothing here: {_NEVER_MOVES}"),
        # An informative metric does not excuse a constant one.
        ("calibrate", [f"--metric=token_f1,{_CONSTANT}"], f'metric "{_CONSTANT}" says nothing here: {_NEVER_MOVES}'),
    ],
)
def test_nothing_is_promised(
    command: str,
    flags: list[str],
    message: str,
    calibrated: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Losses that are 0 at all exits give no manifest and no table: status 1, with the texts of an example."""
    arguments = [f"--generations={calibrated / 'out'}", f"--output={tmp_path / 'new'}"]
    more = [f"--checkpoint={calibrated / 'model'}", "--trials=2"] if command == "evaluate" else []
    assert main([command, *arguments, *more, *flags]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Example 'row-0': output" in printed.err
    assert printed.out == ""
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_sequential_run_ends_early(
    calibrated: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A constant metric that has proved the whole grid ends a sequential run in that round, whatever others need."""
    out = tmp_path / "out"
    paths = [f"--checkpoint={calibrated / 'model'}", f"--data={calibrated / 'rows.jsonl'}", f"--output={out}"]
    goal = [f"--metric=token_f1,{_CONSTANT}", "--delta=0.2", "--epsilon=0.5"]
    rounds = ["--sequential", "--round_examples=4", "--num_shards=5"]
    assert main(["calibrate", *paths, *SHORT_FLAGS, *goal, *rounds]) == 1
    printed = capsys.readouterr().err
    assert f'metric "{_CONSTANT}" says nothing here: on all ' in printed
    assert "round 1 of 5: " in printed
    assert len(list(out.rglob("round-*.json"))) < 5
    assert not (out / "manifest.json").exists()


def test_a_promise_cannot_be_verified_by_it(
    calibrated: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verification on fresh data on which the full model scores 0 is refused."""
    arguments = [f"--generations={calibrated / 'out'}", f"--output={tmp_path / 'risk'}", "--delta=0.9"]
    assert main(["calibrate", *arguments, "--metric=edit_distance", "--consistency=risk", "--epsilon=0.5"]) == 0
    manifest = json.loads((tmp_path / "risk" / "manifest.json").read_text())
    assert manifest["calibrations"][0]["threshold"] is not None
    fresh = write_rows(tmp_path / "fresh.jsonl", _rows("fresh", ["42"]))
    paths = [f"--manifest={tmp_path / 'risk'}", f"--data={fresh}", "--batch_size=4", "--num_shards=3"]
    capsys.readouterr()
    assert main(["verify", *paths]) == 1
    printed = capsys.readouterr()
    assert f'metric "edit_distance" says nothing here: {_NEVER_RIGHT}' in printed.err
    assert "was compared with '42'. Check the references" in printed.err
    assert printed.out == ""
