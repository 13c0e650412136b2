"""Commands that decode give the same on every runner as in one process, and leave no other files."""

import dataclasses
import pathlib
import tempfile
from typing import Any

import pytest

from calm_beam.launch.cli import main
from calm_beam.model.native import library
from tests.pipelines import SHORT_FLAGS, text_rows, write_model, write_rows, write_vocabulary
from tests.worker_pools import flags_of_two_workers

pytestmark = pytest.mark.timeout(600)

_KINDS = ("processes", "pool", "job service")

_SPLITS = ("--trials=3", "--metric=token_f1", "--delta=0.9", "--curve_delta=0.9", "--seed=3")
# All fields about time, duration and place are in the others.
_TABLES = ("splits.csv", "splits_curves.csv", "splits_grid.csv")


@dataclasses.dataclass(frozen=True)
class _Place:
    """A model, two files of data, fresh ones, and a calibration."""

    folder: pathlib.Path

    def decode(self, output: str, *flags: str) -> list[str]:
        """Returns the command that decodes into a file of the folder."""
        # Name the engine: elsewhere XLA decodes unless told otherwise, and its rounding depends on the batch size.
        engine = "native" if library.is_available() else "xla"
        files = (*self._task("rows-*.jsonl"), f"--output={self.folder / output}")
        return ["decode", *files, f"--engine={engine}", *SHORT_FLAGS, *flags]

    def verify(self, *flags: str) -> list[str]:
        """Returns the command that verifies the calibration."""
        run = ("--batch_size=4", "--num_shards=3")
        return ["verify", f"--manifest={self.folder / 'out'}", *self._task("fresh.jsonl"), *run, *flags]

    def split(self, output: str, *flags: str) -> list[str]:
        """Returns the command that sweeps, and evaluates splits."""
        files = (*self._task("rows-*.jsonl"), f"--output={self.folder / output}")
        return ["evaluate", *files, *SHORT_FLAGS, *_SPLITS, "--confidence=softmax,state", *flags]

    def trade(self, output: str, *flags: str) -> list[str]:
        """Returns the command that compares ways of exiting on a sample."""
        files = (*self._task("rows-*.jsonl"), f"--output={self.folder / output}", "--max_examples=20")
        short = [flag for flag in SHORT_FLAGS if not flag.startswith("--thresholds")]
        asked = ("--experiment=tradeoff", "--confidence=softmax", "--thresholds=0.5,0", "--metric=token_f1")
        return ["evaluate", *asked, *files, *short, *flags]

    def _task(self, data: str) -> tuple[str, str]:
        return f"--checkpoint={self.folder / 'model'}", f"--data={self.folder / data}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> _Place:
    """Holds all inputs of commands, and each command's results in one process, under `one`."""
    folder = tmp_path_factory.mktemp("runners")
    write_model(folder / "model", vocabulary=write_vocabulary(folder / "trained.model"))
    rows = text_rows(60)
    for part in range(2):
        write_rows(folder / f"rows-{part}.jsonl", rows[:40][part::2])
    write_rows(folder / "fresh.jsonl", rows[40:])
    place = _Place(folder)
    goal = ("--metric=token_f1", "--consistency=textual,risk", "--delta=0.7,0.9", "--epsilon=0.1")
    calibrate = ["calibrate", *place._task("rows-*.jsonl"), f"--output={folder / 'out'}", *SHORT_FLAGS, *goal]
    for command in (calibrate, place.decode("one.jsonl"), place.split("one"), place.trade("one")):
        assert main(command) == 0
    return place


def _mostly(kind: str) -> list[Any]:
    """Returns the kinds of workers: one is tried with the slow tests, the others with the exhaustive ones."""
    return [pytest.param(each, marks=pytest.mark.slow if each == kind else pytest.mark.exhaustive) for each in _KINDS]


@pytest.mark.parametrize("kind", _mostly("job service"))
def test_two_workers_give_the_same(
    kind: str,
    place: _Place,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows are the same to the byte, verdicts the same to the letter, and tables of splits to the last digit."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(place.verify()) in (0, 3)
    verdicts = capsys.readouterr().out
    assert "20 examples, 0 failed" in verdicts
    output, name = f"{kind}.jsonl", kind.replace(" ", "_")
    with flags_of_two_workers(kind) as flags:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert main(place.decode(output, *flags)) == 0
        capsys.readouterr()
        assert main(place.verify(*flags)) in (0, 3)
        assert capsys.readouterr().out == verdicts
        assert main(place.split(name, *flags)) == 0
    assert (place.folder / output).read_bytes() == (place.folder / "one.jsonl").read_bytes()
    for table in _TABLES:
        assert (place.folder / name / table).read_bytes() == (place.folder / "one" / table).read_bytes()
    # The folder that workers decoded into for this machine is gone.
    assert not [path.name for path in place.folder.iterdir() if path.name.startswith(".")]
    assert list(tmp_path.glob("calm-beam-verify-*")) == []


@pytest.mark.parametrize("kind", _mostly("processes"))
def test_experiments_give_the_same(
    kind: str, place: _Place, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample that two workers decode is measured to the same digits as one that this process decodes."""
    name = f"sample_{kind.replace(' ', '_')}"
    with flags_of_two_workers(kind) as flags:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert main(place.trade(name, *flags)) == 0
    for file in ("tradeoff.csv", "tradeoff.json"):
        assert (place.folder / name / file).read_bytes() == (place.folder / "one" / file).read_bytes()
    assert list(tmp_path.glob("calm-beam-evaluate-*")) == []


@pytest.mark.slow
def test_failures_elsewhere_leave_nothing(
    place: _Place, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failing worker of a job service ends decode with status 1 and its own message, and its folder is removed."""
    write_rows(tmp_path / "bad.jsonl", [{"id": "a", "input": "the cat"}, {"id": "a", "input": "the dog"}])
    bad = (f"--data={tmp_path / 'bad.jsonl'}", f"--output={tmp_path / 'no.jsonl'}")
    with flags_of_two_workers("job service") as flags:
        assert main(place.decode("no.jsonl", *flags, *bad)) == 1
    assert "id 'a' occurs 2 times" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]
