"""`calm-beam generate` into a folder: from flags to answers in shards, also with local worker processes."""

import gzip
import inspect
import json
import pathlib
import re
import shlex
import shutil
from collections.abc import Callable
from typing import Any

import apache_beam as beam
import numpy as np
import pytest

import calm_beam as calm
from calm_beam import storage
from calm_beam.launch.cli import main
from calm_beam.launch.commands import flag_parsers
from calm_beam.launch.generate import pipeline
from calm_beam.launch.runners import run_pipeline
from calm_beam.outputs import read_answers
from calm_beam.serving import Generator
from tests.answers import THRESHOLD, assert_same_answers, named_rows, write_served_folder
from tests.pipelines import without_engine, write_rows
from tests.worker_pools import flags_of_two_workers

_SHARDS = ("--num_shards=3", "--batch_size=4", "--exit_head=exact")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny model with a vocabulary, its manifest, and forty texts."""
    return write_served_folder(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def whole(folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output of a run that was not interrupted."""
    output = tmp_path_factory.mktemp("whole") / "answers"
    assert main(_flags(folder, output)) == 0
    return output


def _flags(folder: pathlib.Path, output: pathlib.Path | str, *more: str, data: str = "rows.jsonl") -> list[str]:
    paths = [f"--manifest={folder}", f"--checkpoint={folder / 'model'}", f"--input={folder / data}"]
    return ["generate", *paths, f"--output={output}/", *_SHARDS, *more]


