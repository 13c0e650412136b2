"""Stored generations can be resumed or calibrated again; those of other runs are refused."""

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import apache_beam as beam
import pytest

from calm_beam.launch.calibrate import run
from calm_beam.launch.cli import main
from calm_beam.launch.runners import run_pipeline
from calm_beam.launch.runners.run import RunMetrics
from calm_beam.manifest import Manifest, read_manifest
from calm_beam.outputs import (
    COMPLETE,
    DecodeJob,
    FinishedSweep,
    OutputsError,
    StoredGenerations,
    read_generations,
    stored_shard,
    write_generations,
)
from calm_beam.serving import Generator
from calm_beam.transforms.scoring import ShardScorer
from tests.pipelines import (
    BROKEN_ID,
    SHORT_FLAGS,
    assert_same_generations,
    id_rows,
    without_time,
    write_model,
    write_rows,
)
from tests.plans import all_specs, build_plan
from tests.sampling import sampled

_ASKED = ("--consistency=textual,risk", "--metric=token_f1", "--delta=0.3,0.6", "--epsilon=0.1")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary, whose logits are not finite once a prompt has `BROKEN_ID`."""
    return write_model(tmp_path_factory.mktemp("resume") / "model", is_broken=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Thirty prompts of token ids in clusters of five."""
    rows = [{**row, "page": index // 5} for index, row in enumerate(id_rows(30))]
    return write_rows(tmp_path_factory.mktemp("resume") / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def whole(model: pathlib.Path, data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output of a run that was not interrupted."""
    output = tmp_path_factory.mktemp("resume") / "whole"
    assert _calibrate(model, data, output) == 0
    return output


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    return main(
        ["calibrate", f"--checkpoint={model}", f"--data={data}", f"--output={output}", *SHORT_FLAGS, *_ASKED, *flags]
    )


def _recalibrate(generations: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    return main(["calibrate", f"--generations={generations}", f"--output={output}", *_ASKED, *flags])


def _folder(output: pathlib.Path) -> pathlib.Path:
    (folder,) = (output / "generations").iterdir()
    return folder


def _interrupted(whole: pathlib.Path, output: pathlib.Path, *, lost: int = 1) -> pathlib.Path:
    """Copies an output without some of its shards, as a killed run leaves it; returns the folder of generations."""
    shutil.copytree(whole, output)
    for name in ("manifest.json", "risk_table.csv"):
        (output / name).unlink()
    folder = _folder(output)
    (folder / COMPLETE).unlink()
    shards = sorted(folder.glob("*.parquet"))
    for shard in shards[:lost]:
        shard.unlink()
    (folder / f".{shards[0].name}.0badcafe.tmp").write_bytes(b"PAR1 half")
    (output / ".manifest.json.0badcafe.tmp").write_bytes(b"{")
    return folder


def _check_same(output: pathlib.Path, whole: pathlib.Path, *, earlier: int = 0) -> None:
    """Checks that two results are equal to the byte, but for time and the number of plans before them."""
    assert (output / "risk_table.csv").read_bytes() == (whole / "risk_table.csv").read_bytes()
    found, expected = (read_manifest(each / "manifest.json") for each in (output, whole))
    assert len(found.earlier_plans or ()) == earlier
    assert without_time(dataclasses.replace(found, earlier_plans=None)) == without_time(expected)


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_killed_attempts_leave_nothing(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unfinished files of killed workers are gone once a runner that tried again has finished."""

    def killed_once(pipeline: beam.Pipeline) -> RunMetrics | None:
        metrics = run_pipeline(pipeline)
        (_folder(tmp_path / "out") / ".timing-00001-of-00003.json.0badcafe.tmp").write_bytes(b"{")
        return metrics

    monkeypatch.setattr(run, "run_pipeline", killed_once)
    assert _calibrate(model, data, tmp_path / "out") == 0
    assert not list((tmp_path / "out").rglob("*.tmp"))
    _check_same(tmp_path / "out", whole)


@pytest.mark.parametrize("lost", sampled([0, 1, 2], keep=(1,)))
def test_only_missing_shards_are_decoded(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    lost: int,
) -> None:
    """With --resume, finished shards are kept, the rest is decoded, and the result is that of an uninterrupted run."""
    folder = _interrupted(whole, tmp_path / "out", lost=lost)
    before = {path: path.stat() for path in folder.glob("*.parquet")}
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 0
    assert (
        f"--resume: found {3 - lost} of at most 3 shards decoded in {folder}; those of unchanged examples stay as they "
        "are\n"
    ) in capsys.readouterr().err
    for path, stat in before.items():
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    _check_same(tmp_path / "out", whole)
    assert {path.name for path in folder.iterdir()} == {path.name for path in _folder(whole).iterdir()}
    for path in _folder(whole).glob("*.parquet"):
        assert_same_generations(read_generations(folder / path.name), read_generations(path))
    assert not list((tmp_path / "out").rglob(".*"))


def test_an_unfinished_run_is_not_begun_anew_by_accident(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unfinished generations need --resume or --overwrite, which starts again; neither or both is refused."""
    output = tmp_path / "out"
    folder = _interrupted(whole, output)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert _calibrate(model, data, output) == 2
    assert _error(capsys) == (
        f"calm-beam calibrate: --output {output}: holds generations of a run that did not finish (2 of at most 3 "
        "shards decoded). Pass --resume to go on with them, --overwrite to begin again, or choose another directory."
    )
    assert _calibrate(model, data, output, "--resume", "--overwrite") == 2
    assert "--resume goes on with what is there, --overwrite begins again: leave one of them out." in _error(capsys)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    # A second name keeps a removed file's inode from being given to a new one.
    kept = {path: tmp_path / path.name for path in folder.glob("*.parquet")}
    for path, name in kept.items():
        name.hardlink_to(path)
    assert _calibrate(model, data, output, "--overwrite") == 0
    assert len(kept) == 2
    assert not any(name.samefile(path) for path, name in kept.items())
    _check_same(output, whole)


def test_resuming_nothing_and_what_is_done(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a run, --resume starts one and says so; a finished run stays, and other settings are refused."""
    output = tmp_path / "out"
    assert _calibrate(model, data, output, "--resume") == 0
    assert f"--resume: {output} holds no generations yet; starting from the beginning" in capsys.readouterr().err
    _check_same(output, whole)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert _calibrate(model, data, output, "--resume") == 0
    printed = capsys.readouterr()
    assert f"--resume: {output / 'manifest.json'} is finished; nothing is left to do." in printed.err
    assert f"Manifest: {output / 'manifest.json'}" in printed.out
    # Nothing was decoded in whatever time the command took.
    assert re.search(r"\d+ examples; ", printed.out)
    assert _calibrate(model, data, output, "--resume", "--delta=0.2") == 2
    assert "is finished, and was asked for something else. A question after its results were seen needs" in (
        _error(capsys)
    )
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (("--max_decode_length=7",), "settings.max_decode_length is 6 there, 7 here"),
        (("--confidence=softmax_max",), "settings.rule.confidence is 'softmax' there, 'softmax_max' here"),
        (("--thresholds=0.9,0.5",), "settings.thresholds is [0.9, 0.5, 0.2, 0.05, 0.0] there, [0.9, 0.5] here"),
        (("--dtype=bfloat16",), "dtype is 'float32' there, 'bfloat16' here"),
        (("--matmul_precision=high",), "settings.arithmetic.matmul_precision is None there, 'high' here"),
        (("--num_shards=4",), "num_shards is 3 there, 4 here"),
        (("--on_long=error",), "on_long is 'truncate' there, 'error' here"),
        (("--cluster_key=page",), "cluster_key is None there, 'page' here"),
    ],
)
def test_other_settings_are_refused(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    difference: str,
) -> None:
    """--resume with another setting is refused before decoding, with both values, and touches nothing."""
    folder = _interrupted(whole, tmp_path / "out")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert _calibrate(model, data, tmp_path / "out", "--resume", *flags) == 2
    message = _error(capsys)
    assert message.startswith(f"calm-beam calibrate: --resume: {folder} was begun in another way: ")
    assert difference in message
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_bfloat16_is_resumed_named_and_served(
    model: pathlib.Path, data: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A run in bfloat16 is resumed to the same bytes, its manifest says so, and the generator uses it."""
    assert _calibrate(model, data, tmp_path / "one", "--dtype=bfloat16") == 0
    _interrupted(tmp_path / "one", tmp_path / "two")
    assert _calibrate(model, data, tmp_path / "two", "--dtype=bfloat16", "--resume") == 0
    _check_same(tmp_path / "two", tmp_path / "one")
    assert _folder(tmp_path / "one").name != _folder(whole).name
    decodes = [read_manifest(each / "manifest.json").decode for each in (tmp_path / "one", whole)]
    assert [decode.dtype for decode in decodes] == ["bfloat16", "float32"]
    assert [decode.matmul_precision for decode in decodes] == [None, None]
    generator = Generator.from_manifest(tmp_path / "one" / "manifest.json", model, consistency="textual", delta=0.6)
    thresholds = (None, *DecodeJob.read(str(_folder(tmp_path / "one"))).settings.thresholds)
    lane = thresholds.index(generator.entry.threshold)
    found = []
    for path in _folder(tmp_path / "one").glob("*.parquet"):
        for generation in read_generations(path):
            answer = generator.generate(generation.example.input_ids or ())
            found.append(answer.tokens == tuple(generation.outputs[lane].tokens))
    assert len(found) == 30
    # A sum next to a tie of bfloat16 numbers may be rounded either way.
    assert sum(found) >= 27


def test_another_model_is_refused(
    data: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--resume with other weights is refused by their fingerprints."""
    _interrupted(whole, tmp_path / "out")
    other = write_model(tmp_path / "other", seed=1)
    assert _calibrate(other, data, tmp_path / "out", "--resume") == 2
    assert re.search(r"model\.fingerprint is 'sha256:\w{64}' there, 'sha256:\w{64}' here", _error(capsys))


@pytest.mark.parametrize("linked", ["generations", "run"])
def test_overwrite_follows_no_link(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    linked: str,
) -> None:
    """Neither generations behind a link nor a result next to it is removed: the run ends with the link's name."""
    shutil.copytree(whole, tmp_path / "out")
    place = tmp_path / "out" / "generations" if linked == "generations" else _folder(tmp_path / "out")
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert _calibrate(model, data, tmp_path / "out", "--overwrite") == 2
    assert f"calm-beam calibrate: --output {place}: is a symbolic link, and what lies behind it is not" in _error(
        capsys
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_output_may_be_a_link(
    model: pathlib.Path, data: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """An output directory that is a link is written to, and only our files in it are replaced."""
    shutil.copytree(whole, tmp_path / "disk")
    (tmp_path / "disk" / "notes.txt").write_text("kept")
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    assert _calibrate(model, data, tmp_path / "out", "--overwrite") == 0
    assert (tmp_path / "disk" / "notes.txt").read_text() == "kept"
    _check_same(tmp_path / "disk", whole)


def _other_text(rows: list[dict[str, object]]) -> None:
    rows[3]["reference_ids"] = [[9, 9]]


def _swapped(rows: list[dict[str, object]]) -> None:
    rows[3], rows[4] = rows[4], rows[3]


def _none_of_a_shard(rows: list[dict[str, object]]) -> None:
    rows[:] = [row for row in rows if row["input_ids"] == rows[0]["input_ids"]]


@pytest.mark.parametrize(
    ("change", "what"),
    sampled(
        [
            (_other_text, r" \(example 'row-3' has another reference_ids\)"),
            (_swapped, r" \(example 'row-[34]' has another line\)"),
            (list.pop, r" \(example 'row-29' is gone\)"),
            (_none_of_a_shard, r" \(example 'row-\d+' is gone\)"),
        ],
        keep=(0, 3),
    ),
)
def test_other_data_are_refused(
    model: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[list[dict[str, object]]], object],
    what: str,
) -> None:
    """If the data have changed, --resume says where and decodes nothing; with the old data it continues."""
    rows: list[dict[str, object]] = list(id_rows(30))
    data = write_rows(tmp_path / "rows.jsonl", rows)
    assert _calibrate(model, data, tmp_path / "whole") == 0
    content = data.read_bytes()
    folder = _interrupted(tmp_path / "whole", tmp_path / "out")
    present = sorted(folder.glob("*.parquet"))
    change(rows)
    write_rows(data, rows)
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 1
    assert re.search(
        r"generations-0000\d-of-00003\.parquet: (was decoded from other examples than the data give now for shard \d "
        rf"of 3, so the data have changed since{what}\. Restore them, or decode again with --overwrite\.|the data have "
        r"no example for this file, so it was decoded from other data\. Restore the data, or decode again with "
        r"--overwrite\.)$",
        _error(capsys),
    )
    assert sorted(folder.glob("*.parquet")) == present
    assert not (tmp_path / "out" / "manifest.json").exists()
    data.write_bytes(content)
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 0
    _check_same(tmp_path / "out", tmp_path / "whole")


def test_a_finished_result_of_other_data_is_not_taken_for_this_one(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --resume, a manifest counts as finished only if its data are those of now."""
    rows: list[dict[str, object]] = list(id_rows(30))
    data = write_rows(tmp_path / "rows.jsonl", rows)
    assert _calibrate(model, data, tmp_path / "out") == 0
    content = data.read_bytes()
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    _other_text(rows)
    write_rows(data, rows)
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 2
    assert _error(capsys) == (
        f"calm-beam calibrate: --resume: {tmp_path / 'out' / 'manifest.json'} is finished, and the data have changed "
        "since: it is about the examples that were there. Restore them, calibrate the new ones with another --output, "
        "or pass --overwrite to begin again."
    )
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    data.write_bytes(content)
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 0


def test_a_damaged_shard_is_refused(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A shard that is not one of our Parquet files is named, and not overwritten."""
    folder = _interrupted(whole, tmp_path / "out")
    damaged = sorted(folder.glob("*.parquet"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 1
    assert f"{damaged}: is damaged (ArrowInvalid: Parquet magic bytes not found in footer." in _error(capsys)


def _broken_rows() -> list[dict[str, object]]:
    return [
        *id_rows(13),
        *({"id": f"broken-{i}", "input_ids": [i + 3, BROKEN_ID], "reference_ids": [[5]]} for i in range(3)),
    ]


@pytest.mark.slow
def test_a_failed_run_goes_on_with_the_worst_case(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards finished before a failure are kept; --resume --on_error=worst_case continues and lists failures by id."""
    data = write_rows(tmp_path / "rows.jsonl", _broken_rows())
    assert _calibrate(model, data, tmp_path / "out", "--num_shards=40") == 1
    message = _error(capsys)
    assert re.match(r"calm-beam calibrate: example broken-\d: the model gave logits that are not finite\.", message)
    kept = len(list((tmp_path / "out").rglob("*.parquet")))
    assert kept
    assert (
        f"{kept} of at most 40 shards decoded in {_folder(tmp_path / 'out')}: --resume goes on from there." in message
    )
    flags = ("--num_shards=40", "--on_error=worst_case")
    assert _calibrate(model, data, tmp_path / "out", *flags, "--resume") == 0
    assert "3 failed." in capsys.readouterr().out
    assert _calibrate(model, data, tmp_path / "whole", *flags) == 0
    # Failure handling is part of the plan; the failed run has shown nothing.
    _check_same(tmp_path / "out", tmp_path / "whole", earlier=1)
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert [plan.answered for plan in manifest.earlier_plans or ()] == [False]
    ids = ("broken-0", "broken-1", "broken-2")
    assert (manifest.data.examples, manifest.data.failed, manifest.data.failed_ids) == (16, 3, ids)
    lines = [json.loads(line) for line in (tmp_path / "out" / "failures.jsonl").read_text().splitlines()]
    assert lines == [{"id": name, "reason": "the model gave logits that are not finite"} for name in ids]


def test_failures_are_not_forgotten(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stored failures are refused where failures are not allowed: on --resume, by --generations, above the limit."""
    data, output = write_rows(tmp_path / "rows.jsonl", _broken_rows()), tmp_path / "out"
    assert _calibrate(model, data, output, "--on_error=worst_case", "--max_failures=2") == 1
    message = _error(capsys)
    assert "3 examples failed, more than the 2 that may. The first: broken-0 (the model gave logits" in message
    assert "pass --max_failures=3 or more." in message
    assert not (output / "manifest.json").exists()
    assert _calibrate(model, data, output, "--resume") == 1
    assert re.search(
        r"parquet: holds \d examples that could not be decoded, broken-\d first: the model", _error(capsys)
    )
    assert _calibrate(model, data, output, "--resume", "--on_error=worst_case", "--max_failures=3") == 0
    capsys.readouterr()
    assert _recalibrate(output, tmp_path / "again") == 2
    assert "3 of the examples in " in _error(capsys)
    assert _recalibrate(output, tmp_path / "again", "--on_error=worst_case", "--max_failures=2") == 1
    assert "3 examples failed, more than the 2 that may." in _error(capsys)
    assert _recalibrate(output, tmp_path / "again", "--on_error=worst_case") == 0
    _check_same(tmp_path / "again", output)
    assert (tmp_path / "again" / "failures.jsonl").read_text() == (output / "failures.jsonl").read_text()


def test_what_finished_nothing_leaves_nothing(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that fails while reading leaves only its plan, and the next one starts without a flag."""
    twice = write_rows(tmp_path / "rows.jsonl", [*id_rows(3), id_rows(1)[0]])
    assert _calibrate(model, twice, tmp_path / "out") == 1
    assert _error(capsys).endswith("an example that counts twice voids the guarantee.")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plans"]
    mine = tmp_path / "out" / "generations" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert _calibrate(model, twice, tmp_path / "out") == 1
    listed = tmp_path / "out" / "plans" / "00001.json"
    assert sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file()) == [mine, listed]
    # A run that is killed before its first shard leaves these files.
    begun = mine.parent / "0123456789abcdef01234567"
    begun.mkdir()
    (begun / "decode.json").write_text("{}")
    assert _calibrate(model, data, tmp_path / "out") == 0
    assert mine.read_text() == "mine"
    assert not begun.exists()


@pytest.mark.parametrize("flags", [(), ("--resume",)])
def test_what_was_killed_at_its_beginning_leaves_nothing(
    flags: tuple[str, ...], model: pathlib.Path, data: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The next run removes all that a run leaves that was killed while it wrote its first file or shard."""
    folder = tmp_path / "out" / "generations" / _folder(whole).name
    folder.mkdir(parents=True)
    for name in (".decode.json.0badcafe.tmp", ".generations-00000-of-00003.parquet.0badcafe.tmp"):
        (folder / name).write_bytes(b"half")
    assert _calibrate(model, data, tmp_path / "out", *flags) == 0
    assert not list((tmp_path / "out").rglob(".*"))


def test_what_was_killed_at_its_end_leaves_nothing(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If only the report was missing, --resume removes its parts, and says how to build it."""
    shutil.copytree(whole, tmp_path / "out")
    (tmp_path / "out" / "report.html").rename(tmp_path / "out" / ".report.html.0badcafe.tmp")
    (_folder(tmp_path / "out") / ".timing-run.json.0badcafe.tmp").write_bytes(b"{")
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 0
    assert not list((tmp_path / "out").rglob(".*"))
    assert "its report is missing: calm-beam report --calibration=" in capsys.readouterr().err


def test_an_interrupt_says_how_to_go_on(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C ends with status 130, names what is kept, and --resume continues with it."""

    def interrupted(pipeline: object) -> None:
        run_pipeline(pipeline)
        (tmp_path / "out" / "manifest.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_pipeline", interrupted)
    assert _calibrate(model, data, tmp_path / "out") == 130
    folder = _folder(tmp_path / "out")
    assert _error(capsys) == (
        f"calm-beam calibrate: interrupted; 3 of at most 3 shards decoded in {folder}: --resume goes on from there."
    )
    monkeypatch.undo()
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 0


@pytest.mark.slow
def test_repeated_bundles_count_once(
    model: pathlib.Path, data: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A runner that runs every bundle twice gives the same result, for examples and for clusters."""
    assert _calibrate(model, data, tmp_path / "out", "--direct_runner_bundle_repeat=1") == 0
    _check_same(tmp_path / "out", whole)
    repeated, once = tmp_path / "repeated", tmp_path / "once"
    assert _calibrate(model, data, once, "--cluster_key=page") == 0
    assert _calibrate(model, data, repeated, "--cluster_key=page", "--direct_runner_bundle_repeat=1") == 0
    _check_same(repeated, once)


@pytest.mark.parametrize(
    ("decoded", "again"),
    sampled(
        [
            ((), ("--metric=rouge_l,token_f1", "--delta=0.1,0.2", "--epsilon=0.2")),
            ((), ("--p_value=hoeffding", "--risk_loss=relu", "--procedure=holm", "--joint", "--seed=3")),
            (("--thresholds=0.5,0.9,0",), ("--thresholds=0,0.5,0.9",)),
            (("--thresholds=0.5,0",), ("--grid_step=0.5",)),
        ],
        keep=(1, 3),
    ),
)
def test_stored_generations_are_calibrated_again(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    decoded: tuple[str, ...],
    again: tuple[str, ...],
) -> None:
    """Recalibration with other metrics, tolerances, tests or grids proves what a run with those flags does."""
    flags = tuple(flag for flag in again if not flag.startswith(("--thresholds", "--grid_step")))
    assert _calibrate(model, data, tmp_path / "again", *decoded, *flags) == 0
    outputs = tmp_path / "outputs"
    shutil.copytree(whole, outputs)
    for place in (outputs, _folder(outputs)):
        output = tmp_path / f"again-{place.name}"
        assert _recalibrate(place, output, *again) == 0
        # The same plan by another name of the folder counts once.
        _check_same(output, tmp_path / "again", earlier=int(bool(again)))
        assert {path.name for path in output.iterdir()} == {"manifest.json", "report.html", "risk_table.csv"}


def test_a_result_is_replaced_beside_its_generations(
    whole: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result next to its generations is replaced only with --overwrite, which keeps the generations."""
    output = tmp_path / "out"
    shutil.copytree(whole, output)
    before = {path.name: path.read_bytes() for path in _folder(output).iterdir()}
    assert _recalibrate(output, output, "--delta=0.2") == 2
    assert f"--output {output}: holds a manifest already." in _error(capsys)
    assert _recalibrate(output, output, "--delta=0.2", "--overwrite") == 0
    assert {entry.delta for entry in read_manifest(output / "manifest.json").calibrations} == {0.2}
    assert {path.name: path.read_bytes() for path in _folder(output).iterdir()} == before


def test_clusters_are_calibrated_again(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stored clusters give the manifest of their run; a recalibration cannot add or drop clusters."""
    assert _calibrate(model, data, tmp_path / "once", "--cluster_key=page") == 0
    assert _recalibrate(tmp_path / "once", tmp_path / "again", "--cluster_key=page") == 0
    _check_same(tmp_path / "again", tmp_path / "once")
    capsys.readouterr()
    assert _recalibrate(tmp_path / "once", tmp_path / "no") == 2
    assert _error(capsys).endswith("is no choice of the calibration. Pass --cluster_key=page.")
    assert _recalibrate(whole, tmp_path / "no", "--cluster_key=page") == 2
    assert _error(capsys).endswith("is no choice of the calibration. Leave it out.")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--checkpoint=model",), "--checkpoint decides what is decoded, and --generations="),
        (("--data", "rows.jsonl"), "--data decides what is decoded, and --generations="),
        (("--confidence=softmax",), "--confidence decides what is decoded, and --generations="),
        (("--patience=3",), "--patience decides what is decoded, and --generations="),
        (("--dtype=float32",), "--dtype decides what is decoded, and --generations="),
        (("--resume",), "--resume decides what is decoded, and --generations="),
        (("--thresholds=0.9,0.7,0.3",), "thresholds 0.7, 0.3 were not decoded: take some of 0.9, 0.5, 0.2, 0.05, 0,"),
        (("--grid_step=0.4",), "thresholds 0.8, 0.4 were not decoded"),
        (("--thresholds=0.9", "--grid_step=0.5"), "--thresholds and --grid_step=0.5 both give a grid"),
    ],
)
def test_what_generations_decide_is_refused(
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    """With --generations, flags that change what is decoded, and thresholds that were not decoded, are refused."""
    assert _recalibrate(whole, tmp_path / "out", *flags) == 2
    assert message in _error(capsys)
    assert not (tmp_path / "out").exists()


def test_unfinished_generations_are_not_calibrated(
    whole: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--generations refuses a folder that is empty or lacks the mark of success."""
    _interrupted(whole, tmp_path / "out")
    assert _recalibrate(tmp_path / "out", tmp_path / "again") == 2
    assert "has no complete.json, so decoding did not finish there. Repeat that run with --resume first." in _error(
        capsys
    )
    assert _recalibrate(tmp_path, tmp_path / "again") == 2
    assert f"--generations {tmp_path}: no decode.json there and no generations below it, so" in _error(capsys)


def test_generations_need_no_model(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Recalibration works without the model, JAX and Flax."""
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('jax', 'flax'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from calm_beam.launch.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    flags = [f"--generations={whole}", f"--output={tmp_path / 'out'}", *_ASKED]
    done = subprocess.run(
        [sys.executable, "-c", code, "calibrate", *flags], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    _check_same(tmp_path / "out", whole)


def _scorer(folder: pathlib.Path) -> tuple[ShardScorer, FinishedSweep]:
    job = DecodeJob.read(str(folder))
    finished = FinishedSweep.read(str(folder), job)
    specs = all_specs(consistencies=("textual",), metrics=("token_f1",), deltas=(0.3,), epsilons=(0.1,))
    plan = build_plan(specs, job.settings)
    stored = StoredGenerations(directory=str(folder), job=job)
    scorer = ShardScorer(plan, stored)
    scorer.setup()
    return scorer, finished


def test_a_shard_that_comes_twice_counts_once(whole: pathlib.Path) -> None:
    """A shard that is listed twice is scored once."""
    scorer, finished = _scorer(_folder(whole))
    shard = finished.shards[0]
    counted = [
        totals.by_shard for totals, _, _ in scorer.batches((shard.shard, [shard, shard]), examples=finished.examples)
    ]
    assert counted == [((shard.shard, shard.examples),)]


def test_a_shard_that_was_replaced_is_refused(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A shard replaced after decoding was complete is refused, also one with too few outputs."""
    shutil.copytree(_folder(whole), tmp_path / "folder")
    scorer, finished = _scorer(tmp_path / "folder")
    shard = finished.shards[0]
    path = tmp_path / "folder" / f"generations-{shard.shard:05d}-of-00003.parquet"
    generations = list(read_generations(path))
    fewer = [dataclasses.replace(each, outputs=each.outputs[:-1]) for each in generations]
    write_generations(path, fewer, shard=shard.shard, digest=shard.digest)
    with pytest.raises(OutputsError, match=r"has 5 outputs, not one for the full model and each of 5 thresholds\."):
        list(scorer.batches((shard.shard, [shard]), examples=finished.examples))
    write_generations(path, generations[1:], shard=shard.shard, digest=shard.digest)
    assert stored_shard(str(path)).examples == shard.examples - 1
    with pytest.raises(OutputsError, match=r"was replaced after decoding was complete\. Decode again"):
        list(scorer.batches((shard.shard, [shard]), examples=finished.examples))


def test_other_software_is_told_apart(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Shards of two versions are never mixed; recalibrated, the manifest names the versions of both steps."""
    from calm_beam.manifest import versions

    _interrupted(whole, tmp_path / "out")
    monkeypatch.setattr(versions, "__version__", "99")
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 2
    assert re.search(r"software\.calm-beam is '[^']+' there, '99' here", _error(capsys))
    assert _recalibrate(whole, tmp_path / "again") == 0
    manifest: Manifest = read_manifest(tmp_path / "again" / "manifest.json")
    decoded = read_manifest(whole / "manifest.json").software
    assert manifest.software == {**decoded, "calm-beam": "99", "calm-beam (decoding)": decoded["calm-beam"]}
