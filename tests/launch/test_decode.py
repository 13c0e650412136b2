"""`calm-beam decode`: one row per prompt and threshold."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from calm_beam.launch.cli import main
from tests.builders import build_arrays, write_t5x
from tests.pipelines import (
    BROKEN_ID,
    CONFIG,
    SETTINGS,
    SHORT_FLAGS,
    id_rows,
    text_rows,
    write_model,
    write_rows,
    write_vocabulary,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("decode") / "model")


def _decode(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    return main(["decode", f"--checkpoint={model}", f"--data={data}", f"--output={output}", *SHORT_FLAGS, *flags])


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows(model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts come in the order of the data, each in full first, then at every threshold, descending."""
    data = write_rows(tmp_path / "rows.jsonl", id_rows(12))
    output = tmp_path / "out.jsonl"
    assert _decode(model, data, output) == 0
    rows = _read(output)
    expected = [(row["id"], threshold) for row in id_rows(12) for threshold in (None, *SETTINGS.thresholds)]
    assert [(row["id"], row["threshold"]) for row in rows] == expected
    for row in rows:
        assert list(row) == ["id", "threshold", "tokens", "text", "exit_layers", "confidences"]
        assert 1 <= len(row["tokens"]) == len(row["exit_layers"]) == len(row["confidences"]) <= 6
        assert 1 not in row["tokens"][:-1]
        assert len(row["tokens"]) == 6 or row["tokens"][-1] == 1
        assert 0 not in row["tokens"] or row["threshold"] is not None
        assert row["text"] == " ".join(str(token) for token in row["tokens"] if token != 1)
        layers = {4} if row["threshold"] is None else {1} if row["threshold"] == 0 else {1, 2, 3, 4}
        assert set(row["exit_layers"]) <= layers
        for layer, confidence in zip(row["exit_layers"], row["confidences"], strict=True):
            assert 0 <= confidence <= 1
            assert layer == 4 or confidence >= row["threshold"]
    assert f"12 prompts at 5 thresholds and in full: {output}" in capsys.readouterr().out