def _contents(output: pathlib.Path) -> dict[str, bytes]:
    return {path.relative_to(output).as_posix(): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_answers_in_shards_are_those_of_a_file(
    folder: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slash at the end of --output makes shards whose rows equal those of a file; a summary is printed."""
    output = tmp_path / "answers"
    assert main(_flags(folder, output, "--output_format=jsonl", "--verbose")) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert re.fullmatch(
        r"[\d.]+ KiB of weights(, [\d.]+ KiB for a second copy that native code reads)?, [\d.,]+ GiB left: "
        r"room for [\d,]+ tokens of prompts and outputs at a time",
        lines[0],
    )
    assert lines[1] == (
        "textual, token_f1, delta 0.1, epsilon 0.05 (threshold 0.3), calibrated at 3.00 of 4 layers per token"
    )
    assert "workers: 40 prompts answered in " in printed.err
    assert "tokens a second); the model was loaded 1 time." in printed.err
    assert main([*_flags(folder, tmp_path)[:4], f"--output={tmp_path / 'a.jsonl'}", "--batch_size=4"]) == 0
    here = capsys.readouterr().err.splitlines()[-1]
    told, _, exit_tests = here.rpartition("; ")
    assert told == lines[-1]
    assert re.fullmatch(r"\d+\.\d\d extra exit tests per token, [\d,]+ tokens a second, compiling included", exit_tests)
    single = {row["id"]: row for row in map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())}
    shards = sorted(output.glob("answers-*.jsonl.gz"))
    assert [path.name for path in shards] == [f"answers-0000{index}-of-00003.jsonl.gz" for index in range(3)]
    sharded = [json.loads(line) for path in shards for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert sharded == list(read_answers(str(output))) == list(read_answers(str(whole)))
    for row in sharded:
        other = single.pop(row["id"])
        np.testing.assert_allclose(row.pop("confidences"), other.pop("confidences"), rtol=0, atol=1e-5)
        assert (row, list(row)) == (other, list(other))
    assert not single


def test_python_answers_alike(
    folder: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`calm_beam.generate` takes the command's options, writes the same files, and returns the counts."""
    asked: dict[str, Any] = {"manifest": str(folder), "checkpoint": str(folder / "model")}
    asked["input"] = str(folder / "rows.jsonl")
    output = str(tmp_path / "answers")
    counts = calm.generate(**asked, output=output, num_shards=3, batch_size=4, exit_head="exact")
    assert counts.in_words() in capsys.readouterr().err
    assert _contents(tmp_path / "answers") == _contents(whole)
    flags = vars(flag_parsers("generate")[0].parse_args(["--manifest=m"])).keys() - {"config"}
    assert inspect.signature(calm.generate).parameters.keys() - {"options"} == flags
    with pytest.raises(ValueError, match=r"^output must be a folder for answers in shards; if its name"):
        calm.generate(**asked, output=str(tmp_path / "answers.jsonl"))
    with pytest.raises(ValueError, match=r"^probe_salt belongs to probe_share, which is missing\.$"):
        calm.generate(**asked, output=output, probe_salt="x")


def test_only_missing_shards_are_answered(
    folder: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --resume only missing shards are answered, to the same bytes; without it the folder is refused."""
    output = tmp_path / "answers"
    shutil.copytree(whole, output)
    (output / "complete.json").unlink()
    (output / "answers-00001-of-00003.parquet").unlink()
    (output / ".answers-00001-of-00003.parquet.0badcafe.tmp").write_bytes(b"PAR1 half")
    without_shards = [flag for flag in _flags(folder, output) if not flag.startswith("--num_shards")]
    assert main(without_shards) == 2
    assert _error(capsys) == (
        f"calm-beam generate: --output {output}: holds answers of a run that did not finish (2 of at most 3 shards "
        "answered). Pass --resume to go on with them, --overwrite to begin again, or choose another folder."
    )
    # The number of shards is that of the resumed run.
    assert main([*without_shards, "--resume"]) == 0
    assert "2 of at most 3 shards answered in" in capsys.readouterr().err
    assert _contents(output) == _contents(whole)
    # A folder that exists needs no slash.
    assert main([*(flag.rstrip("/") for flag in without_shards), "--resume"]) == 0
    assert "40 were stored already; no model was loaded." in capsys.readouterr().err
    assert _contents(output) == _contents(whole)
    assert main([*_flags(folder, output), "--overwrite"]) == 0
    assert _contents(output) == _contents(whole)


def test_killed_attempts_leave_nothing(
    folder: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unfinished files of killed workers are gone once a runner that tried again has finished."""
    output = tmp_path / "answers"

    def killed_once(run: beam.Pipeline) -> None:
        run_pipeline(run)
        (output / ".answers-00001-of-00003.parquet.0badcafe.tmp").write_bytes(b"PAR1 half")

    monkeypatch.setattr(pipeline, "run_pipeline", killed_once)
    assert main(_flags(folder, output)) == 0
    assert _contents(output) == _contents(whole)


def _other_data(folder: pathlib.Path) -> list[str]:
    rows = named_rows(40)
    write_rows(folder / "rows.jsonl", [*rows[:-1], {**rows[-1], "input": "the fox"}])
    return []


def _fewer_data(folder: pathlib.Path) -> list[str]:
    write_rows(folder / "rows.jsonl", [])
    return []


def _other_share(folder: pathlib.Path) -> list[str]:
    return ["--probe_share=10%"]


def _other_format(folder: pathlib.Path) -> list[str]:
    return ["--output_format=jsonl"]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        (_other_data, 1, "was answered from other prompts than the data give now for shard"),
        (_fewer_data, 2, "rows.jsonl: holds no prompts."),
        (_other_share, 2, "was begun in another way: probe.salt is None there"),
        (_other_format, 2, "was begun in another way: output_format is 'parquet' there, 'jsonl' here"),
    ],
)
def test_answers_of_different_runs_are_not_mixed(
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[pathlib.Path], list[str]],
    status: int,
    message: str,
) -> None:
    """A run with other settings is not resumed, and stays unchanged."""
    folder = write_served_folder(tmp_path / "served")
    output = tmp_path / "answers"
    assert main(_flags(folder, output)) == 0
    (output / "complete.json").unlink()
    before = _contents(output)
    capsys.readouterr()
    assert main([*_flags(folder, output, *change(folder)), "--resume"]) == status
    assert message in _error(capsys)
    assert _contents(output) == before


@pytest.mark.parametrize(("line", "status"), [(1, 2), (140, 1)])
def test_a_row_that_cannot_be_read_ends_the_run(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], line: int, status: int
) -> None:
    """A row that is no JSON ends the run also with --on_error=list, whose meaning the message gives."""
    lines = [json.dumps(row) for row in named_rows(145)]
    lines[line - 1] = '{"id": '
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(lines) + "\n")
    flags = [*_flags(folder, tmp_path / "answers"), f"--input={data}"]
    assert main(flags) == status
    assert "--on_error" not in _error(capsys)
    assert main([*flags, "--on_error=list"]) == status
    printed = _error(capsys)
    assert f"rows.jsonl, line {line}: " in printed
    assert "--on_error=list is about prompts that cannot be decoded: a row that cannot be read ends the run." in printed
    assert not (tmp_path / "answers" / "complete.json").exists()


