"""Data of every format: the same content gives the same results, and errors are reported first."""

import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from calm_beam.inputs import Reading, preview
from calm_beam.inputs.examples import DataError, Example
from calm_beam.inputs.reading import SeqIOShard
from calm_beam.launch.cli import main
from calm_beam.launch.flags import UsageError
from calm_beam.launch.train.prepare import read_rows
from calm_beam.launch.train.request import TrainRequest
from calm_beam.manifest import read_manifest
from calm_beam.metrics import sacrebleu_scores
from tests.calm_beam.calibration.builders import build_example
from tests.data_files import write_parquet, write_tfrecord
from tests.pipelines import SHORT_FLAGS, text_rows, without_time, write_model, write_rows, write_vocabulary

_ROWS = text_rows(30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model with a vocabulary."""
    folder = tmp_path_factory.mktemp("formats")
    return write_model(folder / "model", vocabulary=write_vocabulary(folder / "sentencepiece.model"))


def _calibrate(model: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    asked = ["--metric=token_f1,edit_distance", "--delta=0.3,0.6", "--epsilon=0.1"]
    return main(["calibrate", f"--checkpoint={model}", f"--output={output}", *SHORT_FLAGS, *asked, *flags])


_FORMATS: Mapping[str, Callable[[pathlib.Path], Sequence[str]]] = {
    "parquet": lambda folder: [f"--data={write_parquet(folder / 'a.parquet', _ROWS, row_group_size=7)}"],
    "tfrecord": lambda folder: [
        f"--data={write_tfrecord(folder / 'a.tfrecord', _ROWS[:12])},"
        f"{write_tfrecord(folder / 'b.tfrecord.gz', _ROWS[12:])}"
    ],
    "seqio": lambda _: ["--seqio_task=calm_beam_text", "--seqio_module=tests.seqio_tasks"],
}


@pytest.fixture(scope="module")
def from_jsonl(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A calibration on JSONL."""
    folder = tmp_path_factory.mktemp("jsonl")
    data = write_rows(folder / "a.jsonl", _ROWS)
    assert _calibrate(model, folder / "out", f"--data={data}", "--consistency=textual,risk") == 0
    return folder / "out"


@pytest.mark.parametrize("name", _FORMATS)
def test_same_examples_same_results(
    name: str, model: pathlib.Path, from_jsonl: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The same examples in any format give the same risk table to the byte, the same data hash and choices."""
    output = tmp_path / "out"
    assert _calibrate(model, output, *_FORMATS[name](tmp_path), "--consistency=textual,risk") == 0
    assert (output / "risk_table.csv").read_bytes() == (from_jsonl / "risk_table.csv").read_bytes()
    ours, theirs = (without_time(read_manifest(folder / "manifest.json")) for folder in (output, from_jsonl))
    for manifest in (ours, theirs):
        data = manifest["data"]
        assert isinstance(data, dict)
        patterns = data.pop("patterns")
    assert ours == theirs
    assert patterns != ()
    assert {"rapidfuzz"} <= read_manifest(output / "manifest.json").software.keys()


def test_plain_text_gives_what_jsonl_without_references_gives(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A file of lines is calibrated for textual consistency as rows with inputs only are."""
    lines = tmp_path / "a.txt"
    lines.write_text("".join(f"{row['input']}\n" for row in _ROWS))
    rows = write_rows(tmp_path / "a.jsonl", [{"input": row["input"]} for row in _ROWS])
    tables = []
    for data in (lines, rows):
        output = tmp_path / f"out{data.suffix}"
        assert _calibrate(model, output, f"--data={data}") == 0
        tables.append((output / "risk_table.csv").read_bytes())
    assert tables[0] == tables[1]


def test_generations_know_how_data_were_read(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Field names are part of a run: it is not resumed with others, and the job receives them."""
    rows = [{"question": row["input"], "answer": row["references"][0]} for row in _ROWS]
    data = write_rows(tmp_path / "a.rows", rows)
    named = [f"--data={data}", "--data_format=jsonl", "--inputs_field=question"]
    assert _calibrate(model, tmp_path / "out", *named, "--targets_field=answer", "--consistency=risk") == 0
    (job,) = (tmp_path / "out" / "generations").glob("*/decode.json")
    reading = {"data_format": "jsonl", "inputs_field": "question", "targets_field": "answer"}
    assert json.loads(job.read_text())["reading"] == reading
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / "risk_table.csv").unlink()
    assert _calibrate(model, tmp_path / "out", *named, "--targets_field=question", "--resume") == 2


def test_other_commands_read_every_format(
    model: pathlib.Path, from_jsonl: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decode writes the same rows from Parquet, and verify recognises the calibration set in it."""
    paths = [write_parquet(tmp_path / "a.parquet", _ROWS), write_rows(tmp_path / "a.jsonl", _ROWS)]
    for path in paths:
        flags = [f"--checkpoint={model}", f"--data={path}", f"--output={path}.out", *SHORT_FLAGS]
        assert main(["decode", *flags]) == 0
    assert pathlib.Path(f"{paths[0]}.out").read_bytes() == pathlib.Path(f"{paths[1]}.out").read_bytes()
    capsys.readouterr()
    assert main(["verify", f"--manifest={from_jsonl}", f"--data={paths[0]}", "--batch_size=4"]) == 2
    assert "is the calibration set itself." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data=a.csv"], "a.csv: its suffix tells no format (.jsonl, .txt, each also with .gz; .parquet;"),
        (["--data=a.txt", "--inputs_field=x"], "--inputs_field names a field, and"),
        (["--data=a.txt", "--consistency=risk"], "a.txt, line 1: risk consistency needs references"),
        (["--data=a.csv", "--data_format=parquet"], "a.csv: cannot be read as Parquet"),
        (["--data=a.txt", "--seqio_task=t"], "--seqio_task=t and --data both name the data: leave one of them out."),
        (["--data=a.txt", "--seqio_split=t"], "--seqio_split belongs to --seqio_task, which is missing."),
        (["--data_format=seqio"], "--data_format=seqio needs --seqio_task, the name of the task."),
        (["--data_format=text", "--seqio_task=t"], "--seqio_task is read as seqio, not --data_format=text"),
        (["--seqio_task=calm_beam_no_such_task"], "SeqIO task calm_beam_no_such_task: is not registered."),
        (["--generations=x", "--seqio_task=t"], "--seqio_task decides what is decoded, and --generations=x is"),
    ],
)
def test_what_is_wrong_is_said_first(
    flags: list[str],
    message: str,
    model: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Formats, fields and tasks that cannot be read give status 2, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "a.txt"):
        pathlib.Path(name).write_text("a line\n")
    model_flag = [] if flags[0].startswith("--generations") else [f"--checkpoint={model}"]
    assert main(["calibrate", *model_flag, f"--output={tmp_path / 'out'}", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_shard_of_a_task_is_previewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a task with a thousand shards, one that has examples is previewed; of files, each."""
    opened: list[str] = []

    def read(path: str, reading: Reading) -> Iterator[Example]:
        opened.append(path)
        return iter(() if "00000-of-01000" in path else [build_example(input="a")])

    monkeypatch.setattr(preview, "read_examples", read)
    tasks = {name: [SeqIOShard(name, "test", number, 1000).name() for number in range(1000)] for name in "ab"}
    preview.preview_data(["x.txt", *tasks["a"], *tasks["b"], "y.txt"], Reading())
    assert opened == ["x.txt", *tasks["a"][:2], *tasks["b"][:2], "y.txt"]
    with pytest.raises(DataError, match=r"^--data seqio:a/test: holds no examples\."):
        preview.preview_data(tasks["a"][:1], Reading())


def test_training_reads_every_format(tmp_path: pathlib.Path) -> None:
    """Training reads the same rows from every format, and from a task and its splits."""
    paths = [write_rows(tmp_path / "a.jsonl", _ROWS), write_parquet(tmp_path / "a.parquet", _ROWS)]
    rows = [read_rows("--data", [str(path)], reading=Reading()) for path in paths]
    assert rows[0] == rows[1]
    task: dict[str, Any] = {"output": "x", "seqio_task": "calm_beam_text", "seqio_module": "tests.seqio_tasks"}
    request = TrainRequest(**task, seqio_split="validation", seqio_validation_split="validation")
    assert request.patterns == request.validation_patterns == ("seqio:calm_beam_text/validation",)
    assert TrainRequest(**task).patterns == ("seqio:calm_beam_text/train",)
    assert read_rows("--data", request.patterns or (), reading=request.reading()) == rows[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--data is missing: files with the rows to learn from, or --seqio_task."),
        (
            {"data": "x", "seqio_validation_split": "y"},
            "--seqio_validation_split goes with --seqio_task, and instead of",
        ),
    ],
)
def test_training_without_data(given: dict[str, Any], message: str) -> None:
    """Training without data, or with two sources, is refused."""
    with pytest.raises(UsageError, match=re.escape(message)):
        TrainRequest(output="x", **given)


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        ("tensorflow", ["--data=a.tfrecord"], "reading TFRecord files needs tensorflow"),
        ("seqio", ["--seqio_task=t"], "reading SeqIO tasks needs seqio"),
        ("sacrebleu.metrics", ["--data=a.txt", "--metric=chrf"], 'the metric "chrf" needs sacrebleu.metrics'),
        ("rapidfuzz.distance", ["--data=a.txt", "--metric=edit_distance"], 'metric "edit_distance" needs rapidfuzz'),
    ],
)
def test_missing_extras_are_named(
    module: str,
    flags: list[str],
    message: str,
    model: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A missing package is reported before work starts, with the extra that installs it."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.tfrecord", "a.txt"):
        pathlib.Path(name).write_text("a line\n")
    monkeypatch.setitem(sys.modules, module, None)
    sacrebleu_scores._chrf_scorer.cache_clear()
    sacrebleu_scores._bleu_scorer.cache_clear()
    assert main(["calibrate", f"--checkpoint={model}", f"--output={tmp_path / 'out'}", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "pip install 'calm-beam[" in error
