"""`--log_to`, tested with the real clients without a network; tests of clients that are not installed are skipped."""

import importlib
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from calm_beam.launch import trackers
from calm_beam.launch.cli import main
from calm_beam.launch.flags.requests import TRACKERS
from tests.setup_file import read_setup

_LOSSES = "".join(f"{example},a,0,2\n{example},b,1,1\n" for example in range(60))
_TRAIN = (
    *("train", "--steps=3", "--batch_tokens=16", "--max_input_length=4", "--max_target_length=4", "--vocab_size=22"),
    *("--emb_dim=16", "--num_heads=2", "--head_dim=8", "--mlp_dim=16", "--num_encoder_layers=1"),
    *("--num_decoder_layers=2", "--data=rows.jsonl", "--validation_data=rows.jsonl", "--output=model"),
)


@pytest.fixture
def certification(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that proves one of two settings, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.csv").write_text(f"id,setting,loss,cost\n{_LOSSES}", encoding="utf-8")
    return ["certify", "--losses=losses.csv", "--order_by=cost", "--delta", "0.2", "--output=out"]


@pytest.fixture
def training(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that trains a tiny model for three steps."""
    monkeypatch.chdir(tmp_path)
    rows = [{"input": f"the {noun} sees a mouse", "references": [f"mouse {noun}"]} for noun in ("cat", "dog", "owl")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3), encoding="utf-8")
    return list(_TRAIN)


@pytest.fixture
def mlflow(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """MLflow's client, whose runs are files."""
    module = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'calm-beam[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    module.set_tracking_uri(f"file://{tmp_path / 'mlruns'}")
    return module.MlflowClient()


@pytest.fixture
def wandb(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder to which the client of Weights & Biases writes."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'calm-beam[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return tmp_path / "wandb"


def _mlflow_run(client: Any) -> Any:
    (run,) = client.search_runs(["0"])
    return run


def test_mlflow_has_a_certification(certification: list[str], mlflow: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """MLflow gets flags, the numbers of each promise, and all files; standard output holds the JSON alone."""
    assert main([*certification, "--log_to=mlflow", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"].endswith("/out")
    run = _mlflow_run(mlflow)
    assert run.info.status == "FINISHED"
    assert run.data.params.items() >= {"command": "certify", "delta": "0.2", "order_by": "cost"}.items()
    promise = "given/delta 0.2/epsilon 0.05"
    found = run.data.metrics
    assert (found[f"{promise}/cost"], found[f"{promise}/risk"]) == (2, 0)
    names = {file.path for file in mlflow.list_artifacts(run.info.run_id)}
    assert names == {"manifest.json", "risk_table.csv", "report.html"}


def test_mlflow_has_curves_of_a_training(training: list[str], mlflow: Any) -> None:
    """MLflow gets every report of training steps, with the losses of all layers, and the log."""
    assert main([*training, "--log_to=mlflow"]) == 0
    run = _mlflow_run(mlflow)
    logged = [json.loads(line) for line in pathlib.Path("model/training_log.jsonl").read_text().splitlines()]
    curve = mlflow.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in curve] == [(row["step"], row["loss"]) for row in logged]
    assert run.data.metrics["validation_loss/layer_2"] == logged[-1]["validation_losses"][1]
    assert [file.path for file in mlflow.list_artifacts(run.info.run_id)] == ["training_log.jsonl"]


def test_what_fails_after_its_first_step_is_a_failed_run(
    training: list[str], mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after the first step makes a failed run; an earlier one makes no run."""
    assert main([*training, "--log_to=mlflow", "--steps=nine"]) == 2
    assert mlflow.search_runs(["0"]) == []

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("calm_beam.launch.train.run._write", refuse)
    assert main([*training, "--log_to=mlflow"]) == 1
    assert _mlflow_run(mlflow).info.status == "FAILED"


def _wandb_records(content: bytes) -> Iterator[bytes]:
    """Yields the records of a file: blocks of 32 KiB, as in LevelDB's log, of which the first begins with a header."""
    block, head = 32768, struct.Struct("<IHB")
    at, record = head.size, b""
    while at < len(content):
        if block - at % block < head.size:
            # Too little for another record.
            at += block - at % block
        _, size, kind = head.unpack_from(content, at)
        record += content[at + head.size : at + head.size + size]
        at += head.size + size
        if kind in (1, 4):
            # A whole record, or the last part of one.
            yield record
            record = b""


def _kept_by_wandb(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns configuration and summary of an offline run, as `wandb sync` reads them."""
    # The client's own process closes the file after `finish` has returned; `teardown`, else called at exit, waits.
    importlib.import_module("wandb").teardown()
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    config, summary = dict[str, Any](), dict[str, Any]()
    for data in _wandb_records(path.read_bytes()):
        record = records.Record.FromString(data)
        for items, kept in ((record.config.update, config), (record.run.config.update, config)):
            kept.update({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        for item in (*record.summary.update, *record.history.item):
            summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return config, summary


def test_wandb_has_table_and_page(certification: list[str], wandb: pathlib.Path) -> None:
    """Weights & Biases gets an offline run for `wandb sync`, with the result's files and its table."""
    assert main([*certification, "--log_to=wandb"]) == 0
    (run,) = wandb.glob("offline-run-*")
    (record,) = run.glob("*.wandb")
    config, found = _kept_by_wandb(record)
    assert config["order_by"] == "cost"
    assert found["given/delta 0.2/epsilon 0.05/cost"] == 2
    assert (found["risk_table/_type"], found["report/_type"]) == ("table-file", "html-file")
    assert [*run.rglob("risk_table*.table.json")]
    assert [*run.rglob("report*.html")]


def test_tensorboard_has_curves_and_tables(
    training: list[str], certification: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard gets scalars of all steps, and a certification's table as a run of its own; its folder is named."""
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: pip install 'calm-beam[tensorboard]'")
    event_class = importlib.import_module("tensorboardX.proto.event_pb2").Event

    def events(name: str) -> list[Any]:
        (path,) = pathlib.Path("runs").glob(f"*_calm-beam-{name}/events.*")
        content, found, at = path.read_bytes(), [], 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 8], "little")
            found.append(event_class.FromString(content[at + 12 : at + 12 + size]))
            at += 16 + size
        return found

    assert main([*training, "--log_to=tensorboard"]) == 0
    scalars = [(each.tag, event.step) for event in events("train") for each in event.summary.value]
    assert {("loss", 3), ("validation_loss/layer_1", 3), ("params/text_summary", 0)} <= {*scalars}
    assert main([*certification, "--log_to=tensorboard"]) == 0
    assert re.search(r"--log_to=tensorboard: runs/\S+_calm-beam-certify$", capsys.readouterr().err, re.MULTILINE)
    texts = {
        each.tag: each.tensor.string_val[0].decode()
        for event in events("certify")
        for each in event.summary.value
        if each.tensor.string_val
    }
    assert "| order_by | cost |" in texts["params/text_summary"]
    assert "| setting | n | loss_sum |" in texts["risk_table/text_summary"]
    assert texts["status/text_summary"] == "finished"


@pytest.mark.parametrize("argv", [["--log_to=neptune"], ["--log_to"]])
def test_other_trackers_are_refused(
    certification: list[str], capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    """An unknown tracker is refused with the list of known ones; nothing has been written."""
    assert main([*certification, *argv]) == 2
    assert "expected mlflow, wandb or tensorboard." in capsys.readouterr().err
    assert not pathlib.Path("out").exists()


def test_a_client_that_is_not_there_is_missed_before_the_work(
    certification: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tracker whose client is missing is refused before the work, with the name of the extra."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main([*certification, "--log_to=wandb"]) == 2
    assert "pip install 'calm-beam[wandb]'" in capsys.readouterr().err
    assert not pathlib.Path("out").exists()


def test_a_tracker_that_breaks_down_takes_nothing_along(
    certification: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a tracker fails, the result is kept, and one line says what was not logged."""

    def refuse(name: str, params: Any) -> Any:
        raise ConnectionError("the server is away.")

    monkeypatch.setattr(trackers, "_import_client", lambda tracker: None)
    monkeypatch.setattr(trackers, "_RUNS", {"mlflow": refuse})
    assert main([*certification, "--log_to=mlflow"]) == 0
    assert pathlib.Path("out/manifest.json").is_file()
    assert capsys.readouterr().err.count("caution: --log_to=mlflow: the server is away.") == 1


def test_each_tracker_is_an_extra() -> None:
    """Each tracker has an extra of its own name, as messages say."""
    assert {*TRACKERS} <= read_setup()["extras_require"].keys()


def test_clients_are_imported_where_they_are_asked_for() -> None:
    """Clients are imported when used, not by the command line, since they take seconds."""
    code = "import sys, calm_beam.launch.cli; sys.exit(bool({'mlflow', 'wandb', 'tensorboardX'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