def test_a_run_that_failed_leaves_nothing_or_says_what(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad prompt ends the run with its place by default; --on_error=list lists it, also when resumed."""
    rows = [*named_rows(12), {"id": "bad", "input_ids": [10**6]}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    output = tmp_path / "answers"
    flags = [*_flags(folder, output), f"--input={data}"]
    assert main([*flags, "--num_shards=1"]) == 1
    assert _error(capsys) == (
        f"calm-beam generate: {data}, line 13 (bad): token ids must be integers from 0 to 63, got 1000000. Pass "
        "--on_error=list to list such prompts in failures.jsonl, and to answer the others."
    )
    assert not output.exists()
    assert main([*flags, "--on_error=list"]) == 0
    printed = capsys.readouterr().err
    assert f"1 prompt has no answer: {output}/failures.jsonl says why." in printed
    assert [json.loads(line)["id"] for line in (output / "failures.jsonl").read_text().splitlines()] == ["bad"]
    assert len(list(read_answers(str(output)))) == 12
    assert main([*flags, "--resume"]) == 1
    assert "Go on with --on_error=list, or answer again with --overwrite." in _error(capsys)
    assert (output / "complete.json").exists()


def test_losses_are_watched(folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`monitor` reads what --probe_share measures, and resuming measures nothing twice."""
    output = tmp_path / "answers"
    flags = _flags(folder, output, "--probe_share=50%", "--probe_salt=secret")
    assert main(flags) == 0
    _, _, command = capsys.readouterr().err.partition("losses measured:\n  calm-beam ")
    # The model is not trained: its losses may raise an alarm.
    assert main(shlex.split(command.splitlines()[0])) in (0, 3)
    rows = [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()]
    names = [row["id"] for row in rows]
    assert 0 < len(names) == len(set(names)) < 40
    (output / "complete.json").unlink()
    (output / "answers-00002-of-00003.parquet").unlink()
    assert main([*flags, "--resume"]) == 0
    assert [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()] == rows
    capsys.readouterr()
    assert main(["monitor", f"--manifest={folder}", f"--losses={output}/losses.jsonl"]) in (0, 3)
    assert f"{len(rows)} losses" in capsys.readouterr().out


def test_a_share_that_draws_nobody_is_reported(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no prompt was sampled, a line says that there is no file of losses."""
    output = tmp_path / "answers"
    assert main(_flags(folder, output, "--probe_share=1e-9")) == 0
    assert "--probe_share=1e-09 drew no prompt whose loss counts" in capsys.readouterr().err
    assert not list(output.glob("losses*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output=a.jsonl", "--resume"], "--resume belongs to answers in shards. Pass --input, and a folder"),
        (["--prompt=a", "--probe_share=10%"], "--probe_share belongs to answers in shards."),
        (["--output=a.jsonl", "--runner=FlinkRunner"], "--runner belongs to answers in shards."),
        (["--input=rows.jsonl", "--direct_num_workers=2"], "--direct_num_workers belongs to answers in shards."),
        (["--output=a/", "--prompt=a"], "--prompt is answered at once. Leave it out, or name a file"),
        (["--output=a/"], "--input is missing: files of prompts"),
        (["--output=a/", "--input=rows.jsonl", "--show_layers"], "--show_layers colours what is printed"),
        (["--output=a/", "--input=rows.jsonl", "--resume", "--overwrite"], "leave one of them out"),
        (["--output=a/", "--input=rows.jsonl", "--probe_salt=x"], "--probe_salt belongs to --probe_share"),
        (["--output=a/", "--input=absent.jsonl"], "--input absent.jsonl: no such file."),
        (["--output=a/", "--input=rows.jsonl", "--delta=0.3"], "no calibration has delta=0.3. The manifest has:"),
        (["--output=a/", "--input=rows.jsonl", "--runer=FlinkRunner"], "unknown flag --runer. Did you mean --runner?"),
        (["--output=rows.jsonl/", "--input=rows.jsonl"], "is a file, expected a folder"),
        (["--output=a/", "--input=rows.jsonl", "--probe_share=2"], "expected a share above 0 and below 1"),
        (["--output=a/", "--input=rows.jsonl", "--accelerator=nvidia-l4"], "--accelerator is for --runner=Dataflow"),
    ],
)
def test_bad_usage_is_refused(
    folder: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    message: str,
) -> None:
    """Bad usage gets a message that says what is wrong, and nothing is written."""
    monkeypatch.chdir(folder)
    assert main(["generate", "--manifest=manifest.json", "--checkpoint=model", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "a").exists()


def test_another_model_is_refused(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the calibrated model answers; another one is refused before anything is written."""
    shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "relative_max_distance": 64}))
    assert main([*_flags(folder, tmp_path / "answers"), f"--checkpoint={tmp_path / 'model'}"]) == 2
    assert "the manifest is about a model with fingerprint" in _error(capsys)
    assert not (tmp_path / "answers").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("output_format", ["parquet", "jsonl"])