@pytest.mark.slow
def test_what_no_array_shows_reaches_the_workers(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A T5X model is decoded as declared, like a native one with the same declarations; assumptions are printed."""
    write_t5x(tmp_path / "run", build_arrays(CONFIG, 0))
    config = dataclasses.replace(CONFIG, activation="silu")
    silu = write_model(tmp_path / "silu", config=config)
    data = write_rows(tmp_path / "rows.jsonl", id_rows(4))
    assert _decode(model, data, tmp_path / "gelu.txt") == 0
    assert _decode(silu, data, tmp_path / "silu.txt") == 0
    capsys.readouterr()
    assert _decode(tmp_path / "run", data, tmp_path / "declared.txt", "--activation=silu") == 0
    assert "note: Relative max distance is assumed to be 128, as in T5" in capsys.readouterr().err
    assert (tmp_path / "declared.txt").read_bytes() == (tmp_path / "silu.txt").read_bytes()
    assert (tmp_path / "declared.txt").read_bytes() != (tmp_path / "gelu.txt").read_bytes()
    assert _decode(silu, data, tmp_path / "no.txt", "--activation=gelu") == 2
    assert "activation is silu by" in capsys.readouterr().err


def test_sentinels_of_the_tokenizer(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt with sentinels is decoded as with --extra_ids once a file of the tokenizer names them."""
    model = write_model(tmp_path / "model", vocabulary=write_vocabulary(tmp_path / "trained.model"))
    data = write_rows(tmp_path / "rows.jsonl", [{"input": "the <extra_id_0> sees <extra_id_1>"}])
    assert _decode(model, data, tmp_path / "none.txt") == 0
    assert _decode(model, data, tmp_path / "given.txt", "--extra_ids=5") == 0
    (model / "tokenizer_config.json").write_text('{"extra_ids": 5}')
    assert _decode(model, data, tmp_path / "named.txt") == 0
    assert _decode(model, data, tmp_path / "zero.txt", "--extra_ids=0") == 0
    given, none, named, zero = ((tmp_path / f"{name}.txt").read_bytes() for name in ("given", "none", "named", "zero"))
    assert named == given != none == zero
    assert _decode(model, data, tmp_path / "no.txt", "--extra_ids=1000000000") == 2
    assert "extra_ids must be from 0 to 100000" in capsys.readouterr().err
    assert _decode(model, data, tmp_path / "no.txt", "--extra_ids=100") == 2
    assert "has 140 ids, the model's output head 64" in capsys.readouterr().err


def test_files_come_one_after_the_other(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Several files are sorted by name, and lines keep their order, however the work is split.

    Rows are the same but for the last bits of confidences, which move with what is computed in one batch.
    """
    rows = id_rows(9)
    write_rows(tmp_path / "b.jsonl", rows[:4])
    write_rows(tmp_path / "a.jsonl", rows[4:])
    assert _decode(model, tmp_path / "*.jsonl", tmp_path / "one.txt", "--num_shards=1") == 0
    assert _decode(model, tmp_path / "*.jsonl", tmp_path / "many.txt", "--num_shards=16") == 0
    assert [row["id"] for row in _read(tmp_path / "one.txt")[::6]] == [row["id"] for row in [*rows[4:], *rows[:4]]]
    one, many = (_read(tmp_path / name) for name in ("one.txt", "many.txt"))
    confidences = [[row.pop("confidences") for row in rows] for rows in (one, many)]
    assert one == many
    for ours, theirs in zip(*confidences, strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=1e-5)


def test_texts(tmp_path: pathlib.Path) -> None:
    """Text prompts give text: characters stay as they are, and rows without ids get one."""
    vocabulary = write_vocabulary(tmp_path / "trained.model")
    model = write_model(tmp_path / "model", vocabulary=vocabulary)
    data = write_rows(tmp_path / "rows.jsonl", text_rows(5))
    assert _decode(model, data, tmp_path / "out.jsonl") == 0
    rows = _read(tmp_path / "out.jsonl")
    assert len(rows) == 5 * 6
    assert len({row["id"] for row in rows}) == 5
    # The last row repeats the first one's prompt, and decodes alike.
    assert [row["tokens"] for row in rows[:6]] == [row["tokens"] for row in rows[24:]]
    assert any(character.isalpha() for row in rows for character in row["text"])
    assert "\\u" not in (tmp_path / "out.jsonl").read_text(encoding="utf-8")


def test_failed_prompts_have_a_row(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --on_error=worst_case a prompt that cannot be decoded has one row that says why, in its place."""
    model = write_model(tmp_path / "model", is_broken=True)
    broken = {"id": "broken", "input_ids": [BROKEN_ID, 1]}
    data = write_rows(tmp_path / "rows.jsonl", [*id_rows(2), broken, {"id": "last", "input_ids": [5, 1]}])
    assert _decode(model, data, tmp_path / "out.jsonl", "--on_error=worst_case") == 0
    rows = _read(tmp_path / "out.jsonl")
    assert rows[12] == {"id": "broken", "failure": "the model gave logits that are not finite"}
    assert rows[13]["id"] == "last"
    assert len(rows) == 3 * 6 + 1
    assert "1 prompt could not be decoded" in capsys.readouterr().out
    assert _decode(model, data, tmp_path / "other.jsonl") == 1
    assert "example broken: the model gave logits that are not finite" in capsys.readouterr().err
    assert not (tmp_path / "other.jsonl").exists()


def test_a_failed_run_leaves_nothing(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed run leaves the old output unchanged and no temporary file."""
    rows = [*id_rows(120), {"id": "row-3", "input_ids": [5, 1]}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "out.jsonl").write_text("old")
    assert _decode(model, data, tmp_path / "out.jsonl", "--overwrite") == 1
    assert "id 'row-3' occurs 2 times" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "out.jsonl"}


def test_output_appears_whole_or_not_at_all(
    model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full at the end gives status 1 and no partial output."""

    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    data = write_rows(tmp_path / "rows.jsonl", id_rows(2))
    monkeypatch.setattr(os, "fsync", fail)
    assert _decode(model, data, tmp_path / "out.jsonl") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl"}


def test_an_existing_output_is_kept(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is there is refused unless --overwrite is given."""
    data = write_rows(tmp_path / "rows.jsonl", id_rows(2))
    (tmp_path / "out.jsonl").write_text("mine")
    assert _decode(model, data, tmp_path / "out.jsonl") == 2
    expected = f"--output {tmp_path / 'out.jsonl'}: exists already. Choose another file, or pass --overwrite."
    assert expected in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "mine"
    assert _decode(model, data, tmp_path / "out.jsonl", "--overwrite") == 0
    assert len(_read(tmp_path / "out.jsonl")) == 12


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--output is missing: the JSONL file to write."),
        (["--output={tmp}"], "--output {tmp}: is a directory, expected a file such as {tmp}/outputs.jsonl."),
        (["--output={tmp}/no/out.jsonl"], "--output {tmp}/no/out.jsonl: the folder {tmp}/no does not exist."),
        (
            ["--output=s3://b/out.jsonl"],
            "--output s3://b/out.jsonl: of object stores only",
        ),
        (["--output={tmp}/x", "--runner=DataflowRunner"], "--project is missing"),
        (["--output={tmp}/x", "--accelerator=nvidia-l4"], "--accelerator is for --runner=DataflowRunner"),
        (["--output={tmp}/x", "--delta=0.1"], "unknown flag --delta."),
    ],
)
def test_bad_usage(
    flags: list[str],
    message: str,
    model: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each has status 2 and says what was expected."""
    data = write_rows(tmp_path / "rows.jsonl", id_rows(2))
    filled = [flag.format(tmp=tmp_path) for flag in flags]
    assert main(["decode", f"--checkpoint={model}", f"--data={data}", *SHORT_FLAGS, *filled]) == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl"}


def test_thresholds_are_required(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thresholds to decode at are required; either flag will do."""
    data = write_rows(tmp_path / "rows.jsonl", id_rows(2))
    flags = [f"--checkpoint={model}", f"--data={data}", f"--output={tmp_path / 'out.jsonl'}", *SHORT_FLAGS[1:]]
    assert main(["decode", *flags]) == 2
    assert "--thresholds is missing: exit thresholds, comma-separated (or --grid_step)." in capsys.readouterr().err
    assert main(["decode", *flags, "--grid_step=0.2"]) == 0
    assert [row["threshold"] for row in _read(tmp_path / "out.jsonl")[:6]] == [None, 0.8, 0.6, 0.4, 0.2, 0.0]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_devices_that_share_a_model(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On eight devices with two per model, outputs are those of one device; too few devices end the run."""
    data = write_rows(tmp_path / "rows.jsonl", id_rows(12))
    alone, together = tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    assert _decode(model, data, alone) == 0
    capsys.readouterr()
    assert _decode(model, data, together, "--model_parallelism=2") == 1
    assert "model_parallelism is 2, but this process has 1 device" in capsys.readouterr().err
    assert _decode(model, data, together, "--model_parallelism=2", "--exit_head=int8") == 2
    assert "exit_head is int8, but model_parallelism is 2" in capsys.readouterr().err
    assert not together.exists()
    program = "import sys; from calm_beam.launch.cli import main; sys.exit(main(sys.argv[1:]))"
    paths = [f"--checkpoint={model}", f"--data={data}", f"--output={together}"]
    run = subprocess.run(
        [sys.executable, "-c", program, "decode", *paths, *SHORT_FLAGS, "--model_parallelism=2", "--verbose"],
        env={**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "on each of 2 devices" in run.stderr.splitlines()[0]
    # Confidences differ in their last digits.
    for expected, found in zip(_read(alone), _read(together), strict=True):
        assert (found["id"], found["tokens"]) == (expected["id"], expected["tokens"])
        assert found["exit_layers"] == expected["exit_layers"]