def test_cloud_storage(
    folder: pathlib.Path, whole: pathlib.Path, bucket: str, capsys: pytest.CaptureFixture[str], output_format: str
) -> None:
    """With model, manifest, prompts and answers in a bucket, answers equal those on disk and can be resumed."""
    for path in (folder / "manifest.json", folder / "rows.jsonl", *(folder / "model").iterdir()):
        with storage.replacing(f"{bucket}/{path.relative_to(folder).as_posix()}") as temporary:
            shutil.copyfile(path, temporary)
    output = f"{bucket}/answers"
    paths = [f"--manifest={bucket}", f"--checkpoint={bucket}/model", f"--input={bucket}/*.jsonl"]
    flags = ["generate", *paths, f"--output={output}/", *_SHARDS, f"--output_format={output_format}"]
    assert main([*flags, "--probe_share=50%"]) == 0
    assert list(read_answers(output)) == list(read_answers(str(whole)))
    names = {path.removeprefix(f"{output}/") for path in storage.list_files(f"{output}/*")}
    suffix = "parquet" if output_format == "parquet" else "jsonl.gz"
    shards = {f"answers-0000{index}-of-00003.{suffix}" for index in range(3)}
    assert names == {"generate.json", "complete.json", "losses.jsonl", *shards}
    storage.remove_file(f"{output}/answers-00001-of-00003.{suffix}")
    storage.remove_file(f"{output}/complete.json")
    assert main([*flags, "--probe_share=50%"]) == 2
    # JSON lines are made again from the part that is there.
    found = 2 if output_format == "parquet" else 3
    assert f"({found} of at most 3 shards answered)" in _error(capsys)
    assert main([*flags, "--probe_share=50%", "--resume"]) == 0
    assert {path.removeprefix(f"{output}/") for path in storage.list_files(f"{output}/*")} == names
    assert list(read_answers(output)) == list(read_answers(str(whole)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["processes", "job service"])
def test_two_workers_give_the_same(kind: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Two workers give the answers, failures and losses of one process; near ties would be counted."""
    rows: list[dict[str, Any]] = [*named_rows(40), {"id": "bad", "input_ids": [10**6]}]
    data = f"--input={write_rows(tmp_path / 'rows.jsonl', rows)}"
    asked = (data, "--on_error=list", "--probe_share=30%")
    assert main(_flags(folder, tmp_path / "one", *asked)) == 0
    with flags_of_two_workers(kind) as workers:
        assert main(_flags(folder, tmp_path / "two", *asked, *workers)) == 0
    for name in ("failures.jsonl", "losses.jsonl"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    # Workers elsewhere use XLA unless told otherwise, since their processors are unknown here.
    for name in ("generate.json", "complete.json"):
        one, two = (json.loads((tmp_path / output / name).read_text()) for output in ("one", "two"))
        assert without_engine(two) == without_engine(one)
    generator = Generator.from_manifest(folder / "manifest.json", folder / "model")
    expected = {row["id"]: generator.generate(row["input"]) for row in rows[:-1]}
    for output in ("one", "two"):
        answers = read_answers(str(tmp_path / output))
        assert assert_same_answers(answers, expected, threshold=THRESHOLD) == 0
